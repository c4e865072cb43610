"""The product with one token: packed codes are multiplied as they are unpacked, read once."""

from __future__ import annotations

import functools

from pnrt import simd
from pnrt.cpu import dots
from pnrt.cpu.codec import CODECS, SPLITS, groups_of
from pnrt.cpu.layout import WORDS
from pnrt.cpu.walk import LANES, draw, make_finish
from pnrt.formats import FORMATS
from pnrt.formats.fp8 import INTEGERS
from pnrt.jit import Kernel, inline, kernel
from pnrt.machine import cpu_features
from pnrt.simd import add, add_i, fma, load_f32, load_i32, mul, read_i64, shift_left, to_f32

# bytes of codes asked for ahead of their use: the hardware's own stops at every page
AHEAD = 2048
_left7, _left14 = shift_left(7), shift_left(14)


def _digits_of_fp8() -> tuple[list[int], ...]:
    n = INTEGERS[:128]
    return [int(v) for v in n & 127], [int(v) for v in n >> 7 & 127], [int(v) for v in n >> 14]


def _dot_one(name: str):
    """dot(w, x, s, which) for halves 0 and 1 of a packed block or both (2): exact int32 sums."""
    codec = CODECS[name]
    splat = simd.splat_i32
    if codec.fp8:
        return _dot_fp8(splat)
    groups, zero = groups_of(codec)
    dot = dots.dot4_wide if zero == 128 else dots.dot4
    shift = shift_left(max(zero, 1).bit_length() - 1)
    nothing = simd.bits(0)

    @inline
    def start(s, which):
        # negated sum times the zero point
        return shift(splat(s + 4 * which)) if zero else nothing()

    @inline
    def half(acc, a, b, c, d, x):
        acc = dot(acc, a, splat(x))
        acc = dot(acc, b, splat(x + 4))
        acc = dot(acc, c, splat(x + 8))
        return dot(acc, d, splat(x + 12))

    @inline
    def whole(w, x, s):
        g = groups(w)
        total = half(start(s, 2), g[0], g[1], g[2], g[3], x)
        return half(total, g[4], g[5], g[6], g[7], x + 16)

    @inline
    def parts(w, x, s):
        g = groups(w)
        low = half(start(s, 0), g[0], g[1], g[2], g[3], x)
        return low, half(start(s, 1), g[4], g[5], g[6], g[7], x + 16)

    return whole, parts


def _dot_fp8(splat):
    if "avx512vbmi" not in cpu_features() or "avx512vnni" not in cpu_features():
        # rarely met: sums of exact integers made from the floats
        nothing, dot = simd.bits(0), dots.dot_fp8

        @inline
        def whole(w, x, s):
            total = nothing()
            for g in range(8):
                total = dot(total, load_i32(w + 64 * g), splat(x + 4 * g))
            return total

        return whole, None
    low, middle, high = (dots.lookup128(digits) for digits in _digits_of_fp8())
    dot, signed, nothing = dots.dot4, dots.signed_like, simd.bits(0)

    @inline
    def whole(w, x, s):
        a = b = c = nothing()
        for g in range(8):
            v = load_i32(w + 64 * g)
            q = signed(splat(x + 4 * g), v)
            a, b, c = dot(a, low(v), q), dot(b, middle(v), q), dot(c, high(v), q)
        return add_i(a, add_i(_left7(b), _left14(c)))

    return whole, None


