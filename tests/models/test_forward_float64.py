"""The judge itself is judged: by llama.cpp's logits, and by its intermediates name for name."""

from pathlib import Path

import numpy as np
import pytest
from forward_float64 import Forward, golden_difference

from pnrt.container.gguf import open_gguf

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
NAMES = {
    "attn_norm": "attn_norm-{}",
    "q": "Qcur-{}#2",
    "k": "Kcur-{}#2",
    "v": "Vcur-{}#1",
    "attn": "kqv_out-{}",
    "attn_out": "attn_out-{}",
    "attn_residual": "ffn_inp-{}",
    "ffn_norm": "ffn_norm-{}",
    "ffn_gate": "ffn_gate-{}",
    "ffn_up": "ffn_up-{}",
    "ffn_swiglu": "ffn_swiglu-{}",
    "ffn_out": "ffn_out-{}",
    "out": "l_out-{}",
}


@pytest.mark.parametrize("name", ["llama_s.f32", "qwen3_s.f32", "qwen35_s_mtp.f32"])
def test_logits_of_llama_cpp(name):
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        worst, wrong = golden_difference(file, np.load(GOLDEN / f"{name}.ref.npz"), ["p7", "p33"])
    assert worst < 1e-4
    assert wrong == 0


def test_a_wrong_epsilon_is_seen():
    with open_gguf(GOLDEN / "llama_s.f32.gguf") as file:
        file.metadata["llama.attention.layer_norm_rms_epsilon"] = 1e-3
        worst, _ = golden_difference(file, np.load(GOLDEN / "llama_s.f32.ref.npz"), ["p7"])
    assert worst > 1e-3


def test_intermediates_of_llama_cpp():
    stored = np.load(GOLDEN / "llama_s.intermediates.p7.npz")
    golden = np.load(GOLDEN / "llama_s.f32.ref.npz")
    trace = {}
    with open_gguf(GOLDEN / "llama_s.f32.gguf") as file:
        Forward(file).run([*golden["p7.tokens"], golden["p7.dec_tokens"][0]], trace)
    pairs = {"embd": "embd", "result_norm": "result_norm", "logits": "result_output"}
    for il in range(2):
        pairs |= {f"blk.{il}.{ours}": theirs.format(il) for ours, theirs in NAMES.items()}
    assert pairs.keys() == trace.keys()
    for ours, theirs in pairs.items():
        value = trace[ours].reshape(8, -1)
        for step, rows in (("s0", value[:7]), ("s1", value[7:])):
            expected = stored[f"{step}/{theirs}"].reshape(rows.shape)
            np.testing.assert_allclose(rows, expected, atol=2e-5, err_msg=f"{step} {ours}")
