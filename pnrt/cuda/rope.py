"""Rotary embedding in place, and the store of keys and values into the cache.

The cache lies as the CPU's: a key is stored as [block of 16 positions, element, position], so that
attention's lanes are positions, a value as [position, element].
"""

from __future__ import annotations

from pnrt.cuda.control import index, start, tokens
from pnrt.cuda.kernel import Kernel, kernel
from pnrt.cuda.lanes import (
    at,
    block_y,
    fetch_f32,
    float_to_half,
    fma,
    load_f32,
    store_f32,
    store_u16,
    u32,
    u64,
)


@kernel(name="rope")
def rope_kernel(x: u64, width: u32, heads: u32, head_dim: u32, pairs: u32, neox: u32, cos: u64,
                sin: u64, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.rope.rope_kernel; grid: heads * pairs threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < heads * pairs:
        h, j = i // pairs, i % pairs
        # the partner's distance, and from one pair to the next
        far, step = pairs if neox != 0 else 1, u32(1) if neox != 0 else 2
        row = (start(control) + t) * pairs + j
        c, s = fetch_f32(at(cos, row, 4)), fetch_f32(at(sin, row, 4))
        p = at(x, t * width + h * head_dim + j * step, 4)
        q = at(p, far, 4)
        x0, x1 = load_f32(p), load_f32(q)
        store_f32(p, fma(-x1, s, x0 * c))
        store_f32(q, fma(x1, c, x0 * s))


@kernel(name="store_kv")
def store_kernel(k: u64, k_width: u32, v: u64, v_width: u32, kv_heads: u32, head_dim: u32,
                 key_cache: u64, value_cache: u64, positions: u32, half: u32,
                 control: u64):  # fmt: skip
    """Twin of pnrt.cpu.rope.store_kernel; grid: kv_heads * head_dim threads, y the token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < kv_heads * head_dim:
        h, d, where = i // head_dim, i % head_dim, start(control) + t
        key = (h * positions + (where // 16) * 16) * head_dim + d * 16 + where % 16
        value = (h * positions + where) * head_dim + d
        a, b = load_f32(at(k, t * k_width + i, 4)), load_f32(at(v, t * v_width + i, 4))
        if half != 0:
            store_u16(at(key_cache, key, 2), float_to_half(a))
            store_u16(at(value_cache, value, 2), float_to_half(b))
        else:
            store_f32(at(key_cache, key, 4), a)
            store_f32(at(value_cache, value, 4), b)


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [rope_kernel, store_kernel]
