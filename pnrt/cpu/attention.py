"""Attention of one query head over the cache, in the contract's order (NUMERICS.md 3).

Work is split by (token, head) pairs. Scores: lanes are positions, fma over the head's elements. The
output is summed in blocks of 256 positions, lanes are elements.
"""

from __future__ import annotations

import numpy as np

from pnrt.cpu.elementwise import functions, share
from pnrt.cpu.simd import (
    add,
    bits_float,
    butterfly,
    f32_at,
    fma,
    fold_max,
    larger,
    load_f32,
    load_half,
    mul,
    read_i32,
    read_i64,
    set_f32,
    splat_f32,
    store_f32,
    zero,
)
from pnrt.jit import Kernel, inline, kernel

# positions whose weighted values are summed before they join the total
POSITIONS = 256
_exp = functions.exp


def _attention_kernel(half: bool) -> Kernel:
    load, size = (load_half, 2) if half else (load_f32, 4)

    @inline
    def scores(q, keys, out, dim, positions, scale):
        """scale * (q . k) of all positions, whole blocks of 16; four blocks are four chains."""
        step = dim * 16 * size
        factor = set_f32(scale)
        blocks = (positions + 15) // 16
        for b in range(0, blocks // 4 * 4, 4):
            s0 = s1 = s2 = s3 = zero()
            k = keys + b * step
            for d in range(dim):
                x = splat_f32(q + d * 4)
                s0, s1 = fma(x, load(k), s0), fma(x, load(k + step), s1)
                s2, s3 = fma(x, load(k + 2 * step), s2), fma(x, load(k + 3 * step), s3)
                k += 16 * size
            store_f32(out + b * 64, mul(s0, factor))
            store_f32(out + b * 64 + 64, mul(s1, factor))
            store_f32(out + b * 64 + 128, mul(s2, factor))
            store_f32(out + b * 64 + 192, mul(s3, factor))
        for b in range(blocks // 4 * 4, blocks):
            s0 = zero()
            k = keys + b * step
            for d in range(dim):
                s0 = fma(splat_f32(q + d * 4), load(k), s0)
                k += 16 * size
            store_f32(out + b * 64, mul(s0, factor))

    @inline
    def weights(p, positions):
        """Scores to exp(score - max) in place, zeros behind the last; the lane-32 sum of them."""
        values = f32_at(p)
        rounded = (positions + 31) // 32 * 32
        for t in range(positions, rounded):
            values[t] = np.float32(-np.inf)
        top = load_f32(p)
        for t in range(16, rounded, 16):
            top = larger(top, load_f32(p + t * 4))
        highest = fold_max(top)
        for t in range(positions):
            values[t] = _exp(values[t] - highest)
        for t in range(positions, rounded):
            values[t] = np.float32(0.0)
        low = high = zero()
        for t in range(0, rounded, 32):
            low, high = add(low, load_f32(p + t * 4)), add(high, load_f32(p + t * 4 + 64))
        return butterfly(low, high)

    @inline
    def mix(p, values, out, dim, d, positions):
        """Elements d .. d + 15 of the weighted sum of values."""
        total = zero()
        for t0 in range(0, positions, POSITIONS):
            part = zero()
            for t in range(t0, min(positions, t0 + POSITIONS)):
                part = fma(splat_f32(p + t * 4), load(values + (t * dim + d) * size), part)
            total = part if t0 == 0 else add(total, part)
        store_f32(out + d * 4, total)

    @inline
    def mix4(p, values, out, dim, d, positions):
        """Elements d .. d + 63: four chains."""
        a0 = a1 = a2 = a3 = zero()
        for t0 in range(0, positions, POSITIONS):
            s0 = s1 = s2 = s3 = zero()
            v = values + (t0 * dim + d) * size
            for t in range(t0, min(positions, t0 + POSITIONS)):
                x = splat_f32(p + t * 4)
                s0, s1 = fma(x, load(v), s0), fma(x, load(v + 16 * size), s1)
                s2, s3 = fma(x, load(v + 32 * size), s2), fma(x, load(v + 48 * size), s3)
                v += dim * size
            if t0 == 0:
                a0, a1, a2, a3 = s0, s1, s2, s3
            else:
                a0, a1, a2, a3 = add(a0, s0), add(a1, s1), add(a2, s2), add(a3, s3)
        store_f32(out + d * 4, a0)
        store_f32(out + d * 4 + 64, a1)
        store_f32(out + d * 4 + 128, a2)
        store_f32(out + d * 4 + 192, a3)

    def attention(a, thread, threads):
        q, wq, keys, values = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        out, wo, heads, groups = (
            read_i64(a + 32), read_i64(a + 40), read_i64(a + 48), read_i64(a + 56),
        )  # fmt: skip
        dim, capacity, scale = read_i64(a + 64), read_i64(a + 72), bits_float(read_i32(a + 80))
        control = read_i64(a + 88)
        # the thread's scratch: one row of scores, one head's output in whole vectors
        p = read_i64(a + 96) + thread * read_i64(a + 104)
        sums = p + (capacity + 32) * 4
        tokens, start = read_i64(control), read_i64(control + 8)
        first, last = share(tokens * heads, thread, threads)
        for item in range(first, last):
            t, h = item // heads, item % heads
            g = h // (heads // groups)
            positions = start + t + 1
            k, v = keys + g * capacity * dim * size, values + g * capacity * dim * size
            scores(q + (t * wq + h * dim) * 4, k, p, dim, positions, scale)
            total = weights(p, positions)
            for d in range(0, dim // 64 * 64, 64):
                mix4(p, v, sums, dim, d, positions)
            for d in range(dim // 64 * 64, dim, 16):
                mix(p, v, sums, dim, d, positions)
            source, target = f32_at(sums), f32_at(out + (t * wo + h * dim) * 4)
            for d in range(dim):
                target[d] = source[d] / total

    return kernel(attention, name=f"attention_{'f16' if half else 'f32'}")


attention_kernels = {"f16": _attention_kernel(True), "f32": _attention_kernel(False)}
