"""The compiled search for PN scales: the bytes of `PN.quantize_reference`, many times faster.

The candidates are the lanes: a weight is read once and tried with every scale, so each candidate's
error is summed from the first weight to the last, as the rule says. Two facts save time and change
no byte. A float32 weight divided by an fp16 scale is never closer than one part in 2^25 to a half
unless it is one, so weight * (1 / scale) in double rounds to the same code except at exact halves,
where both codes leave the same error. And weight - scale * code is exact, with at most 24 bits, so
its square is exact in double and fused multiply-adds round nothing differently. The codes that are
stored come from the true division.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import float64, int32, int64, uint32

from pnrt import jit
from pnrt.emit import I8, I32, I64, call_named, constant, load_vector, operation, splat, vector
from pnrt.formats.pn import MULTIPLES, WORDS
from pnrt.machine import default_threads
from pnrt.simd import (
    Tile,
    Vec,
    bits_float,
    f32_at,
    f64_at,
    i32_at,
    i64_at,
    lanewise,
    reader,
    u16_at,
    u32_at,
    writer,
)

CANDIDATES = len(MULTIPLES)
# five vectors of eight doubles hold the 36 candidates; the four spare lanes are never looked at
VECTORS, LANES = 5, 8
# adding and taking away 1.5 * 2^52 rounds a double to an integer, halves to even;
# times 2^-24 it rounds to a multiple of the smallest fp16 subnormal
TO_INTEGER = 1.5 * 2.0**52
TO_SUBNORMAL = TO_INTEGER * 2.0**-24
FP16_MIN_NORMAL, FP16_OVERFLOW = 2.0**-14, 65520.0
# bytes a thread works in: 40 scales, 80 weights in double, 80 codes
SCRATCH = 40 * 8 + 80 * 8 + 80 * 4

DOUBLE, BITS = vector(ir.DoubleType(), LANES), vector(I64, LANES)
f64x8 = Vec("f64x8", DOUBLE)
candidates = Tile(f64x8, VECTORS)


def _lanes(value):
    return constant(BITS if isinstance(value, int) else DOUBLE, value)


def _fma(b, x, y, z):
    return call_named(b, f"llvm.fma.v{LANES}f64", DOUBLE, [x, y, z])


def _round_half(b, v):
    """Round doubles to fp16 values, to nearest even; 65520 and more become infinite."""
    bits, drop = b.bitcast(v, BITS), 42
    odd = b.and_(b.lshr(bits, _lanes(drop)), _lanes(1))
    bits = b.add(bits, b.add(odd, _lanes((1 << drop - 1) - 1)))
    normal = b.bitcast(b.and_(bits, _lanes(-1 << drop)), DOUBLE)
    tiny = b.fsub(b.fadd(v, _lanes(TO_SUBNORMAL)), _lanes(TO_SUBNORMAL))
    value = b.select(b.fcmp_ordered("<", v, _lanes(FP16_MIN_NORMAL)), tiny, normal)
    huge = b.fcmp_ordered(">=", v, _lanes(FP16_OVERFLOW))
    return b.select(huge, _lanes(float("inf")), value)


def _add_error(b, error, w, s, inverse, low, high):
    magic = _lanes(TO_INTEGER)
    n = b.fsub(_fma(b, w, inverse, magic), magic)
    n = b.select(b.fcmp_ordered("<", n, high), n, high)
    n = b.select(b.fcmp_ordered(">", n, low), n, low)
    left = _fma(b, b.fneg(s), n, w)
    return _fma(b, left, left, error)


load = reader(candidates, lambda b, p: load_vector(b, p, candidates.llvm, 8))
store = writer(candidates, 8)
everywhere = operation(f64x8, float64)(lambda b, x: splat(b, x, LANES))
times = lanewise(f64x8, lambda b, v, factor: b.fmul(v, factor))
# 1 / v; infinite where v is 0
reciprocal = lanewise(f64x8, lambda b, v: b.fdiv(_lanes(1.0), v))
# fp16(multiple * amax / zero)
scale_magnitudes = lanewise(f64x8, lambda b, m, a, z: _round_half(b, b.fdiv(b.fmul(m, a), z)))
# error + (weight - scale * n)^2 with n in low..high the nearest code, zero point taken off
add_error = lanewise(f64x8, _add_error)


@operation(int64, candidates, candidates)
def last_smallest(b, error, scale):
    """Number of the last smallest error among finite scales that are not 0; -1 without any."""
    masks = []
    for i in range(VECTORS):
        one = b.extract_value(scale, i)
        usable = b.fcmp_ordered(">", one, _lanes(0.0))
        usable = b.and_(usable, b.fcmp_ordered("<", one, _lanes(float("inf"))))
        if i == VECTORS - 1:
            spare = CANDIDATES - LANES * i
            inside = [int(lane < spare) for lane in range(LANES)]
            usable = b.and_(usable, ir.Constant(usable.type, inside))
        masks.append((usable, b.select(usable, b.extract_value(error, i), _lanes(float("inf")))))
    best = masks[0][1]
    for _, error in masks[1:]:
        best = b.select(b.fcmp_ordered("<", error, best), error, best)
    for step in (4, 2, 1):
        lanes = ir.Constant(vector(I32, LANES), [i ^ step for i in range(LANES)])
        other = b.shuffle_vector(best, best, lanes)
        best = b.select(b.fcmp_ordered("<", other, best), other, best)
    found = I64(0)
    for i, (usable, error) in enumerate(masks):
        hit = b.bitcast(b.and_(usable, b.fcmp_ordered("==", error, best)), I8)
        found = b.or_(found, b.shl(b.zext(hit, I64), I64(LANES * i)))
    return b.sub(I64(63), b.ctlz(found, ir.IntType(1)(0)))


@jit.inline
def half_bits(bits):
    """Bits of a positive double that is an fp16 value -> its fp16 bits."""
    exponent = (bits >> 52) - (1023 - 15)
    if exponent > 0:
        return exponent << 10 | bits >> 42 & 1023
    return (bits >> 42 & 1023 | 1024) >> 1 - exponent


@jit.inline
def largest_magnitudes(bits, block):
    """Bits of the largest magnitude among the negative and among the other weights of a group."""
    negative, other = np.int32(0), np.int32(0)
    for e in range(block):
        magnitude = bits[e] & np.int32(0x7FFFFFFF)
        negative = max(negative, magnitude if bits[e] < 0 else np.int32(0))
        other = max(other, magnitude if bits[e] >= 0 else np.int32(0))
    return negative, other


@functools.cache
def search_kernel(bits: int) -> jit.Kernel:
    """The search of one PN format: groups [G, B] float32 -> blocks [G, 34], G shared by threads.

    Arguments: addresses of groups, blocks, multiples [40] float64, scratch [threads, SCRATCH] bytes
    and failed [threads] int64 (the thread's first group without a finite scale, or -1); G.
    """
    zero, per_word = 1 << bits - 1, 2 * (16 // bits)
    block = WORDS * per_word
    low, high = -float(zero), float(zero - 1)

    def kernel(a, thread, threads):
        args = i64_at(a)
        multiples, scratch = load(args[2]), args[3] + SCRATCH * thread
        scales, scale_bits = f64_at(scratch), i64_at(scratch)
        weights, codes = f64_at(scratch + 320), u32_at(scratch + 960)
        failed, groups = i64_at(args[4]), args[5]
        zeros, lows, highs = everywhere(float(zero)), everywhere(low), everywhere(high)
        failed[thread] = -1
        for group in range(groups * thread // threads, groups * (thread + 1) // threads):
            x = f32_at(args[0] + 4 * block * group)
            out = u16_at(args[1] + 34 * group)
            negative, other = largest_magnitudes(i32_at(args[0] + 4 * block * group), block)
            sign = 1.0 if negative > other else -1.0
            amax = float64(bits_float(max(negative, other)))
            for e in range(block):
                weights[e] = x[e]
            magnitude = scale_magnitudes(multiples, everywhere(amax), zeros)
            scale, error = times(magnitude, everywhere(sign)), times(multiples, everywhere(0.0))
            inverse = reciprocal(scale)
            for e in range(block):
                error = add_error(error, everywhere(weights[e]), scale, inverse, lows, highs)
            store(scratch, magnitude)
            chosen = last_smallest(error, magnitude)
            if not amax < np.inf or (chosen < 0 and scales[0] == np.inf):
                failed[thread] = group
                return
            # without a usable scale every weight is so small that dividing by 1 gives code 0
            d, d_bits = 1.0, int64(0)
            if chosen >= 0:
                d = sign * scales[chosen]
                d_bits = half_bits(scale_bits[chosen]) | (int64(0x8000) if sign < 0 else int64(0))
            for e in range(block):
                n = min(max(weights[e] / d, low), high)
                codes[e] = uint32(int32((n + TO_INTEGER) - TO_INTEGER) + int32(zero))
            out[0] = d_bits
            for word in range(2 * WORDS):
                packed = uint32(0)
                for pair in range(per_word // 2):
                    code = codes[per_word * (word // 2) + 2 * pair + word % 2]
                    packed |= code << uint32(bits * pair)
                out[1 + word] = packed

    return jit.kernel(kernel, name=f"formats.pn_search_{bits}")


def search(x: np.ndarray, out: np.ndarray, bits: int, threads: int | None = None) -> int | None:
    """Fill out [N, row_bytes] uint8 from x [N, K] float32; both C-contiguous.

    Returns the number of the first group that holds a non-finite weight or has no finite scale,
    None when all is well.
    """
    if not x.size:
        return None
    threads = threads or default_threads()[0]
    multiples = np.resize(MULTIPLES, VECTORS * LANES)
    scratch, failed = np.empty((threads, SCRATCH), np.uint8), np.empty(threads, np.int64)
    groups = out.size // 34
    jit.run(search_kernel(bits), x, out, multiples, scratch, failed, groups, threads=threads)
    bad = failed[failed >= 0]
    return int(bad.min()) if bad.size else None
