"""The quantized product in the contract's order (NUMERICS.md 1), for one token or a tile of them.

A SIMD lane is an output row, so nothing is reduced across lanes of a vector. The 32 contract lanes
are walked in bit-reversed order and combined with a binary counter: that is the butterfly, with at
most five partial sums alive. One source serves every format and every number of tokens: a *dot*
turns 32 packed codes into eight vectors of bytes, a *unit* chains its segments by fma.

Activations lie tile by tile; inside a tile [32-block, token]: 32 int8 codes, a float32 scale, and
the negated sums of the codes over 16, 16 and all 32 (which make the zero point and the offset).
"""

from __future__ import annotations

import numpy as np

from pnrt.cpu import simd
from pnrt.cpu.elementwise import share
from pnrt.cpu.pack import CODECS, FLOATS, LANES, ROWS, WORDS, Weight, aligned, lane_of
from pnrt.cpu.simd import (
    add,
    and_,
    bits,
    f32_at,
    fma,
    i8_at,
    i32_at,
    load_bf16,
    load_f32,
    load_half,
    load_i32,
    mul,
    or_,
    read_i64,
    set_f32,
    shift_left,
    shift_right,
    sub_i,
    to_f32,
)
from pnrt.formats import FORMATS
from pnrt.jit import Call, Kernel, cpu_features, inline, kernel, words

# tokens per tile: as many as the registers hold accumulators for
TILE = 8 if "avx512f" in cpu_features() else 4
# tokens per pass over the weights: their activations stay in the second-level cache
BLOCK = 128
# int32 sums kept per 32 activations: of the first 16, the last 16, all
SUMS = 3

_low3, _low4, _two_bits = bits(0x07070707), bits(0x0F0F0F0F), bits(0x03030303)
_bit2 = bits(0x04040404)
_right3, _right4, _right5, _right6 = (shift_right(n) for n in (3, 4, 5, 6))


@inline
def _byte_groups(w):
    return (
        load_i32(w),
        load_i32(w + 64),
        load_i32(w + 128),
        load_i32(w + 192),
        load_i32(w + 256),
        load_i32(w + 320),
        load_i32(w + 384),
        load_i32(w + 448),
    )


@inline
def _nibble_groups(w):
    a, b, c, d = load_i32(w), load_i32(w + 64), load_i32(w + 128), load_i32(w + 192)
    return (
        and_(a, _low4()),
        and_(_right4(a), _low4()),
        and_(b, _low4()),
        and_(_right4(b), _low4()),
        and_(c, _low4()),
        and_(_right4(c), _low4()),
        and_(d, _low4()),
        and_(_right4(d), _low4()),
    )


@inline
def _three_groups(w):
    a, b, c = load_i32(w), load_i32(w + 64), load_i32(w + 128)
    return (
        and_(a, _low3()),
        and_(_right3(a), _low3()),
        and_(b, _low3()),
        and_(_right3(b), _low3()),
        and_(c, _low3()),
        and_(_right3(c), _low3()),
        or_(and_(_right6(a), _two_bits()), and_(_right4(c), _bit2())),
        or_(and_(_right6(b), _two_bits()), and_(_right5(c), _bit2())),
    )


GROUPS = {"byte": _byte_groups, "nibble": _nibble_groups, "three": _three_groups}


def make_combine(count, load, store):
    """The binary counter: add the partial sums that lane i completes, keep the result."""

    @inline
    def combine(acc, i, stack):
        size = count * 64
        while i & 1:
            acc = add(load(stack, 64), acc)
            stack += size
            i >>= 1
        store(stack, 64, acc)

    return combine


