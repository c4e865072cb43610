"""The llama family as a program: llama, qwen2 and qwen3 (MODELS.md 5)."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from pnrt.models.config import Config
from pnrt.program import Program, Step


def build(config: Config, tensors: Container[str]) -> Program:
    """Build the program of a llama, qwen2 or qwen3 model.

    Args:
        config: the model's numbers.
        tensors: names present in the file (biases, q/k norms and `output.weight` are optional).
    """
    widest = max(config.d_ff)
    q_width = max(config.n_heads) * config.head_dim
    kv_width = max(config.n_kv_heads) * config.head_dim
    slots = {
        "x": config.d_model,
        "h": config.d_model,
        "q": q_width,
        "k": kv_width,
        "v": kv_width,
        "a": q_width,
        "o": config.d_model,
        "gate": widest,
        "up": widest,
        "act": widest,
        "y": config.d_model,
        "logits": config.vocab_size,
    }
    body = [Step("token_embd", "embed", (), ("token_embd.weight",), "x")]
    for il in range(config.n_layers):
        body += _attention(config, il, tensors) + _feed_forward(config, il, tensors)
    output = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    head = [
        Step("output_rows", "take", ("x",), (), "y"),
        _norm(config, "output_norm", "y", "output_norm.weight", "y", config.d_model),
        *_linear("output", "y", output, "output.bias", "logits", tensors),
    ]
    caches = tuple((g, config.head_dim) for g in config.n_kv_heads)
    return Program(config.architecture, slots, tuple(body), tuple(head), caches)


def _norm(config, name, source, weight, target, n, heads=1) -> Step:
    numbers = {"n": n, "heads": heads, "eps": config.eps}
    return Step(name, "rms_norm", (source,), (weight,), target, numbers)


def _linear(name, source, weight, bias, target, tensors) -> list[Step]:
    steps = [Step(name, "matmul", (source,), (weight,), target)]
    if bias in tensors:
        steps.append(Step(f"{name}_bias", "add_bias", (target,), (bias,), target))
    return steps


def _attention(config: Config, il: int, tensors: Container[str]) -> list[Step]:
    b, dim = f"blk.{il}.", config.head_dim
    heads, groups = config.n_heads[il], config.n_kv_heads[il]
    steps = [_norm(config, f"{b}attn_norm", "x", f"{b}attn_norm.weight", "h", config.d_model)]
    for part in "qkv":
        weight, bias = f"{b}attn_{part}.weight", f"{b}attn_{part}.bias"
        steps += _linear(f"{b}{part}", "h", weight, bias, part, tensors)
    for part, count in (("q", heads), ("k", groups)):
        norm = f"{b}attn_{part}_norm.weight"
        if norm in tensors:
            steps.append(_norm(config, f"{b}{part}_norm", part, norm, part, dim, count))
    rope = {"dim": dim, "pairs": config.rope_dim // 2, "neox": config.neox}
    steps += [
        Step(f"{b}q_rope", "rope", ("q",), (), "q", {"heads": heads, **rope}),
        Step(f"{b}k_rope", "rope", ("k",), (), "k", {"heads": groups, **rope}),
        Step(f"{b}kv", "store_kv", ("k", "v"), (), f"cache.{il}", {"cache": il}),
        Step(
            f"{b}attn",
            "attention",
            ("q", f"cache.{il}"),
            (),
            "a",
            {"cache": il, "heads": heads, "scale": float(np.float32(dim) ** np.float32(-0.5))},
        ),
    ]
    bias = f"{b}attn_output.bias"
    steps += _linear(f"{b}attn_output", "a", f"{b}attn_output.weight", bias, "o", tensors)
    steps.append(Step(f"{b}attn_residual", "add", ("x", "o"), (), "x"))
    return steps


def _feed_forward(config: Config, il: int, tensors: Container[str]) -> list[Step]:
    b = f"blk.{il}."
    steps = [_norm(config, f"{b}ffn_norm", "x", f"{b}ffn_norm.weight", "h", config.d_model)]
    for part in ("gate", "up"):
        weight, bias = f"{b}ffn_{part}.weight", f"{b}ffn_{part}.bias"
        steps += _linear(f"{b}ffn_{part}", "h", weight, bias, part, tensors)
    numbers = {"n": config.d_ff[il]}
    steps.append(Step(f"{b}ffn_act", "swiglu", ("gate", "up"), (), "act", numbers))
    down, bias = f"{b}ffn_down.weight", f"{b}ffn_down.bias"
    steps += _linear(f"{b}ffn_down", "act", down, bias, "o", tensors)
    steps.append(Step(f"{b}ffn_residual", "add", ("x", "o"), (), "x"))
    return steps
