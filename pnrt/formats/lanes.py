"""Sixteen float32 lanes as numba values, for searches that try many groups of weights at once.

Memory is int64 addresses. Every operation rounds once, lane by lane, as NumPy's does; LLVM splits a
vector where registers are narrower. Sums over a group are chains over time, never over lanes.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
MASKS = ir.VectorType(ir.IntType(1), LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)


class Lanes(types.Type):
    """numba type of a vector."""

    def __init__(self, name: str, llvm):
        self.llvm = llvm
        super().__init__(name=name)


@register_model(Lanes)
class LanesModel(PrimitiveModel):
    """Vectors live in LLVM values of their own type."""

    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, fe_type.llvm)


floats, mask = Lanes("floats", FLOATS), Lanes("mask", MASKS)


def _constant(value: float):
    return ir.Constant(FLOATS, [value] * LANES)


def _call(b, name, *args):
    kind = ir.FunctionType(args[0].type, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def _one(result, argument, emit):
    @intrinsic
    def op(typingctx, x):
        """Lane by lane."""
        return result(argument), lambda context, b, signature, args: emit(b, *args)

    return op


def _two(result, argument, emit):
    @intrinsic
    def op(typingctx, x, y):
        """Lane by lane."""
        return result(argument, argument), lambda context, b, signature, args: emit(b, *args)

    return op


def _writer(convert):
    @intrinsic
    def op(typingctx, address, value):
        """Write to an int64 address."""

        def generate(context, b, signature, args):
            value = convert(b, args[1])
            b.store(value, b.inttoptr(args[0], value.type.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, floats), generate

    return op


def _divide(b, x, y):
    some = b.fcmp_unordered("!=", y, _constant(0.0))
    return b.select(some, b.fdiv(x, y), _constant(0.0))


def _load(b, address):
    value = b.load(b.inttoptr(address, FLOATS.as_pointer()))
    value.align = 4
    return value


def _everywhere(b, x):
    one = b.insert_element(ir.Constant(FLOATS, ir.Undefined), x, ir.IntType(32)(0))
    return b.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def _codes(b, x):
    # NaN has no integer: it becomes 0
    number = b.select(b.fcmp_ordered("==", x, x), x, _constant(0.0))
    return b.trunc(b.fptosi(number, INTS), BYTES)


load = _one(floats, types.int64, _load)
everywhere = _one(floats, types.float32, _everywhere)
store = _writer(lambda b, x: x)
# whole numbers 0 to 255, one byte each
store_bytes = _writer(_codes)
load_bytes = _one(
    floats,
    types.int64,
    lambda b, p: b.uitofp(b.load(b.inttoptr(p, BYTES.as_pointer()), align=1), FLOATS),
)
add = _two(floats, floats, lambda b, x, y: b.fadd(x, y))
sub = _two(floats, floats, lambda b, x, y: b.fsub(x, y))
mul = _two(floats, floats, lambda b, x, y: b.fmul(x, y))
# x / y, 0 where y is 0
divide = _two(floats, floats, _divide)
# as NumPy's a NaN in x stays
least = _two(floats, floats, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), y, x))
most = _two(floats, floats, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), y, x))
whole = _one(floats, floats, lambda b, x: _call(b, f"llvm.nearbyint.v{LANES}f32", x))
root = _one(floats, floats, lambda b, x: _call(b, f"llvm.sqrt.v{LANES}f32", x))
size = _one(floats, floats, lambda b, x: _call(b, f"llvm.fabs.v{LANES}f32", x))
less = _two(mask, floats, lambda b, x, y: b.fcmp_ordered("<", x, y))
differ = _two(mask, floats, lambda b, x, y: b.fcmp_unordered("!=", x, y))
both = _two(mask, mask, lambda b, x, y: b.and_(x, y))


@intrinsic
def pick(typingctx, which, x, y):
    """x where the mask is set, y elsewhere."""
    emit = lambda context, b, signature, args: b.select(*args)  # noqa: E731
    return floats(mask, floats, floats), emit


@intrinsic
def some(typingctx, which):
    """Whether the mask is set anywhere."""

    def generate(context, b, signature, args):
        bits = ir.IntType(LANES)
        return b.icmp_unsigned("!=", b.bitcast(args[0], bits), bits(0))

    return types.boolean(mask), generate


@intrinsic
def read(typingctx, address):
    """One float32 at an int64 address."""

    def generate(context, b, signature, args):
        return b.load(b.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)

    return types.float32(types.int64), generate


@intrinsic
def write(typingctx, address, value):
    """Put one float32 at an int64 address."""

    def generate(context, b, signature, args):
        b.store(args[1], b.inttoptr(args[0], ir.FloatType().as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def word(typingctx, address):
    """One int64 at an int64 address."""

    def generate(context, b, signature, args):
        return b.load(b.inttoptr(args[0], ir.IntType(64).as_pointer()), align=8)

    return types.int64(types.int64), generate


@intrinsic
def byte(typingctx, address, value):
    """Put one byte at an int64 address."""

    def generate(context, b, signature, args):
        b.store(args[1], b.inttoptr(args[0], ir.IntType(8).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8), generate