def _q8_unit(name: str, tile):
    """unit(acc, w, planes, u, x, d, s): one unit of the row's product for a tile of tokens."""
    codec, form = CODECS[name], FORMATS[name]
    groups = GROUPS[codec.layout]
    dot = simd.dot4_wide if codec.zero == 128 else simd.dot4
    shift = shift_left(codec.zero.bit_length() - 1)
    zero, T, size = codec.zero, tile.count, WORDS[codec.layout] * 64
    splat, scale, izeros = tile.splat_i32, tile.splat_f32, tile.izeros

    @inline
    def start(s, which):
        # negated sum times the zero point
        return shift(splat(s + 4 * which, 12)) if zero else izeros()

    @inline
    def half(acc, g0, g1, g2, g3, x):
        acc = dot(acc, g0, splat(x, 32))
        acc = dot(acc, g1, splat(x + 4, 32))
        acc = dot(acc, g2, splat(x + 8, 32))
        return dot(acc, g3, splat(x + 12, 32))

    if form.group == 80:

        @inline
        def block(acc, w, dw, x, d, s):
            g = groups(w)
            total = half(start(s, 2), g[0], g[1], g[2], g[3], x)
            total = half(total, g[4], g[5], g[6], g[7], x + 16)
            return fma(to_f32(total), mul(dw, scale(d, 4)), acc)

        @inline
        def unit(acc, w, plane0, plane1, u, x, d, s):
            x, d, s = x + 5 * u * T * 32, d + 5 * u * T * 4, s + 5 * u * T * 12
            d0, d1 = load_half(plane0 + 64 * u), load_half(plane0 + 64 * u + 32)
            acc = block(acc, w, d0, x, d, s)
            acc = block(acc, w + size, d0, x + T * 32, d + T * 4, s + T * 12)
            x, d, s, w = x + T * 64, d + T * 8, s + T * 24, w + 2 * size
            # the weight scale changes in the middle of the third activation block
            g = groups(w)
            dx = scale(d, 4)
            total = half(start(s, 0), g[0], g[1], g[2], g[3], x)
            acc = fma(to_f32(total), mul(d0, dx), acc)
            total = half(start(s, 1), g[4], g[5], g[6], g[7], x + 16)
            acc = fma(to_f32(total), mul(d1, dx), acc)
            x, d, s, w = x + T * 32, d + T * 4, s + T * 12, w + size
            acc = block(acc, w, d1, x, d, s)
            return block(acc, w + size, d1, x + T * 32, d + T * 4, s + T * 12)

        return unit

    per_scale = form.group // 32
    offset = len(codec.planes) == 2

    @inline
    def unit(acc, w, plane0, plane1, u, x, d, s):
        x, d, s = x + u * T * 32, d + u * T * 4, s + u * T * 12
        at = u // per_scale * 32
        g = groups(w)
        total = half(start(s, 2), g[0], g[1], g[2], g[3], x)
        total = half(total, g[4], g[5], g[6], g[7], x + 16)
        dx = scale(d, 4)
        acc = fma(to_f32(total), mul(load_half(plane0 + at), dx), acc)
        if offset:
            acc = fma(to_f32(splat(s + 8, 12)), mul(load_half(plane1 + at), dx), acc)
        return acc

    return unit


