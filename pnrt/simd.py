"""LLVM vectors as numba values: sixteen 32-bit lanes, and tiles of them.

A kernel handles memory as int64 addresses and data as vectors of 16 lanes (i32x16, f32x16),
whatever the CPU: LLVM splits a vector where registers are narrower. A *tile* is T vectors, e.g.
one per token; an operation on tiles and vectors is done vector by vector, so one kernel source
serves one token and many. Every operation rounds once, lane by lane, as NumPy's does.
Products of bytes are in cpu/dots.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core.datamodel import PrimitiveModel
from numba.extending import register_model
from numba.types import float32, int32, int64, uint8, uint16, uint64, void

from pnrt.emit import (
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
    operation,
    part,
    pointer,
    splat,
    store_vector,
    typed,
    vector,
)  # fmt: skip


class Vec(types.Type):
    """numba type of a vector."""

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
# what a comparison gives: one bit per lane
mask16 = Vec("mask16", vector(ir.IntType(1)))


def reader(result: types.Type, emit):
    """An operation that reads at an int64 address."""
    return operation(result, int64)(emit)


def writer(value: types.Type, align: int, convert=lambda b, v: v):
    """An operation (address, value) that writes at an int64 address."""
    return operation(void, int64, value)(
        lambda b, address, value: store_vector(b, convert(b, value), address, align)
    )


def array(name: str):
    """A function that makes an int64 address a pointer to elements; index it like an array."""
    element = getattr(types, name)
    llvm = {"float32": FLOAT, "float64": ir.DoubleType()}.get(name) or ir.IntType(element.bitwidth)
    return operation(types.CPointer(element), int64)(lambda b, p: pointer(b, p, llvm))


def _small(b, x):
    # NaN has no integer
    x = b.select(b.fcmp_ordered("==", x, x), x, constant(x.type, 0.0))
    return b.trunc(b.fptosi(x, i32x16.llvm), vector(I8))


load_i32 = reader(i32x16, lambda b, p: load_vector(b, p, i32x16.llvm, 4))
load_f32 = reader(f32x16, lambda b, p: load_vector(b, p, f32x16.llvm, 4))
load_half = reader(f32x16, lambda b, p: half_to_float(b, load_vector(b, p, vector(I16), 2)))
load_bf16 = reader(
    f32x16,
    lambda b, p: b.bitcast(
        b.shl(b.zext(load_vector(b, p, vector(I16), 2), vector(I32)), constant(vector(I32), 16)),
        vector(FLOAT),
    ),
)
load_i16 = reader(i32x16, lambda b, p: b.sext(load_vector(b, p, vector(I16), 2), vector(I32)))
load_u8 = reader(i32x16, lambda b, p: b.zext(load_vector(b, p, vector(I8), 1), vector(I32)))
load_i8 = reader(i32x16, lambda b, p: b.sext(load_vector(b, p, vector(I8), 1), vector(I32)))
splat_i32 = reader(i32x16, lambda b, p: splat(b, load_vector(b, p, I32, 4)))
splat_f32 = reader(f32x16, lambda b, p: splat(b, load_vector(b, p, FLOAT, 4)))
read_i64 = reader(int64, lambda b, p: load_vector(b, p, I64, 8))
# at any address
read_u64 = reader(uint64, lambda b, p: load_vector(b, p, I64, 1))
read_i32 = reader(int32, lambda b, p: load_vector(b, p, I32, 4))
read_u8 = reader(uint8, lambda b, p: load_vector(b, p, I8, 1))
read_u16 = reader(uint16, lambda b, p: load_vector(b, p, I16, 2))
read_f32 = reader(float32, lambda b, p: load_vector(b, p, FLOAT, 4))
store_f32 = writer(f32x16, 4)
store_i32 = writer(i32x16, 4)
store_i8 = writer(i32x16, 1, lambda b, v: b.trunc(v, vector(I8)))
# whole numbers 0 to 255, NaN as 0
store_u8 = writer(f32x16, 1, _small)
write_f32 = writer(float32, 4)
write_u8 = writer(uint8, 1)
f32_at, f64_at, i32_at, i64_at, u64_at, u32_at, u16_at, u8_at, i8_at = map(
    array,
    ("float32", "float64", "int32", "int64", "uint64", "uint32", "uint16", "uint8", "int8"),
)  # fmt: skip


def _first(b, n):
    lanes = ir.Constant(i32x16.llvm, list(range(LANES)))
    return b.icmp_signed("<", lanes, splat(b, b.trunc(n, I32)))


@operation(f32x16, int64, int64)
def load_first(b, address, n):
    """n float32 (n may exceed 16 or be negative) in the first lanes, +0.0 in the others."""
    first, align = pointer(b, address, f32x16.llvm), ir.Constant(I32, 4)
    inputs = [first, align, _first(b, n), constant(f32x16.llvm, 0.0)]
    return call_named(b, "llvm.masked.load.v16f32.p0", f32x16.llvm, inputs)


@operation(void, int64, int64, f32x16)
def store_first(b, address, n, value):
    """Write the first n lanes and nothing behind them; n may exceed 16 or be negative."""
    first, align = pointer(b, address, f32x16.llvm), ir.Constant(I32, 4)
    inputs = [value, first, align, _first(b, n)]
    call_named(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), inputs)


@operation(void, int64)
def prefetch(b, address):
    """Ask for the cache line at an address, which need not exist."""
    read, keep, data = (ir.Constant(I32, n) for n in (0, 3, 1))
    inputs = [pointer(b, address, I8), read, keep, data]
    call_named(b, "llvm.prefetch.p0", ir.VoidType(), inputs)


def lanewise(result: Vec, emit):
    """An operation whose arguments are vectors, tiles or a mix of both, done vector by vector."""

    def choose(given):
        count = max(getattr(a, "count", 0) for a in given)
        if not count:
            return result(*given), emit
        out = Tile(result, count)

        def each(b, *values):
            value = ir.Constant(out.llvm, ir.Undefined)
            for t in range(count):
                parts = [
                    b.extract_value(v, t) if isinstance(a, Tile) else v
                    for a, v in zip(given, values, strict=True)
                ]
                value = b.insert_value(value, emit(b, *parts), t)
            return value

        return out(*given), each

    return typed(emit, choose)


and_ = lanewise(i32x16, lambda b, x, y: b.and_(x, y))
xor = lanewise(i32x16, lambda b, x, y: b.xor(x, y))
or_ = lanewise(i32x16, lambda b, x, y: b.or_(x, y))
add_i = lanewise(i32x16, lambda b, x, y: b.add(x, y))
sub_i = lanewise(i32x16, lambda b, x, y: b.sub(x, y))
larger_i = lanewise(i32x16, lambda b, x, y: b.select(b.icmp_signed(">", y, x), y, x))
add = lanewise(f32x16, lambda b, x, y: b.fadd(x, y))
sub = lanewise(f32x16, lambda b, x, y: b.fsub(x, y))
mul = lanewise(f32x16, lambda b, x, y: b.fmul(x, y))
div = lanewise(f32x16, lambda b, x, y: b.fdiv(x, y))


def _divide(b, x, y):
    zero = constant(y.type, 0.0)
    return b.select(b.fcmp_unordered("!=", y, zero), b.fdiv(x, y), zero)


# x / y, 0 where y is 0
divide = lanewise(f32x16, _divide)
fma = lanewise(f32x16, lambda b, x, y, z: call_named(b, "llvm.fma.v16f32", x.type, [x, y, z]))
to_f32 = lanewise(f32x16, lambda b, x: b.sitofp(x, f32x16.llvm))
truncate = lanewise(i32x16, lambda b, x: b.fptosi(x, i32x16.llvm))
bits_f32 = lanewise(f32x16, lambda b, x: b.bitcast(x, f32x16.llvm))
absolute_bits = lanewise(
    i32x16, lambda b, x: b.and_(b.bitcast(x, i32x16.llvm), constant(i32x16.llvm, 0x7FFFFFFF))
)
# a NaN in x stays
larger = lanewise(f32x16, lambda b, x, y: b.select(b.fcmp_ordered(">", y, x), y, x))
smaller = lanewise(f32x16, lambda b, x, y: b.select(b.fcmp_ordered("<", y, x), y, x))
# 1 where x >= y, else 0
at_least = lanewise(i32x16, lambda b, x, y: b.zext(b.fcmp_ordered(">=", x, y), i32x16.llvm))
less = lanewise(mask16, lambda b, x, y: b.fcmp_ordered("<", x, y))
differ = lanewise(mask16, lambda b, x, y: b.fcmp_unordered("!=", x, y))
both = lanewise(mask16, lambda b, x, y: b.and_(x, y))
# x where the mask is set, y elsewhere
pick = lanewise(f32x16, lambda b, mask, x, y: b.select(mask, x, y))


def stairs(edges: Sequence[float], values: Sequence[float]):
    """An operation: values[i] where edges[i - 1] <= x < edges[i], of one value more than edges."""

    def emit(b, x):
        steps = [constant(x.type, float(value)) for value in values]
        below = [b.fcmp_ordered("<", x, constant(x.type, float(edge))) for edge in edges]
        # neighbours meet in pairs: the chain of choices is short
        while len(steps) > 1:
            pairs = zip(below[::2], steps[::2], steps[1::2], strict=False)
            rest = steps[len(steps) // 2 * 2 :]
            steps = [b.select(mask, low, high) for mask, low, high in pairs] + rest
            below = below[1::2]
        return steps[0]

    return lanewise(f32x16, emit)


def _rounded_once(name):
    return lanewise(f32x16, lambda b, x: call_named(b, f"llvm.{name}.v16f32", x.type, [x]))


whole, root, size = map(_rounded_once, ("nearbyint", "sqrt", "fabs"))


@operation(types.boolean, mask16)
def some(b, mask):
    """Whether a mask is set anywhere."""
    return b.icmp_unsigned("!=", b.bitcast(mask, I16), ir.Constant(I16, 0))


@operation(f32x16, float32)
def set_f32(b, value):
    """A float32 in every lane."""
    return splat(b, value)


@operation(f32x16)
def zero(b):
    """+0.0 in every lane."""
    return constant(f32x16.llvm, 0.0)


def bits(value: int):
    """A function that gives the vector with `value` in every lane."""
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return operation(i32x16)(lambda b: constant(i32x16.llvm, signed))


def shift_right(n: int):
    """A function that shifts every lane right by n bits, filling with zeros."""
    return lanewise(i32x16, lambda b, x: b.lshr(x, constant(x.type, n)))


def shift_left(n: int):
    """A function that shifts every lane left by n bits."""
    return lanewise(i32x16, lambda b, x: b.shl(x, constant(x.type, n)))


def hadamard_step(h: int):
    """A function on a vector: of lanes h apart, a + b in the lower and a - b in the upper."""

    def emit(b, v):
        lanes = range(LANES)
        other = ir.Constant(vector(I32), [i ^ h for i in lanes])
        upper = ir.Constant(mask16.llvm, [bool(i & h) for i in lanes])
        partner = b.shuffle_vector(v, v, other)
        return b.select(upper, b.fsub(partner, v), b.fadd(v, partner))

    return lanewise(f32x16, emit)


@operation(float32, f32x16, f32x16)
def butterfly(b, low, high):
    """The lane-32 sum's last part: 32 partial sums added by s = 16, 8, 4, 2, 1 -> float32."""
    v = b.fadd(low, high)
    for s in (8, 4, 2, 1):
        v = b.fadd(part(b, v, 0, s), part(b, v, s, s))
    return _lane_0(b, v)