def _one_unit(name: str):
    """unit(acc, w, p0, p1, p2, p3, u, x, d, s): one unit of the product with one token."""
    codec, split = CODECS[name], SPLITS[name]
    whole, parts = _dot_one(name)
    at, offset, size = codec.scales.at, codec.scales.offset, WORDS[codec.layout] * 64
    scale, splat = simd.splat_f32, simd.splat_i32

    @inline
    def segment(acc, total, dw, m, dx, s):
        acc = fma(to_f32(total), mul(dw, dx), acc)
        if offset:
            acc = fma(to_f32(splat(s)), mul(m, dx), acc)
        return acc

    if split == 80:

        @inline
        def unit(acc, w, p0, p1, p2, p3, u, x, d, s):
            x, d, s = x + 160 * u, d + 20 * u, s + 60 * u
            d0, _ = at(p0, p1, p2, p3, 160 * u)
            d1, _ = at(p0, p1, p2, p3, 160 * u + 80)
            acc = fma(to_f32(whole(w, x, s)), mul(d0, scale(d)), acc)
            acc = fma(to_f32(whole(w + size, x + 32, s + 12)), mul(d0, scale(d + 4)), acc)
            # the weight scale changes in the middle of the third activation block
            low, high = parts(w + 2 * size, x + 64, s + 24)
            acc = fma(to_f32(low), mul(d0, scale(d + 8)), acc)
            acc = fma(to_f32(high), mul(d1, scale(d + 8)), acc)
            total = whole(w + 3 * size, x + 96, s + 36)
            acc = fma(to_f32(total), mul(d1, scale(d + 12)), acc)
            total = whole(w + 4 * size, x + 128, s + 48)
            return fma(to_f32(total), mul(d1, scale(d + 16)), acc)

    elif split == 16:

        @inline
        def unit(acc, w, p0, p1, p2, p3, u, x, d, s):
            x, dx, s = x + 32 * u, scale(d + 4 * u), s + 12 * u
            low, high = parts(w, x, s)
            dw, m = at(p0, p1, p2, p3, 32 * u)
            acc = segment(acc, low, dw, m, dx, s)
            dw, m = at(p0, p1, p2, p3, 32 * u + 16)
            return segment(acc, high, dw, m, dx, s + 4)

    else:

        @inline
        def unit(acc, w, p0, p1, p2, p3, u, x, d, s):
            x, dx, s = x + 32 * u, scale(d + 4 * u), s + 12 * u
            dw, m = at(p0, p1, p2, p3, 32 * u)
            return segment(acc, whole(w, x, s), dw, m, dx, s + 8)

    return unit


@functools.cache
def one_kernel(name: str) -> Kernel:
    """The kernel that multiplies a format by one token's q8_0 activations."""
    unit = _one_unit(name)
    nbytes = FORMATS[name].unit // 32 * WORDS[CODECS[name].layout] * 64
    load = inline(lambda p, stride: load_f32(p))
    store = inline(lambda p, stride, v: simd.store_f32(p, v))
    finish = make_finish(1, load, store)

    def matmul(a, thread, threads):
        data, stride, panels = read_i64(a), read_i64(a + 8), read_i64(a + 16)
        units, steps, lanes = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40)
        q0, q1 = read_i64(a + 48), read_i64(a + 56)
        q2, q3 = read_i64(a + 64), read_i64(a + 72)
        x, d, s = read_i64(a + 80), read_i64(a + 88), read_i64(a + 96)
        y, ticket, each = read_i64(a + 120), read_i64(a + 144), read_i64(a + 152)
        bottom = read_i64(a + 168) + thread * read_i64(a + 176)
        items = (panels + each - 1) // each
        item = draw(ticket, items, threads)
        while item < items:
            for panel in range(item * each, min(panels, (item + 1) * each)):
                w = data + panel * stride
                p0, p1, p2, p3 = w + q0, w + q1, w + q2, w + q3
                stack = bottom
                for i in range(lanes):
                    acc = simd.zero()
                    for u in range(read_i64(steps + 16 * i), units, LANES):
                        for line in range(0, nbytes, 64):
                            simd.prefetch(w + AHEAD + line)
                        acc = unit(acc, w, p0, p1, p2, p3, u, x, d, s)
                        w += nbytes
                    stack = finish(acc, read_i64(steps + 16 * i + 8), stack)
                total = load_f32(bottom)
                if units < LANES:
                    # the lanes left out are +0.0
                    total = add(total, simd.zero())
                simd.store_f32(y + panel * 64, total)
            item = draw(ticket, items, threads)

    return kernel(matmul, name=f"matmul_{name}_q8_0_1")