def _f32_unit(name: str, tile):
    """The same walk with float32 activations [k, token]: fma over k ascending, decoded weights."""
    T, splat = tile.count, tile.splat_f32
    if name in FLOATS:
        size = FLOATS[name]
        load = {"f32": load_f32, "f16": load_half, "bf16": load_bf16}[name]

        @inline
        def unit(acc, w, plane0, plane1, u, x, d, s):
            x += 32 * u * T * 4
            for k in range(32):
                acc = fma(load(w + k * ROWS * size), splat(x + k * T * 4, 4), acc)
            return acc

        return unit

    codec, form = CODECS[name], FORMATS[name]
    groups, zero, byte = GROUPS[codec.layout], bits(codec.zero), bits(255)
    by8, by16, by24 = shift_right(8), shift_right(16), shift_right(24)
    offset, blocks, group = len(codec.planes) == 2, form.unit // 32, form.group
    size = WORDS[codec.layout] * 64

    @inline
    def one(acc, code, dw, m, x):
        value = to_f32(sub_i(code, zero()))
        weight = fma(value, dw, m) if offset else mul(value, dw)
        return fma(weight, splat(x, 4), acc)

    @inline
    def four(acc, v, dw, m, x):
        acc = one(acc, and_(v, byte()), dw, m, x)
        acc = one(acc, and_(by8(v), byte()), dw, m, x + T * 4)
        acc = one(acc, and_(by16(v), byte()), dw, m, x + T * 8)
        return one(acc, by24(v), dw, m, x + T * 12)

    @inline
    def scales(plane0, plane1, k):
        at = k // group * 32
        dw = load_half(plane0 + at)
        m = mul(load_half(plane1 + at), set_f32(np.float32(-1.0))) if offset else dw
        return dw, m

    @inline
    def unit(acc, w, plane0, plane1, u, x, d, s):
        for block in range(blocks):
            k = (u * blocks + block) * 32
            at = x + k * T * 4
            g = groups(w + block * size)
            dw, m = scales(plane0, plane1, k)
            acc = four(acc, g[0], dw, m, at)
            acc = four(acc, g[1], dw, m, at + T * 16)
            acc = four(acc, g[2], dw, m, at + T * 32)
            acc = four(acc, g[3], dw, m, at + T * 48)
            at += T * 64
            dw, m = scales(plane0, plane1, k + 16)
            acc = four(acc, g[4], dw, m, at)
            acc = four(acc, g[5], dw, m, at + T * 16)
            acc = four(acc, g[6], dw, m, at + T * 32)
            acc = four(acc, g[7], dw, m, at + T * 48)
        return acc

    return unit


