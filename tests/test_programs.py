"""Every step of a program against what llama.cpp computes there, and against float64, by name."""

import numpy as np
import pytest

from pnrt.container.gguf import open_gguf

from .golden_models import MODELS, golden, load_golden, path_of
from .models.forward_float64 import Forward

# step -> name in llama.cpp's graph; of a name given twice the later "#k" follows the earlier
LLAMA = {
    "attn_norm": ["attn_norm"],
    "q": ["Qcur"],
    "k": ["Kcur"],
    "v": ["Vcur"],
    "q_norm": ["Qcur_normed"],
    "k_norm": ["Kcur_normed"],
    "q_rope": ["Qcur#3", "Qcur#2"],
    "k_rope": ["Kcur#3", "Kcur#2"],
    "attn": ["kqv_out"],
    "attn_output": ["attn_out"],
    "attn_residual": ["ffn_inp"],
    "ffn_norm": ["ffn_norm"],
    "ffn_gate": ["ffn_gate"],
    "ffn_up": ["ffn_up"],
    "ffn_act": ["ffn_swiglu"],
    "ffn_down": ["ffn_out"],
    "ffn_residual": ["l_out"],
}
QWEN35 = {
    "attn_norm": ["attn_norm"],
    "attn_qkv": ["linear_attn_qkv_mixed"],
    "attn_gate": ["z"],
    "ssm_alpha": ["alpha"],
    "ssm_beta": ["beta"],
    "ssm_conv": ["conv_output_silu"],
    "ssm_beta_sigmoid": ["beta_sigmoid"],
    "ssm_decay": ["gate"],
    "ssm_q_norm": ["q_conv_predelta"],
    "ssm_k_norm": ["k_conv_predelta"],
    "delta": ["attn_output"],
    "ssm_gated": ["final_output"],
    "ssm_out": ["linear_attn_out"],
    "q": ["Qcur_full"],
    "k": ["Kcur"],
    "v": ["Vcur"],
    "q_norm": ["Qcur_normed"],
    "k_norm": ["Kcur_normed"],
    "q_rope": ["Qcur"],
    "k_rope": ["Kcur#1"],
    "attn": ["attn_pregate"],
    "attn_gated": ["attn_gated"],
    "attn_output": ["attn_output"],
    "attn_residual": ["attn_residual"],
    "post_attention_norm": ["attn_post_norm"],
    "ffn_gate": ["ffn_gate"],
    "ffn_up": ["ffn_up"],
    "ffn_act": ["ffn_swiglu"],
    "ffn_down": ["ffn_out"],
    "ffn_residual": ["l_out"],
}
# step -> name in the float64 judge's trace
FLOAT64 = {
    "attn_norm": "attn_norm",
    "q_rope": "q",
    "k_rope": "k",
    "v": "v",
    "attn_gated": "attn",
    "attn_output": "attn_out",
    "attn_qkv": "qkv",
    "attn_gate": "z",
    "ssm_conv": "conv",
    "ssm_beta_sigmoid": "beta",
    "ssm_decay": "decay",
    "delta": "delta",
    "ssm_out": "attn_out",
    "attn_residual": "attn_residual",
    "post_attention_norm": "ffn_norm",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up",
    "ffn_act": "ffn_swiglu",
    "ffn_down": "ffn_out",
    "ffn_residual": "out",
}


def intermediates(name):
    """The file of llama.cpp's intermediates of a model's exact weights."""
    return path_of(name).with_name(f"{name.partition('.')[0]}.intermediates.p7.npz")


EXACT = [n for n in MODELS if n.endswith((".f32", ".f16")) and intermediates(n).exists()]


def steps_of(model, tokens):
    """Step name -> its output, of a run over tokens from the present state."""
    found = {}
    model.session.observer = lambda tap: found.update({tap.step.name: tap.values().copy()})
    model.eval(tokens, all=True)
    model.session.observer = None
    return found


def theirs(stored, run, step, names):
    """llama.cpp's value of a step, and its name; None where the file has none."""
    block, _, role = step.removeprefix("blk.").partition(".")
    if not step.startswith("blk."):
        around = {"token_embd": "embd", "output_norm": "result_norm", "output": "result_output"}
        options = [around.get(step, ""), {"token_embd": "model.input_embed"}.get(step, "")]
    else:
        options = [
            f"{n.partition('#')[0]}-{block}{''.join(n.partition('#')[1:])}"
            for n in names.get(role, [])
        ]
    return next((stored[f"{run}/{o}"] for o in options if f"{run}/{o}" in stored), None)


@pytest.mark.parametrize("name", EXACT)
def test_steps_have_llama_cpps_values(name):
    short = name.partition(".")[0]
    stored = np.load(intermediates(name))
    ref = golden(name, "ref")
    names = QWEN35 if short.startswith("qwen35") else LLAMA
    compared = set()
    with load_golden(name, activations="f32", kv="f32") as model:
        for run, tokens in (("s0", ref["p7.tokens"]), ("s1", ref["p7.dec_tokens"][:1])):
            for step, got in steps_of(model, tokens).items():
                expected = theirs(stored, run, step, names)
                if expected is None:
                    continue
                role = step.partition(".")[2].partition(".")[2] or step
                compared.add(role)
                expected = expected.reshape(got.shape)
                if role == "ssm_q_norm":
                    # llama.cpp scales the query afterwards
                    expected = expected * model.config.delta.state_size**-0.5
                if role == "ssm_decay":
                    expected = np.exp(expected)
                np.testing.assert_allclose(got, expected, atol=2e-4, err_msg=f"{run} {step}")
            for state, got in model.snapshot().states.items():
                block, _, kind = state.removeprefix("blk.").partition(".")
                if kind == "delta.state":
                    expected = stored[f"{run}/new_state-{block}"].swapaxes(1, 2)
                    np.testing.assert_allclose(got, expected, atol=2e-4, err_msg=f"{run} {state}")
                    compared.add("delta.state")
    assert len(compared) > (25 if names is QWEN35 else 14), compared


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith("qwen35")])
def test_steps_of_qwen35_are_near_float64(name):
    tokens = golden(name, "ref")["p7.tokens"]
    trace, compared = {}, set()
    with open_gguf(path_of(name)) as file:
        Forward(file, "none" if name.endswith(".pn") else None).run(tokens, trace)
    with load_golden(name, activations="f32", kv="f32") as model:
        for step, got in steps_of(model, tokens).items():
            block, role = step.split(".")[1:3] if step.startswith("blk.") else ("", step)
            if role in FLOAT64:
                expected = trace[f"blk.{block}.{FLOAT64[role]}"].reshape(got.shape)
                expected = np.exp(expected) if role == "ssm_decay" else expected
                np.testing.assert_allclose(got, expected, atol=2e-4, err_msg=f"{name} {step}")
                compared.add(role)
        for state, got in model.snapshot().states.items():
            if state.endswith("delta.state"):
                expected = trace[f"blk.{state.split('.')[1]}.state"].swapaxes(1, 2)
                np.testing.assert_allclose(got, expected, atol=2e-4, err_msg=f"{name} {state}")
    assert compared == FLOAT64.keys()
