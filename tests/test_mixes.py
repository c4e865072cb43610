"""Which format a tensor gets: the published table of Qwen3.8-27B-PN3, and each format by itself."""

from __future__ import annotations

import numpy as np
import pytest

from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.errors import FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.mixes import MIXES, find_mix
from pnrt.quantize import plan, quantize_file

WRITABLE = [f.name for f in FORMATS.values() if f.weight and f.type_id is not None]

# tensor, K, format: "Files that use PN" of the format's page, with the model's three K
PUBLISHED = [
    ("token_embd.weight", 5120, "q3_K"),
    ("output.weight", 5120, "q4_K"),
    ("blk.3.attn_q.weight", 5120, "pn3t"),
    ("blk.3.attn_k.weight", 5120, "pn4t"),
    ("blk.3.attn_v.weight", 5120, "pn4t"),
    ("blk.3.attn_output.weight", 6144, "pn4t"),
    ("blk.0.attn_qkv.weight", 5120, "pn3t"),
    ("blk.0.attn_gate.weight", 5120, "pn3t"),
    ("blk.0.ssm_alpha.weight", 5120, "q8_0"),
    ("blk.0.ssm_beta.weight", 5120, "q8_0"),
    ("blk.0.ssm_out.weight", 6144, "pn4t"),
    ("blk.0.ffn_gate.weight", 5120, "pn3t"),
    ("blk.0.ffn_up.weight", 5120, "pn3t"),
    ("blk.0.ffn_down.weight", 17408, "pn4t"),
]
KEPT = ["blk.0.attn_norm.weight", "blk.0.ssm_a", "blk.0.ssm_conv1d.weight"]


def written(path, shapes):
    """A GGUF file of small random float32 tensors: name -> shape."""
    rng = np.random.default_rng(0)
    plans = []
    for name, shape in shapes.items():
        x = rng.standard_normal(shape).astype("<f4")
        plans.append(TensorPlan(name, shape, 0, x.nbytes, lambda x=x: iter([x])))
    write_gguf(path, [("general.architecture", "string", "qwen35")], plans)
    return path


def test_p0k_is_the_published_table(tmp_path):
    shapes = {name: (2, k) for name, k, _ in PUBLISHED} | dict.fromkeys(KEPT, (5120,))
    with open_gguf(written(tmp_path / "m.gguf", shapes)) as file:
        got = {d.name: d.target for d in plan(file, "p0k")}
        assert got == {name: kind for name, _, kind in PUBLISHED} | dict.fromkeys(KEPT, "f32")
        # the 19 promotions of P0k+19 are the user's to name
        promoted = plan(file, "p0k", [(r"blk\.0\.ffn_up", "pn4t")])
        assert {d.name: d.target for d in promoted}["blk.0.ffn_up.weight"] == "pn4t"


@pytest.mark.parametrize(
    ("mix", "k", "target", "words"),
    [
        ("pn3", 160, "pn3t", "mix"),
        ("pn3", 192, "pn4t", "K = 192 is no multiple of pn3t's 80"),
        ("pn3", 96, "q8_0", "K = 96 is no multiple of pn4t's 64"),
        ("pn3", 100, "f16", "K = 100 is no multiple of q8_0's 32"),
        ("q4_k_m", 320, "q5_0", "K = 320 is no multiple of q4_K's 256"),
        ("q4_k_m", 80, "f16", "K = 80 is no multiple of q5_0's 32"),
        ("iq4_xs", 320, "iq4_nl", "K = 320 is no multiple of iq4_xs's 256"),
        ("q6_K", 320, "q8_0", "K = 320 is no multiple of q6_K's 256"),
        ("nvfp4", 96, "q8_0", "K = 96 is no multiple of nvfp4's 64"),
    ],
)
def test_where_the_block_does_not_divide_the_plan_falls_back_and_says_so(
    tmp_path, mix, k, target, words
):
    with open_gguf(written(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (3, k)})) as file:
        (decision,) = plan(file, mix)
    assert (decision.target, decision.shape) == (target, (3, k))
    assert words in decision.reason
    # the stored rows are exactly K weights long: nothing is padded
    assert decision.target_bytes == 3 * FORMATS[target].row_bytes(k)


@pytest.mark.parametrize("name", WRITABLE)
def test_every_format_is_a_mix_and_is_written(tmp_path, name):
    tensors = {"blk.0.ffn_up.weight": (3, 1280), "blk.0.attn_norm.weight": (1280,)}
    source, out = written(tmp_path / "m.gguf", tensors), tmp_path / "o.gguf"
    quantize_file(source, out, name)
    with open_gguf(source) as before, open_gguf(out) as after:
        info = after.tensors["blk.0.ffn_up.weight"]
        assert info.format is FORMATS[name]
        expected = FORMATS[name].quantize(before.values("blk.0.ffn_up.weight"))
        assert np.array_equal(after.rows("blk.0.ffn_up.weight"), expected)
        assert after.tensors["blk.0.attn_norm.weight"].type_name == "f32"


def test_find_mix():
    assert find_mix("p0k", WRITABLE) is MIXES["p0k"]
    assert find_mix("bf16", WRITABLE).ends == ("bf16",)
    with pytest.raises(ModelError, match="each format by itself: f32, bf16"):
        find_mix("q8_1", WRITABLE)
    with pytest.raises(ModelError, match="--e4m3-id 42"):
        find_mix("e4m3", WRITABLE)
    with pytest.raises(FormatError, match="takes K = 100"):
        MIXES["f16"].__class__("x", ("pn4t",)).choose("blk.0.ffn_up.weight", 100)
