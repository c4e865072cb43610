"""The llama family as a program: llama, qwen2 and qwen3 (MODELS.md 5)."""

from __future__ import annotations

from collections.abc import Container

from pnrt.models.config import Config
from pnrt.models.rotation import Rotation
from pnrt.models.steps import Builder
from pnrt.program import Program


def build(config: Config, tensors: Container[str], rotation: Rotation | None = None) -> Program:
    """Build the program of a llama, qwen2 or qwen3 model.

    Args:
        config: the model's numbers.
        tensors: names present in the file (biases, q/k norms and `output.weight` are optional).
        rotation: how the file's matrices are stored; None for unrotated.
    """
    widest = max(config.d_ff)
    q_width = max(config.n_heads) * config.head_dim
    kv_width = max(config.n_kv_heads) * config.head_dim
    slots = {
        "h": config.d_model,
        "q": q_width,
        "k": kv_width,
        "v": kv_width,
        "a": q_width,
        "o": config.d_model,
        "gate": widest,
        "up": widest,
        "act": widest,
    }
    builder = Builder(config, tensors, rotation or Rotation(), slots)
    builder.embed()
    for il in range(config.n_layers):
        _attention(builder, il)
        builder.feed_forward(il, "ffn_norm")
    return builder.program()


def _attention(builder: Builder, il: int) -> None:
    config, b = builder.config, f"blk.{il}."
    heads, groups, dim = config.n_heads[il], config.n_kv_heads[il], config.head_dim
    builder.norm(f"{b}attn_norm", "x", f"{b}attn_norm.weight", "h", config.d_model)
    for part in "qkv":
        builder.linear(f"{b}{part}", "h", f"{b}attn_{part}.weight", part, f"{b}attn_{part}.bias")
    for part, count in (("q", heads), ("k", groups)):
        norm = f"{b}attn_{part}_norm.weight"
        if norm in builder.tensors:
            builder.norm(f"{b}{part}_norm", part, norm, part, dim, count)
    builder.rope(f"{b}q_rope", "q", heads)
    builder.rope(f"{b}k_rope", "k", groups)
    builder.cache(b, groups, "q", "k", "v", "a", heads)
    name = f"{b}attn_output"
    builder.linear(name, "a", f"{name}.weight", "o", f"{name}.bias", n=heads * dim)
    builder.step(f"{b}attn_residual", "add", ["x", "o"], [], "x")
