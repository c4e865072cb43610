"""qwen35 as a program: gated delta-rule blocks and gated attention blocks (MODELS.md 6).

A value head h of a recurrent block reads key head h mod key_heads; the query heads of an attention
block read consecutive groups, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Container

from pnrt.errors import ModelError
from pnrt.models.config import Config
from pnrt.models.rotation import Rotation
from pnrt.models.steps import Builder, root
from pnrt.program import Program


def build(config: Config, tensors: Container[str], rotation: Rotation | None = None) -> Program:
    """Build the program of a qwen35 model.

    Args:
        config: the model's numbers, delta among them.
        tensors: names present in the file (biases and `output.weight` are optional).
        rotation: how the file's matrices are stored; None for unrotated.
    Raises:
        ModelError: a rotation that says ssm_out's columns are grouped but does not rotate it.
    """
    delta, dim = config.delta, config.head_dim
    widest, keys = max(config.d_ff), delta.key_heads * delta.state_size
    heads = [n for n, r in zip(config.n_heads, config.recurrent, strict=True) if not r]
    groups = [n for n, r in zip(config.n_kv_heads, config.recurrent, strict=True) if not r]
    slots = {"h": config.d_model}
    if heads:
        # each head's query is followed by its gate
        slots |= {"qg": 2 * max(heads) * dim, "q": max(heads) * dim, "k": max(groups) * dim}
        slots |= {"v": max(groups) * dim, "a": max(heads) * dim}
    if any(config.recurrent):
        slots |= {"qkv": delta.channels, "z": delta.inner, "beta": delta.value_heads}
        slots |= {"alpha": delta.value_heads, "decay": delta.value_heads, "conv": delta.channels}
        slots |= {"dq": keys, "dk": keys, "d": delta.inner}
    slots |= {"o": config.d_model, "gate": widest, "up": widest, "act": widest}
    builder = Builder(config, tensors, rotation or Rotation(), slots)
    builder.embed()
    for il in range(config.n_layers):
        b = f"blk.{il}."
        builder.norm(f"{b}attn_norm", "x", f"{b}attn_norm.weight", "h", config.d_model)
        if config.recurrent[il]:
            _delta_block(builder, b)
        else:
            _attention_block(builder, il)
        builder.step(f"{b}attn_residual", "add", ["x", "o"], [], "x")
        builder.feed_forward(il, "post_attention_norm")
    return builder.program()


def _attention_block(builder: Builder, il: int) -> None:
    config, b = builder.config, f"blk.{il}."
    heads, groups, dim = config.n_heads[il], config.n_kv_heads[il], config.head_dim
    for part, slot in (("q", "qg"), ("k", "k"), ("v", "v")):
        builder.linear(f"{b}{part}", "h", f"{b}attn_{part}.weight", slot, f"{b}attn_{part}.bias")
    builder.norm(f"{b}q_norm", "qg", f"{b}attn_q_norm.weight", "q", dim, heads, stride=2 * dim)
    builder.norm(f"{b}k_norm", "k", f"{b}attn_k_norm.weight", "k", dim, groups)
    builder.rope(f"{b}q_rope", "q", heads)
    builder.rope(f"{b}k_rope", "k", groups)
    builder.cache(b, groups, "q", "k", "v", "a", heads)
    # the gate of head h lies behind its query
    numbers = {"n": dim, "heads": heads, "stride": 2 * dim, "first": dim}
    builder.step(f"{b}attn_gated", "sigmoid_gate", ["a", "qg"], [], "a", **numbers)
    builder.linear(f"{b}attn_output", "a", f"{b}attn_output.weight", "o", n=heads * dim)


def _delta_block(builder: Builder, b: str) -> None:
    config, delta = builder.config, builder.config.delta
    n, key_heads, value_heads = delta.state_size, delta.key_heads, delta.value_heads
    for part, slot in (("attn_qkv", "qkv"), ("attn_gate", "z")):
        builder.linear(f"{b}{part}", "h", f"{b}{part}.weight", slot)
    for part in ("alpha", "beta"):
        builder.linear(f"{b}ssm_{part}", "h", f"{b}ssm_{part}.weight", part)
    window, state = f"{b}conv.state", f"{b}delta.state"
    builder.states[window] = (delta.conv_kernel - 1, delta.channels)
    builder.states[state] = (value_heads, n, n)
    taps = [f"{b}ssm_conv1d.weight"]
    numbers = {"n": delta.channels, "taps": delta.conv_kernel}
    builder.step(f"{b}ssm_conv", "conv_silu", ["qkv", window], taps, "conv", **numbers)
    vectors, numbers = [f"{b}ssm_a", f"{b}ssm_dt.bias"], {"n": value_heads}
    builder.step(f"{b}ssm_decay", "decay", ["alpha"], vectors, "decay", **numbers)
    builder.step(f"{b}ssm_beta_sigmoid", "sigmoid", ["beta"], [], "beta", **numbers)
    # the convolution's channels are query heads, key heads, value heads
    numbers = {"n": n, "heads": key_heads, "eps": config.eps}
    first = key_heads * n
    builder.step(f"{b}ssm_q_norm", "l2_norm", ["conv"], [], "dq", **numbers, first=0, scale=root(n))
    builder.step(f"{b}ssm_k_norm", "l2_norm", ["conv"], [], "dk", **numbers, first=first, scale=1.0)
    inputs = ["dq", "dk", "conv", "decay", "beta", state]
    numbers = {"n": n, "heads": value_heads, "key_heads": key_heads, "first": 2 * first}
    builder.step(f"{b}delta", "delta", inputs, [], "d", **numbers)
    builder.norm(f"{b}ssm_norm", "d", f"{b}ssm_norm.weight", "d", n, value_heads)
    builder.step(f"{b}ssm_gated", "swiglu", ["z", "d"], [], "d", n=delta.inner)
    _delta_output(builder, b)


def _delta_output(builder: Builder, b: str) -> None:
    """ssm_out, whose columns a file may keep in the grouped head order of the checkpoint."""
    delta, rotation, weight, source = (
        builder.config.delta, builder.rotation, f"{b}ssm_out.weight", "d",
    )  # fmt: skip
    if rotation.gdn_v_grouped:
        if weight not in rotation.tensors:
            raise ModelError(
                f"tensor {weight}: found gdn_v_grouped true in the rotation's keys, and this "
                "tensor not among the rotated ones; whether its columns are grouped is then not "
                "said. Write the file again with both or neither."
            )
        source = "d.grouped"
        builder.slots[source] = delta.inner
        numbers = {"n": delta.state_size, "heads": delta.value_heads, "groups": delta.key_heads}
        builder.step(f"{b}ssm_grouped", "regroup", ["d"], [], source, **numbers)
    builder.linear(f"{b}ssm_out", source, weight, "o")
