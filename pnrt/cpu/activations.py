"""Activations as products read them: q8_0 blocks, or float32, for one token or tiles of them.

They lie tile by tile; inside a tile [32-block, token]: 32 int8 codes, a float32 scale, and the
negated sums of the codes over the first 16, the last 16 and all 32, as int32 and as float32.
Float32 activations lie [k, token] inside a tile.
"""

from __future__ import annotations

import numpy as np

from pnrt.cpu.dots import dot_tier
from pnrt.cpu.elementwise import share
from pnrt.cpu.pack import aligned
from pnrt.formats.base import BELOW_HALF
from pnrt.jit import Call, inline, kernel, words
from pnrt.machine import cpu_features
from pnrt.simd import (
    absolute_bits,
    add,
    bits_float,
    f32_at,
    float_bits,
    fold_max_i,
    fold_sum_i,
    half_bits,
    half_value,
    i32_at,
    larger_i,
    less,
    load_first,
    mul,
    pick,
    read_i64,
    set_f32,
    store_i8,
    truncate,
)

# tokens per tile: as many as the registers hold accumulators for
TILE = {"amx": 16, "vnni": 8}.get(dot_tier(), 8 if "avx512f" in cpu_features() else 4)
SUMS = 3


@inline
def _rounded(x, inverse):
    """To nearest, halves away from zero."""
    v = mul(x, inverse)
    # as formats.base.round_away
    half = pick(less(v, set_f32(np.float32(0))), set_f32(-BELOW_HALF), set_f32(BELOW_HALF))
    return truncate(add(v, half))


def _quantize(a, thread, threads):
    x, width, K = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    codes, scales, sums = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40)
    blocks, count, factor = read_i64(a + 48), read_i64(a + 56), read_i64(a + 80)
    totals = read_i64(a + 88)
    tokens = read_i64(read_i64(a + 64))
    bad = i32_at(read_i64(a + 72))
    # by tokens: a step of the same thread made them, and no barrier is between
    first, last = share(tokens, thread, threads)
    if thread == threads - 1:
        # the unused tokens of the last tile are zeros
        last = (tokens + count - 1) // count * count
    real = (K + 31) // 32
    for t in range(first, last):
        source = x + t * width * 4
        for b in range(real):
            n = K - b * 32 if t < tokens else 0
            at = ((t // count) * blocks + b) * count + t % count
            low, high = load_first(source, n), load_first(source + 64, n - 16)
            source += 128
            top = fold_max_i(larger_i(absolute_bits(low), absolute_bits(high)))
            if top >= np.int32(0x7F800000):
                bad[0] = np.int32(1)
                top = np.int32(0)
            step = bits_float(top) / np.float32(127.0)
            inverse = np.float32(1.0) / step if step != np.float32(0.0) else np.float32(0.0)
            if inverse == np.float32(np.inf):
                # the scale rounds to zero, whatever the codes
                inverse = np.float32(0.0)
            low, high = _rounded(low, set_f32(inverse)), _rounded(high, set_f32(inverse))
            store_i8(codes + at * 32, low)
            store_i8(codes + at * 32 + 16, high)
            s, f, d = i32_at(sums + at * 12), f32_at(totals + at * 12), f32_at(scales + at * 4)
            one, two = -fold_sum_i(low), -fold_sum_i(high)
            both = np.int32(one + two)
            f[0], f[1], f[2] = np.float32(one), np.float32(two), np.float32(both)
            s[0], s[1], s[2] = one * factor, two * factor, both * factor
            d[0] = half_value(half_bits(step))
            if d[0] > np.float32(65504.0):
                bad[0] = np.int32(1)


quantize_kernel = kernel(_quantize, name="quantize_q8_0")


def _spread(a, thread, threads):
    """Float32 activations [T, K] -> tiles of [k, token]."""
    x, width, K = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    out, blocks, count = read_i64(a + 24), read_i64(a + 48), read_i64(a + 56)
    tokens = read_i64(read_i64(a + 64))
    bad = i32_at(read_i64(a + 72))
    first, last = share(tokens, thread, threads)
    if thread == threads - 1:
        last = (tokens + count - 1) // count * count
    for t in range(first, last):
        source = f32_at(x + t * width * 4)
        target = f32_at(out + ((t // count) * blocks * 32 * count + t % count) * 4)
        top = np.int32(0)
        for k in range(K if t < tokens else 0):
            target[k * count] = source[k]
            top = max(top, float_bits(source[k]) & np.int32(0x7FFFFFFF))
        if top >= np.int32(0x7F800000):
            bad[0] = np.int32(1)
        if t >= tokens:
            for k in range(K):
                target[k * count] = np.float32(0.0)


spread_kernel = kernel(_spread, name="spread_f32")


class Activations:
    """Memory for one activation vector of K columns, for up to T tokens.

    mode: 'q8_0' or 'f32'; count: tokens per tile (1 or TILE).
    """

    def __init__(self, K: int, T: int, mode: str, count: int):
        self.K, self.mode, self.count = K, mode, count
        # whole units of 160, so that any format can read behind the last weight
        self.blocks = -(-K // 160) * 5
        n = -(-T // count) * count * self.blocks
        sizes = (32, 4, 4 * SUMS, 4 * SUMS) if mode == "q8_0" else (128, 0, 0, 0)
        memory = (aligned(n * size) for size in sizes)
        self.codes, self.scales, self.sums, self.totals = memory

    def fill(self, x: np.ndarray, control: np.ndarray, bad: np.ndarray) -> Call:
        """The call that converts x [T, width] float32; control[0] is T; bad[0] becomes 1 on NaN."""
        which = quantize_kernel if self.mode == "q8_0" else spread_kernel
        # where codes are stored with 128 added, the sums take it off again
        factor = 128 if self.count > 1 and dot_tier() == "vnni" else 1
        arguments = words(
            x, x.shape[1], self.K, self.codes, self.scales, self.sums, self.blocks, self.count,
            control, bad, factor, self.totals,
        )  # fmt: skip
        return Call(which, arguments, (x, self, control, bad))
