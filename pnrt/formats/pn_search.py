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
from numba import float32, float64, int32, int64, types, uint16, uint32
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from pnrt import jit
from pnrt.formats.pn import MULTIPLES, WORDS

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

_VECTOR = ir.VectorType(ir.DoubleType(), LANES)
_BITS = ir.VectorType(ir.IntType(64), LANES)


class Candidates(types.Type):
    """numba type of one double per candidate."""

    def __init__(self):
        super().__init__(name="candidates")


@register_model(Candidates)
class CandidatesModel(PrimitiveModel):
    """An LLVM array of vectors, which LLVM keeps in registers."""

    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, ir.ArrayType(_VECTOR, VECTORS))


candidates = Candidates()


def _constant(value):
    kind = _BITS if isinstance(value, int) else _VECTOR
    return ir.Constant(kind, [value] * LANES)


def _lanewise(emit):
    """An intrinsic on candidates (and doubles, given to every lane) from LLVM code for a vector."""

    def generate(context, b, signature, args):
        columns = []
        for kind, arg in zip(signature.args, args, strict=True):
            if kind is candidates:
                columns.append([b.extract_value(arg, i) for i in range(VECTORS)])
                continue
            one = b.insert_element(_constant(0.0), arg, ir.IntType(32)(0))
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            columns.append([b.shuffle_vector(one, one, lanes)] * VECTORS)
        out = ir.Constant(ir.ArrayType(_VECTOR, VECTORS), ir.Undefined)
        for i in range(VECTORS):
            out = b.insert_value(out, emit(b, *(column[i] for column in columns)), i)
        return out

    return generate


def _fma(b, x, y, z):
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f64")
    return b.call(fma, [x, y, z])


def _round_half(b, v):
    """Round doubles to fp16 values, to nearest even; 65520 and more become infinite."""
    bits, drop = b.bitcast(v, _BITS), 42
    odd = b.and_(b.lshr(bits, _constant(drop)), _constant(1))
    bits = b.add(bits, b.add(odd, _constant((1 << drop - 1) - 1)))
    normal = b.bitcast(b.and_(bits, _constant(-1 << drop)), _VECTOR)
    tiny = b.fsub(b.fadd(v, _constant(TO_SUBNORMAL)), _constant(TO_SUBNORMAL))
    value = b.select(b.fcmp_ordered("<", v, _constant(FP16_MIN_NORMAL)), tiny, normal)
    huge = b.fcmp_ordered(">=", v, _constant(FP16_OVERFLOW))
    return b.select(huge, _constant(float("inf")), value)


@intrinsic
def scale_magnitudes(typingctx, multiples, amax, zero):
    """fp16(multiple * amax / zero) for every candidate."""

    def emit(b, m, a, z):
        return _round_half(b, b.fdiv(b.fmul(m, a), z))

    return candidates(candidates, float64, float64), _lanewise(emit)


@intrinsic
def reciprocal(typingctx, v):
    """1 / v; infinite where v is 0."""
    return candidates(candidates), _lanewise(lambda b, v: b.fdiv(_constant(1.0), v))


@intrinsic
def times(typingctx, v, factor):
    """v * factor."""
    return candidates(candidates, float64), _lanewise(lambda b, v, factor: b.fmul(v, factor))


@intrinsic
def add_error(typingctx, error, weight, scale, inverse, low, high):
    """error + (weight - scale * n)^2 with n in low..high the nearest code, zero point taken off."""

    def emit(b, error, w, s, inverse, low, high):
        magic = _constant(TO_INTEGER)
        n = b.fsub(_fma(b, w, inverse, magic), magic)
        n = b.select(b.fcmp_ordered("<", n, high), n, high)
        n = b.select(b.fcmp_ordered(">", n, low), n, low)
        left = _fma(b, b.fneg(s), n, w)
        return _fma(b, left, left, error)

    return candidates(candidates, float64, *[candidates] * 2, *[float64] * 2), _lanewise(emit)