def _matmul_kernel(name: str, activations: str, count: int) -> Kernel:
    tile = simd.tiles(count)
    unit = (_q8_unit if activations == "q8_0" else _f32_unit)(name, tile)
    combine = make_combine(count, tile.load, tile.store)
    zeros, load, store = tile.zeros, tile.load, tile.store
    if name in FLOATS:
        blocks, unit_bytes = 1, 32 * ROWS * FLOATS[name]
    else:
        blocks = FORMATS[name].unit // 32
        unit_bytes = blocks * WORDS[CODECS[name].layout] * 64
    quantized = activations == "q8_0"

    def matmul(a, thread, threads):
        data, stride, panels = read_i64(a), read_i64(a + 8), read_i64(a + 16)
        units, plane0, plane1 = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40)
        codes, scales, sums = read_i64(a + 48), read_i64(a + 56), read_i64(a + 64)
        x_blocks, y, width = read_i64(a + 72), read_i64(a + 80), read_i64(a + 88)
        tokens = read_i64(read_i64(a + 96))
        stack = read_i64(a + 104) + thread * STACK
        tiles = (tokens + count - 1) // count
        first, last = panels * thread // threads, panels * (thread + 1) // threads
        x_tile = x_blocks * count * (32 if quantized else 128)
        for t0 in range(0, tiles, BLOCK // count):
            for panel in range(first, last):
                base = data + panel * stride
                for t in range(t0, min(tiles, t0 + BLOCK // count)):
                    x = codes + t * x_tile
                    d = scales + t * x_blocks * count * 4
                    s = sums + t * x_blocks * count * 12
                    w = base
                    for i in range(LANES):
                        acc = zeros()
                        for u in range(lane_of(i), units, LANES):
                            acc = unit(acc, w, base + plane0, base + plane1, u, x, d, s)
                            w += unit_bytes
                        combine(acc, i, stack)
                    total = load(stack + 5 * count * 64, 64)
                    store(y + t * count * width * 4 + panel * 64, width * 4, total)

    return kernel(matmul, name=f"matmul_{name}_{activations}_{count}")


# bytes of partial sums per thread: six tiles of the largest size, on their own cache lines
STACK = 8 * 8 * 64

_kernels: dict[tuple, Kernel] = {}


def matmul_kernel(name: str, activations: str, count: int) -> Kernel:
    """The kernel of a product: count is 1 or TILE tokens at a time."""
    key = (name, activations, count)
    if key not in _kernels:
        _kernels[key] = _matmul_kernel(*key)
    return _kernels[key]


def _quantize(a, thread, threads):
    x, width, K = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    codes, scales, sums = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40)
    blocks, count = read_i64(a + 48), read_i64(a + 56)
    tokens = read_i64(read_i64(a + 64))
    bad = i32_at(read_i64(a + 72))
    rounded = (tokens + count - 1) // count * count
    first, last = share(tokens, thread, threads)
    if thread == threads - 1:
        # the unused tokens of the last tile are zeros
        last = rounded
    real = (K + 31) // 32
    for item in range(first * real, last * real):
        t, b = item // real, item % real
        at = ((t // count) * blocks + b) * count + t % count
        q, s, d = i8_at(codes + at * 32), i32_at(sums + at * 12), f32_at(scales + at * 4)
        source = f32_at(x + (t * width + b * 32) * 4)
        n = min(32, K - b * 32) if t < tokens else 0
        top = np.int32(0)
        for j in range(n):
            top = max(top, simd.float_bits(source[j]) & np.int32(0x7FFFFFFF))
        if top >= np.int32(0x7F800000):
            bad[0] = np.int32(1)
            top = np.int32(0)
            n = 0
        step = simd.bits_float(top) / np.float32(127.0)
        inverse = np.float32(1.0) / step if step != np.float32(0.0) else np.float32(0.0)
        if inverse == np.float32(np.inf):
            # the scale rounds to zero, whatever the codes
            inverse = np.float32(0.0)
        low = high = np.int32(0)
        for j in range(32):
            v = source[j] * inverse if j < n else np.float32(0.0)
            # to nearest, halves away from zero
            whole = np.int32(v)
            rest = v - np.float32(whole)
            whole += np.int32(rest >= np.float32(0.5)) - np.int32(rest <= np.float32(-0.5))
            q[j] = np.int8(whole)
            if j < 16:
                low += whole
            else:
                high += whole
        s[0], s[1], s[2] = -low, -high, -(low + high)
        d[0] = simd.half_value(simd.half_bits(step))
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
            top = max(top, simd.float_bits(source[k]) & np.int32(0x7FFFFFFF))
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
        if mode == "q8_0":
            self.codes, self.scales, self.sums = aligned(n * 32), aligned(n * 4), aligned(n * 12)
        else:
            self.codes, self.scales, self.sums = aligned(n * 128), aligned(64), aligned(64)

    def fill(self, x: np.ndarray, control: np.ndarray, bad: np.ndarray) -> Call:
        """The call that converts x [T, width] float32; control[0] is T; bad[0] becomes 1 on NaN."""
        which = quantize_kernel if self.mode == "q8_0" else spread_kernel
        arguments = words(
            x, x.shape[1], self.K, self.codes, self.scales, self.sums, self.blocks, self.count,
            control, bad,
        )  # fmt: skip
        return Call(which, arguments, (x, self, control, bad))


def matmul(
    weight: Weight, x: Activations, out: np.ndarray, control: np.ndarray, stack: np.ndarray
) -> Call:
    """The call that multiplies: out [T rounded up to whole tiles, width] float32, width >= N.

    Exact: the bits of reference.matmul, for any instruction set, thread count and tile.
    """
    mode = "f32" if weight.format in FLOATS else x.mode
    planes = (*weight.planes, 0, 0)[:2]
    arguments = words(
        weight.data, weight.stride, weight.panels, weight.units, *planes,
        x.codes, x.scales, x.sums, x.blocks, out, out.shape[1], control, stack,
    )  # fmt: skip
    which = matmul_kernel(weight.format, mode, x.count)
    return Call(which, arguments, (weight, x, out, control, stack))
