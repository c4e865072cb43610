"""LLVM code, and the numba operations of kernels that are made of it.

Only the fp16 conversions depend on the instruction set, and their results do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pnrt.machine import cpu_features

LANES = 16
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()


def operation(result: types.Type, *arguments: types.Type):
    """Make `emit(b, *values)`, which emits LLVM code, an operation on these numba types.

    Kernels may give it whatever numba casts to them.
    """
    return lambda emit: typed(emit, lambda given: (result(*arguments), emit))


def typed(emit: Callable, choose: Callable):
    """The same where `choose(types of the arguments)` gives the signature and the code to emit."""

    def op(typingctx, *given):
        signature, code = choose(given)

        def generate(context, b, signature, values):
            value = code(b, *values)
            return context.get_dummy_value() if value is None else value

        return signature, generate

    # numba asks how many arguments there are; those with a default are the emitter's own
    parameters = inspect.signature(emit).parameters.values()
    op.__signature__ = inspect.Signature([p for p in parameters if p.default is p.empty])
    op.__name__, op.__doc__ = emit.__name__, emit.__doc__
    return intrinsic(op)


def vector(element, n=LANES):
    """A vector type."""
    return ir.VectorType(element, n)


def constant(vector, value):
    """A vector with one value in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def pointer(b, address, llvm):
    """An int64 address as a pointer."""
    return b.inttoptr(address, llvm.as_pointer())


def load_vector(b, address, llvm, align):
    """Emit a load of an LLVM type at an address."""
    value = b.load(pointer(b, address, llvm))
    value.align = align
    return value


def store_vector(b, value, address, align):
    """Emit a store at an address."""
    b.store(value, pointer(b, address, value.type)).align = align


def splat(b, scalar, n=LANES):
    """Emit a vector with a scalar in every lane."""
    one = b.insert_element(
        ir.Constant(vector(scalar.type, n), ir.Undefined), scalar, ir.Constant(I32, 0)
    )
    return b.shuffle_vector(one, one, constant(vector(I32, n), 0))


def call_named(b, name, result, args, var_arg=False):
    """Emit a call of an LLVM intrinsic or C function."""
    named = () if var_arg else [a.type for a in args]
    function_type = ir.FunctionType(result, named, var_arg)
    return b.call(cgutils.get_or_insert_function(b.module, function_type, name), args)


def part(b, v, start, n):
    """Emit lanes start .. start + n."""
    return b.shuffle_vector(v, v, ir.Constant(vector(I32, n), list(range(start, start + n))))


def join(b, low, high):
    """Emit one vector of the lanes of two."""
    n = low.type.count
    return b.shuffle_vector(low, high, ir.Constant(vector(I32, 2 * n), list(range(2 * n))))


def halves(b, emit, *vectors):
    """Emit an operation on 512-bit vectors as two 256-bit ones."""
    n = [v.type.count // 2 for v in vectors]
    low = emit(*(part(b, v, 0, k) for v, k in zip(vectors, n, strict=True)))
    high = emit(*(part(b, v, k, k) for v, k in zip(vectors, n, strict=True)))
    return join(b, low, high)


def half_to_float(b, h):
    """[16] i16 bit patterns -> float32, exact."""
    if "f16c" in cpu_features():
        return b.fpext(b.bitcast(h, vector(HALF)), vector(FLOAT))
    w = b.zext(h, vector(I32))
    c = lambda value: constant(w.type, value)  # noqa: E731
    sign = b.shl(b.and_(w, c(0x8000)), c(16))
    body = b.and_(w, c(0x7FFF))
    # bits of a half moved into a float's place are 2^-112 of its value, subnormals included
    scaled = b.fmul(b.bitcast(b.shl(body, c(13)), vector(FLOAT)), constant(vector(FLOAT), 2.0**112))
    special = b.or_(b.shl(body, c(13)), c(0x7F800000))
    is_special = b.icmp_unsigned(">=", body, c(0x7C00))
    return b.bitcast(
        b.or_(sign, b.select(is_special, special, b.bitcast(scaled, w.type))), vector(FLOAT)
    )


def float_to_half(b, x):
    """[16] float32 -> i16 bit patterns, to nearest even, subnormals and infinities included."""
    if "f16c" in cpu_features():
        return b.bitcast(b.fptrunc(x, vector(HALF)), vector(I16))
    ints, floats = vector(I32), vector(FLOAT)
    c = lambda value: constant(ints, value)  # noqa: E731
    bits = b.bitcast(x, ints)
    sign = b.and_(b.lshr(bits, c(16)), c(0x8000))
    body = b.and_(bits, c(0x7FFFFFFF))
    # normal halves: rebias the exponent and round the 13 dropped bits to even
    odd = b.and_(b.lshr(body, c(13)), c(1))
    normal = b.lshr(b.add(b.add(body, c(0xFFF - (112 << 23))), odd), c(13))
    # subnormal halves: adding 0.5 leaves the value's multiple of 2^-24 in the low bits
    tiny = b.sub(
        b.bitcast(b.fadd(b.bitcast(body, floats), constant(floats, 0.5)), ints), c(0x3F000000)
    )
    half = b.select(b.icmp_unsigned("<", body, c(113 << 23)), tiny, normal)
    half = b.select(b.icmp_unsigned(">=", body, c(0x477FF000)), c(0x7C00), half)
    nan = b.or_(c(0x7E00), b.and_(b.lshr(body, c(13)), c(0x3FF)))
    half = b.select(b.icmp_unsigned(">", body, c(0x7F800000)), nan, half)
    return b.trunc(b.or_(sign, half), vector(I16))