@intrinsic
def last_smallest(typingctx, error, scale):
    """Number of the last smallest error among finite scales that are not 0; -1 without any."""

    def generate(context, b, signature, args):
        masks = []
        for i in range(VECTORS):
            error, scale = (b.extract_value(arg, i) for arg in args)
            usable = b.fcmp_ordered(">", scale, _constant(0.0))
            usable = b.and_(usable, b.fcmp_ordered("<", scale, _constant(float("inf"))))
            if i == VECTORS - 1:
                spare = CANDIDATES - LANES * i
                inside = [int(lane < spare) for lane in range(LANES)]
                usable = b.and_(usable, ir.Constant(ir.VectorType(ir.IntType(1), LANES), inside))
            masks.append((usable, b.select(usable, error, _constant(float("inf")))))
        best = masks[0][1]
        for _, error in masks[1:]:
            best = b.select(b.fcmp_ordered("<", error, best), error, best)
        for step in (4, 2, 1):
            lanes = ir.Constant(
                ir.VectorType(ir.IntType(32), LANES), [i ^ step for i in range(LANES)]
            )
            other = b.shuffle_vector(best, best, lanes)
            best = b.select(b.fcmp_ordered("<", other, best), other, best)
        word = ir.IntType(64)
        found = word(0)
        for i, (usable, error) in enumerate(masks):
            hit = b.bitcast(b.and_(usable, b.fcmp_ordered("==", error, best)), ir.IntType(LANES))
            found = b.or_(found, b.shl(b.zext(hit, word), word(LANES * i)))
        return b.sub(word(63), b.ctlz(found, ir.IntType(1)(0)))

    return int64(candidates, candidates), generate


@intrinsic
def load(typingctx, address):
    """Candidates from memory."""

    def generate(context, b, signature, args):
        kind = context.get_value_type(candidates).as_pointer()
        value = b.load(b.inttoptr(args[0], kind))
        value.align = 8
        return value

    return candidates(int64), generate


@intrinsic
def store(typingctx, address, value):
    """Candidates to memory."""

    def generate(context, b, signature, args):
        b.store(args[1], b.inttoptr(args[0], args[1].type.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(int64, candidates), generate


def _pointer(kind):
    """An intrinsic that makes a typed pointer of an address; index it like an array."""

    @intrinsic
    def pointer(typingctx, address):
        def generate(context, b, signature, args):
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


int64_at, int32_at, uint32_at, uint16_at, float32_at, float64_at = (
    _pointer(t) for t in (int64, int32, uint32, uint16, float32, float64)
)


@intrinsic
def float_of_bits(typingctx, bits):
    """int32 bit pattern -> the float32 it stands for, as a double."""

    def generate(context, b, signature, args):
        return b.fpext(b.bitcast(args[0], ir.FloatType()), ir.DoubleType())

    return float64(int32), generate


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
        args = int64_at(a)
        multiples, scratch = load(args[2]), args[3] + SCRATCH * thread
        scales, scale_bits = float64_at(scratch), int64_at(scratch)
        weights, codes = float64_at(scratch + 320), uint32_at(scratch + 960)
        failed, groups = int64_at(args[4]), args[5]
        failed[thread] = -1
        for group in range(groups * thread // threads, groups * (thread + 1) // threads):
            x = float32_at(args[0] + 4 * block * group)
            out = uint16_at(args[1] + 34 * group)
            negative, other = largest_magnitudes(int32_at(args[0] + 4 * block * group), block)
            sign = 1.0 if negative > other else -1.0
            amax = float_of_bits(max(negative, other))
            for e in range(block):
                weights[e] = x[e]
            magnitude = scale_magnitudes(multiples, amax, float(zero))
            scale, error = times(magnitude, sign), times(multiples, 0.0)
            inverse = reciprocal(scale)
            for e in range(block):
                error = add_error(error, weights[e], scale, inverse, low, high)
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
    threads = threads or jit.default_threads()[0]
    multiples = np.resize(MULTIPLES, VECTORS * LANES)
    scratch, failed = np.empty((threads, SCRATCH), np.uint8), np.empty(threads, np.int64)
    groups = out.size // 34
    jit.run(search_kernel(bits), x, out, multiples, scratch, failed, groups, threads=threads)
    bad = failed[failed >= 0]
    return int(bad.min()) if bad.size else None