@operation(float32, f32x16)
def fold_max(b, v):
    """The largest of 16 lanes -> float32."""
    for s in (8, 4, 2, 1):
        low, high = part(b, v, 0, s), part(b, v, s, s)
        v = b.select(b.fcmp_ordered(">", high, low), high, low)
    return _lane_0(b, v)


def _lane_0(b, v):
    return b.extract_element(v, ir.Constant(I32, 0))


def _fold_int(name):
    """16 lanes folded into one int32, exact."""
    name = f"llvm.vector.reduce.{name}.v16i32"
    return operation(int32, i32x16)(lambda b, v: call_named(b, name, I32, [v]))


fold_sum_i, fold_max_i = _fold_int("add"), _fold_int("smax")


@operation(float32, float32, float32, float32)
def fma_scalar(b, x, y, z):
    """x * y + z of float32 scalars, rounded once."""
    return call_named(b, "llvm.fma.f32", FLOAT, [x, y, z])


@operation(uint16, float32)
def half_bits(b, x):
    """float32 -> uint16 bit pattern of the nearest fp16 (ties to even)."""
    return _lane_0(b, float_to_half(b, splat(b, x)))


@operation(float32, uint16)
def half_value(b, h):
    """uint16 bit pattern of an fp16 -> float32."""
    return _lane_0(b, half_to_float(b, splat(b, h)))


@operation(int32, float32)
def float_bits(b, x):
    """float32 -> its int32 bit pattern."""
    return b.bitcast(x, I32)


@operation(float32, int32)
def bits_float(b, x):
    """int32 bit pattern -> float32."""
    return b.bitcast(x, FLOAT)
