"""LLVM vectors as numba values: sixteen 32-bit lanes, and tiles of them.

A kernel handles memory as int64 addresses and data as vectors of 16 lanes (i32x16, f32x16),
whatever the CPU: LLVM splits a vector where registers are narrower. A *tile* is T vectors, one per
token; an operation on tiles and vectors is done token by token, so one kernel source serves one
token and many.
Products of bytes are in dots.py.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from pnrt.cpu.emit import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES,
    call_named,
    constant,
    float_to_half,
    half_to_float,
    load_vector,
    part,
    pointer,
    splat,
    store_vector,
    vector,
)  # fmt: skip


class Vec(types.Type):
    """numba type of a 16-lane vector."""

    def __init__(self, name: str, llvm):
        self.llvm, self.vec, self.count = llvm, self, 0
        super().__init__(name=name)


class Tile(types.Type):
    """numba type of T vectors."""

    def __init__(self, vec: Vec, count: int):
        self.vec, self.count = vec, count
        self.llvm = ir.ArrayType(vec.llvm, count)
        super().__init__(name=f"{vec.name}[{count}]")


@register_model(Vec)
@register_model(Tile)
class VectorModel(PrimitiveModel):
    """Vectors and tiles live in LLVM values of their own type."""

    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, fe_type.llvm)


i32x16, f32x16 = Vec("i32x16", vector(I32)), Vec("f32x16", vector(FLOAT))


def _reader(result, emit):
    @intrinsic
    def read(typingctx, address):
        """Read at an int64 address."""
        return result(types.int64), lambda context, b, signature, args: emit(b, args[0])

    return read


load_i32 = _reader(i32x16, lambda b, p: load_vector(b, p, i32x16.llvm, 4))
load_f32 = _reader(f32x16, lambda b, p: load_vector(b, p, f32x16.llvm, 4))
load_half = _reader(f32x16, lambda b, p: half_to_float(b, load_vector(b, p, vector(I16), 2)))
load_bf16 = _reader(
    f32x16,
    lambda b, p: b.bitcast(
        b.shl(b.zext(load_vector(b, p, vector(I16), 2), vector(I32)), constant(vector(I32), 16)),
        vector(FLOAT),
    ),
)
load_i16 = _reader(i32x16, lambda b, p: b.sext(load_vector(b, p, vector(I16), 2), vector(I32)))
load_u8 = _reader(i32x16, lambda b, p: b.zext(load_vector(b, p, vector(I8), 1), vector(I32)))
load_i8 = _reader(i32x16, lambda b, p: b.sext(load_vector(b, p, vector(I8), 1), vector(I32)))
splat_i32 = _reader(i32x16, lambda b, p: splat(b, load_vector(b, p, I32, 4)))
splat_f32 = _reader(f32x16, lambda b, p: splat(b, load_vector(b, p, FLOAT, 4)))
read_i64 = _reader(types.int64, lambda b, p: load_vector(b, p, I64, 8))
read_i32 = _reader(types.int32, lambda b, p: load_vector(b, p, I32, 4))
read_u8 = _reader(types.uint8, lambda b, p: load_vector(b, p, I8, 1))
read_u16 = _reader(types.uint16, lambda b, p: load_vector(b, p, I16, 2))
read_f32 = _reader(types.float32, lambda b, p: load_vector(b, p, FLOAT, 4))


@intrinsic
def load_first(typingctx, address, n):
    """n float32 (n may exceed 16 or be negative) in the first lanes, +0.0 in the others."""

    def emit(context, b, signature, args):
        lanes = ir.Constant(i32x16.llvm, list(range(LANES)))
        mask = b.icmp_signed("<", lanes, splat(b, b.trunc(args[1], I32)))
        first = pointer(b, args[0], f32x16.llvm)
        inputs = [first, ir.Constant(I32, 4), mask, constant(f32x16.llvm, 0.0)]
        return call_named(b, "llvm.masked.load.v16f32.p0", f32x16.llvm, inputs)

    return f32x16(types.int64, types.int64), emit


@intrinsic
def store_first(typingctx, address, n, value):
    """Write the first n lanes and nothing behind them; n may exceed 16 or be negative."""

    def emit(context, b, signature, args):
        lanes = ir.Constant(i32x16.llvm, list(range(LANES)))
        mask = b.icmp_signed("<", lanes, splat(b, b.trunc(args[1], I32)))
        inputs = [args[2], pointer(b, args[0], f32x16.llvm), ir.Constant(I32, 4), mask]
        call_named(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), inputs)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, f32x16), emit


def _writer(value_type, align, convert=lambda b, v: v):
    @intrinsic
    def write(typingctx, address, value):
        """Write a value at an int64 address."""

        def emit(context, b, signature, args):
            store_vector(b, convert(b, args[1]), args[0], align)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), emit

    return write


store_f32 = _writer(f32x16, 4)
store_i32 = _writer(i32x16, 4)
store_i8 = _writer(i32x16, 1, lambda b, v: b.trunc(v, vector(I8)))
write_f32 = _writer(types.float32, 4)


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address, which need not exist."""

    def emit(context, b, signature, args):
        at, read, keep, data = pointer(b, args[0], I8), *(ir.Constant(I32, n) for n in (0, 3, 1))
        kind = ir.FunctionType(ir.VoidType(), [at.type, I32, I32, I32])
        name = "llvm.prefetch.p0"
        b.call(cgutils.get_or_insert_function(b.module, kind, name), [at, read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def set_f32(typingctx, value):
    """A float32 in every lane."""
    return f32x16(types.float32), lambda context, b, signature, args: splat(b, args[0])


def _lift(result: Vec, emit):
    """Numba typing and code of an operation whose arguments are vectors, tiles or a mix of both."""

    def typed(args):
        count = max(getattr(a, "count", 0) for a in args)
        out = Tile(result, count) if count else result

        def code(context, b, signature, values):
            if not count:
                return emit(b, *values)
            value = ir.Constant(out.llvm, ir.Undefined)
            for t in range(count):
                parts = [
                    b.extract_value(v, t) if isinstance(a, Tile) else v
                    for a, v in zip(args, values, strict=True)
                ]
                value = b.insert_value(value, emit(b, *parts), t)
            return value

        return out(*args), code

    return typed


def unary(result, emit):
    """An operation on a vector or tile."""
    typed = _lift(result, emit)

    @intrinsic
    def op(typingctx, x):
        """Elementwise operation."""
        return typed((x,))

    return op


def binary(result, emit):
    """An operation on two vectors, tiles or one of each."""
    typed = _lift(result, emit)

    @intrinsic
    def op(typingctx, x, y):
        """Elementwise operation."""
        return typed((x, y))

    return op


def ternary(result, emit):
    """An operation on three vectors, tiles or a mix."""
    typed = _lift(result, emit)

    @intrinsic
    def op(typingctx, x, y, z):
        """Elementwise operation."""
        return typed((x, y, z))

    return op


and_ = binary(i32x16, lambda b, x, y: b.and_(x, y))
xor = binary(i32x16, lambda b, x, y: b.xor(x, y))
or_ = binary(i32x16, lambda b, x, y: b.or_(x, y))
add_i = binary(i32x16, lambda b, x, y: b.add(x, y))
sub_i = binary(i32x16, lambda b, x, y: b.sub(x, y))
larger_i = binary(i32x16, lambda b, x, y: b.select(b.icmp_signed(">", y, x), y, x))
add = binary(f32x16, lambda b, x, y: b.fadd(x, y))
sub = binary(f32x16, lambda b, x, y: b.fsub(x, y))
mul = binary(f32x16, lambda b, x, y: b.fmul(x, y))
div = binary(f32x16, lambda b, x, y: b.fdiv(x, y))
bits_f32 = unary(f32x16, lambda b, x: b.bitcast(x, f32x16.llvm))
fma = ternary(f32x16, lambda b, x, y, z: call_named(b, "llvm.fma.v16f32", x.type, [x, y, z]))
to_f32 = unary(f32x16, lambda b, x: b.sitofp(x, f32x16.llvm))
larger = binary(f32x16, lambda b, x, y: b.select(b.fcmp_ordered(">", y, x), y, x))


truncate = unary(i32x16, lambda b, x: b.fptosi(x, i32x16.llvm))
absolute_bits = unary(
    i32x16, lambda b, x: b.and_(b.bitcast(x, i32x16.llvm), constant(i32x16.llvm, 0x7FFFFFFF))
)
# 1 where x >= y, else 0
at_least = binary(i32x16, lambda b, x, y: b.zext(b.fcmp_ordered(">=", x, y), i32x16.llvm))


def bits(value: int):
    """A function that gives the vector with `value` in every lane."""

    @intrinsic
    def same(typingctx):
        """The same 32 bits in every lane."""
        signed = value - (1 << 32) if value >= 1 << 31 else value
        return i32x16(), lambda context, b, signature, args: constant(i32x16.llvm, signed)

    return same


def shift_right(n: int):
    """A function that shifts every lane right by n bits, filling with zeros."""
    return unary(i32x16, lambda b, x: b.lshr(x, constant(x.type, n)))


def shift_left(n: int):
    """A function that shifts every lane left by n bits."""
    return unary(i32x16, lambda b, x: b.shl(x, constant(x.type, n)))


@intrinsic
def zero(typingctx):
    """+0.0 in every lane."""
    return f32x16(), lambda context, b, signature, args: constant(f32x16.llvm, 0.0)


@intrinsic
def butterfly(typingctx, low, high):
    """The lane-32 sum's last part: 32 partial sums added by s = 16, 8, 4, 2, 1 -> float32."""

    def emit(context, b, signature, args):
        v = b.fadd(*args)
        for s in (8, 4, 2, 1):
            v = b.fadd(part(b, v, 0, s), part(b, v, s, s))
        return b.extract_element(v, ir.Constant(I32, 0))

    return types.float32(f32x16, f32x16), emit


def hadamard_step(h: int):
    """A function on a vector: of lanes h apart, a + b in the lower and a - b in the upper."""

    def emit(b, v):
        lanes = range(LANES)
        other = ir.Constant(vector(I32), [i ^ h for i in lanes])
        upper = ir.Constant(vector(ir.IntType(1)), [bool(i & h) for i in lanes])
        partner = b.shuffle_vector(v, v, other)
        return b.select(upper, b.fsub(partner, v), b.fadd(v, partner))

    return unary(f32x16, emit)


def _fold_int(name):
    @intrinsic
    def fold(typingctx, v):
        """16 lanes folded into one int32, exact."""
        return types.int32(i32x16), lambda c, b, s, a: call_named(b, name, I32, a)

    return fold


fold_sum_i = _fold_int("llvm.vector.reduce.add.v16i32")
fold_max_i = _fold_int("llvm.vector.reduce.smax.v16i32")


@intrinsic
def fold_max(typingctx, v):
    """The largest of 16 lanes -> float32."""

    def emit(context, b, signature, args):
        (v,) = args
        for s in (8, 4, 2, 1):
            low, high = part(b, v, 0, s), part(b, v, s, s)
            v = b.select(b.fcmp_ordered(">", high, low), high, low)
        return b.extract_element(v, ir.Constant(I32, 0))

    return types.float32(f32x16), emit


@intrinsic
def fma_scalar(typingctx, x, y, z):
    """x * y + z of float32 scalars, rounded once."""

    def emit(context, b, signature, args):
        return call_named(b, "llvm.fma.f32", FLOAT, args)

    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic
def half_bits(typingctx, x):
    """float32 -> uint16 bit pattern of the nearest fp16 (ties to even)."""

    def emit(context, b, signature, args):
        half = float_to_half(b, splat(b, args[0]))
        return b.extract_element(half, ir.Constant(I32, 0))

    return types.uint16(types.float32), emit


@intrinsic
def half_value(typingctx, h):
    """uint16 bit pattern of an fp16 -> float32."""

    def emit(context, b, signature, args):
        wide = half_to_float(b, splat(b, args[0]))
        return b.extract_element(wide, ir.Constant(I32, 0))

    return types.float32(types.uint16), emit


@intrinsic
def float_bits(typingctx, x):
    """float32 -> its int32 bit pattern."""
    return types.int32(types.float32), lambda c, b, s, a: b.bitcast(a[0], I32)


@intrinsic
def bits_float(typingctx, x):
    """int32 bit pattern -> float32."""
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], FLOAT)


def _array(element):
    @intrinsic
    def array(typingctx, address):
        """A numba pointer to the elements at an int64 address; index it like an array."""
        pointer = types.CPointer(element)
        return pointer(types.int64), lambda context, b, signature, args: b.inttoptr(
            args[0], context.get_value_type(pointer)
        )

    return array


f32_at, i32_at, i64_at, u64_at, u32_at, u16_at, u8_at, i8_at = (
    _array(getattr(types, name))
    for name in ("float32", "int32", "int64", "uint64", "uint32", "uint16", "uint8", "int8")
)
