"""Attention of query heads over the cache, in the contract's order (NUMERICS.md 3).

Work is split by (token, head) pairs. A thread's heads that read the same keys and values go through
them together, piece by piece, so the cache is read once for all of them. Scores: lanes are
positions, fma over the head's elements. The output is summed in blocks of 256 positions, lanes are
elements.
"""

from __future__ import annotations

import numpy as np

from pnrt.cpu.elementwise import functions, share
from pnrt.cpu.tiles import tiles
from pnrt.jit import Kernel, inline, kernel
from pnrt.simd import (
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
    read_f32,
    read_i32,
    read_i64,
    set_f32,
    splat_f32,
    store_f32,
    write_f32,
    zero,
)

# positions whose weighted values are summed before they join the total
POSITIONS = 256
# vectors of elements that are summed side by side
WIDE = 8
_exp = functions.exp


def scratch_bytes(capacity: int, dim: int) -> int:
    """Scratch that one head needs: scores of `capacity` positions, their sum, the output."""
    return (capacity + 32 + (dim + 63) // 64 * 64) * 4


scratch_row = inline(scratch_bytes)


def _attention_kernel(half: bool) -> Kernel:
    load, size = (load_half, 2) if half else (load_f32, 4)
    tile = tiles(WIDE)
    load_wide = tile.load_half if half else tile.load
    zeros, load_sums, store_sums = tile.zeros, tile.load, tile.store

    step = 16 * size

    @inline
    def scores(q, k, out, dim, blocks, scale):
        """scale * (q . k) of up to four blocks of 16 positions; four blocks are four chains."""
        factor, far = set_f32(scale), dim * step
        if blocks == 4:
            s0 = s1 = s2 = s3 = zero()
            for d in range(dim):
                x = splat_f32(q + d * 4)
                s0, s1 = fma(x, load(k), s0), fma(x, load(k + far), s1)
                s2, s3 = fma(x, load(k + 2 * far), s2), fma(x, load(k + 3 * far), s3)
                k += step
            store_f32(out, mul(s0, factor))
            store_f32(out + 64, mul(s1, factor))
            store_f32(out + 128, mul(s2, factor))
            store_f32(out + 192, mul(s3, factor))
        else:
            for b in range(blocks):
                s0 = zero()
                for d in range(dim):
                    s0 = fma(splat_f32(q + d * 4), load(k + b * far + d * step), s0)
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
    def mix(p, v, row, out, first, last, d):
        """Add the weighted values of one block of positions, of elements d .. d + 15."""
        part = zero()
        for t in range(first, last):
            part = fma(splat_f32(p + t * 4), load(v + t * row + d * size), part)
        store_f32(out + d * 4, part if first == 0 else add(load_f32(out + d * 4), part))

    @inline
    def mix_wide(p, v, row, out, first, last, d):
        """The same of WIDE vectors of elements: as many chains."""
        part = zeros()
        for t in range(first, last):
            part = fma(splat_f32(p + t * 4), load_wide(v + t * row + d * size, step), part)
        if first > 0:
            part = add(load_sums(out + d * 4, 64), part)
        store_sums(out + d * 4, 64, part)

    def attention(a, thread, threads):
        q, wq, keys, values = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        out, wo, heads, groups = (
            read_i64(a + 32), read_i64(a + 40), read_i64(a + 48), read_i64(a + 56),
        )  # fmt: skip
        dim, capacity, scale = read_i64(a + 64), read_i64(a + 72), bits_float(read_i32(a + 80))
        control = read_i64(a + 88)
        # the thread's scratch, per head: a row of scores, their sum, the output in whole vectors
        scratch, room = read_i64(a + 96) + thread * read_i64(a + 104), read_i64(a + 104)
        stride = scratch_row(capacity, dim)
        tokens, start = read_i64(control), read_i64(control + 8)
        item, last = share(tokens * heads, thread, threads)
        while item < last:
            t, h = item // heads, item % heads
            members = heads // groups
            g = h // members
            run = min(min(last - item, (g + 1) * members - h), room // stride)
            positions = start + t + 1
            k, v = keys + g * capacity * dim * size, values + g * capacity * dim * size
            for b in range(0, (positions + 15) // 16, 4):
                for r in range(run):
                    scores(
                        q + (t * wq + (h + r) * dim) * 4, k + b * dim * step,
                        scratch + r * stride + b * 64, dim, min(4, (positions + 15) // 16 - b),
                        scale,
                    )  # fmt: skip
            for r in range(run):
                p = scratch + r * stride
                write_f32(p + (capacity + 31) * 4, weights(p, positions))
            for first in range(0, positions, POSITIONS):
                end = min(positions, first + POSITIONS)
                for r in range(run):
                    p = scratch + r * stride
                    sums, whole = p + (capacity + 32) * 4, dim // WIDE // 16 * WIDE * 16
                    for d in range(0, whole, WIDE * 16):
                        mix_wide(p, v, dim * size, sums, first, end, d)
                    for d in range(whole, dim, 16):
                        mix(p, v, dim * size, sums, first, end, d)
            for r in range(run):
                p = scratch + r * stride
                source, total = f32_at(p + (capacity + 32) * 4), read_f32(p + (capacity + 31) * 4)
                target = f32_at(out + (t * wo + (h + r) * dim) * 4)
                for d in range(dim):
                    target[d] = source[d] / total
            item += run

    return kernel(attention, name=f"attention_{'f16' if half else 'f32'}")


attention_kernels = {"f16": _attention_kernel(True), "f32": _attention_kernel(False)}
