"""The words of lanes.py but memory's as numba intrinsics: LLVM and PTX, each rounding spelled.

Imported only when a kernel is compiled for a device. Types are refused exactly where the stand-in
refuses them, so that numba never widens a number behind our back.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import RequireLiteralValue, TypingError
from numba.cuda.extending import intrinsic

I1, I8, I16, I32, I64, F32 = (*(ir.IntType(n) for n in (1, 8, 16, 32, 64)), ir.FloatType())
u32, i32, u64, f32, boolean = (
    types.uint32, types.int32, types.uint64, types.float32, types.boolean,
)  # fmt: skip
INTEGERS = (i32, u32)
LLVM = {u32: I32, i32: I32, u64: I64, f32: F32, boolean: I1}
ALL_LANES = 0xFFFFFFFF

WORDS: dict[str, object] = {}


def _operands(name, args, allowed):
    """The one type of operands, plain numbers aside; raises where they differ."""
    literal = [isinstance(a, types.IntegerLiteral) for a in args]
    typed = {a for a, plain in zip(args, literal, strict=True) if not plain}
    if typed & {types.int64, types.intp}:
        raise RequireLiteralValue(name)
    if not typed:
        return i32
    if len(typed) > 1 or next(iter(typed)) not in allowed:
        raise TypingError(f"{name} of {', '.join(map(str, args))}")
    return next(iter(typed))


def _value(kind, arg, value):
    """An operand as LLVM: a plain number takes the type of the others."""
    if isinstance(arg, types.IntegerLiteral):
        literal = arg.literal_value
        return ir.Constant(LLVM[kind], float(literal) if kind == f32 else literal)
    return value


def _word(name, count, allowed, emit, result=None):
    """Define a word of `count` operands of one type: emit(builder, kind, *values)."""

    def typed(typingctx, args):
        kind = _operands(name, args, allowed)

        def generate(context, builder, signature, values):
            pairs = zip(signature.args, values, strict=True)
            return emit(builder, kind, *(_value(kind, a, v) for a, v in pairs))

        return (result or kind)(*args), generate

    if count == 1:

        def word(typingctx, a):
            return typed(typingctx, (a,))

    elif count == 2:

        def word(typingctx, a, b):
            return typed(typingctx, (a, b))

    else:

        def word(typingctx, a, b, c):
            return typed(typingctx, (a, b, c))

    word.__name__ = word.__qualname__ = name
    WORDS[name] = intrinsic(word)


def asm(builder, result, text, constraints, args, side_effect=False):
    """Emit inline PTX: `constraints` name the registers of the result and the arguments."""
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect), args)


def _float_or(text, integer):
    """f32 by a PTX instruction, integers by an LLVM one."""

    def emit(builder, kind, a, b):
        if kind == f32:
            return asm(builder, F32, f"{text}.rn.f32 $0, $1, $2;", "=f,f,f", [a, b])
        return getattr(builder, integer)(a, b)

    return emit


def _shift(name):
    def emit(builder, kind, a, b):
        if isinstance(b, ir.Constant):
            b = ir.Constant(b.type, b.constant & 31)
        else:
            b = builder.and_(b, ir.Constant(b.type, 31))
        if name == "shl":
            return builder.shl(a, b)
        return builder.ashr(a, b) if kind == i32 else builder.lshr(a, b)

    return emit


def _compare(symbol):
    def emit(builder, kind, a, b):
        if kind == f32:
            # a NaN is unequal to everything and neither less nor greater
            compare = builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered
            return compare(symbol, a, b)
        return (builder.icmp_signed if kind == i32 else builder.icmp_unsigned)(symbol, a, b)

    return emit


def _pick(symbol):
    compare = _compare(symbol)
    return lambda builder, kind, a, b: builder.select(compare(builder, kind, a, b), a, b)


_logic = (i32, u32, u64, boolean)
for _name, _emit in (("and_", "and_"), ("or_", "or_"), ("xor", "xor")):
    _word(_name, 2, _logic, lambda b, kind, x, y, e=_emit: getattr(b, e)(x, y))
for _name, _integer in (("add", "add"), ("sub", "sub"), ("mul", "mul")):
    _word(f"same_{_name}", 2, (i32, u32, u64, f32), _float_or(_name, _integer))
WORDS["mul"] = WORDS.pop("same_mul")
_word("div", 2, (f32,), _float_or("div", ""))
_word("quotient", 2, (u32, u64), lambda b, kind, x, y: b.udiv(x, y))
_word("remainder", 2, (u32, u64), lambda b, kind, x, y: b.urem(x, y))
_word("shl", 2, INTEGERS, _shift("shl"))
_word("shr", 2, INTEGERS, _shift("shr"))
for _name, _symbol in (
    ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="),
):  # fmt: skip
    _word(_name, 2, (i32, u32, u64, f32, boolean), _compare(_symbol), boolean)
_word("minimum", 2, (i32, u32, f32), _pick("<"))
_word("maximum", 2, (i32, u32, f32), _pick(">"))
_word("like", 2, (i32, u32, u64, f32), lambda b, kind, x, y: x)


def _address_or(name):
    """add and sub: of one type, or an address and a u32."""
    other = WORDS.pop(f"same_{name}")

    def word(typingctx, a, b):
        if a == u64 and b == u32:

            def generate(context, builder, signature, values):
                return getattr(builder, name)(values[0], builder.zext(values[1], I64))

            return u64(a, b), generate
        return other._defn(typingctx, a, b)

    word.__name__ = name
    WORDS[name] = intrinsic(word)


_address_or("add")
_address_or("sub")


def _neg(builder, kind, x):
    if kind == f32:
        return asm(builder, F32, "neg.f32 $0, $1;", "=f,f", [x])
    return builder.neg(x)


_word("neg", 1, (i32, f32), _neg)
_word("invert", 1, INTEGERS, lambda b, kind, x: b.not_(x))
_word("not_", 1, (boolean,), lambda b, kind, x: b.not_(x))


def _ptx(name, count, allowed, result, text, constraints):
    """A word that is one PTX instruction (or a short asm block)."""
    _word(
        name, count, allowed,
        lambda b, kind, *v: asm(b, LLVM[result], text, constraints, list(v)), result,
    )  # fmt: skip


FMA = "fma.rn.f32 $0, $1, $2, $3;"
_ptx("fma", 3, (f32,), f32, FMA, "=f,f,f,f")
_ptx("sqrt", 1, (f32,), f32, "sqrt.rn.f32 $0, $1;", "=f,f")
_ptx("absolute", 1, (f32,), f32, "abs.f32 $0, $1;", "=f,f")
_ptx("truncate", 1, (f32,), i32, "cvt.rzi.s32.f32 $0, $1;", "=r,f")
_ptx(
    "half_to_float", 1, (u32,), f32,
    "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "=f,r",
)  # fmt: skip
_ptx(
    "float_to_half", 1, (f32,), u32,
    "{ .reg .b16 l; cvt.rn.f16.f32 l, $1; cvt.u32.u16 $0, l; }", "=r,f",
)  # fmt: skip
_ptx("bytes_low", 1, (u32,), u32, "prmt.b32 $0, $1, 0, 0x9180;", "=r,r")
_ptx("bytes_high", 1, (u32,), u32, "prmt.b32 $0, $1, 0, 0xB3A2;", "=r,r")
_word("bits_to_float", 1, INTEGERS, lambda b, kind, x: b.bitcast(x, F32), f32)
_word("float_to_bits", 1, (f32,), lambda b, kind, x: b.bitcast(x, I32), i32)


def _conversion(name, target, allowed):
    def emit(builder, kind, x):
        if target == f32:
            if kind == f32:
                return x
            return builder.sitofp(x, F32) if kind == i32 else builder.uitofp(x, F32)
        width = LLVM[target]
        if x.type.width == width.width:
            return x
        return builder.zext(x, width) if x.type.width < width.width else builder.trunc(x, width)

    def word(typingctx, x):
        if isinstance(x, types.IntegerLiteral):
            literal = x.literal_value

            def constant(context, builder, signature, values):
                return ir.Constant(LLVM[target], float(literal) if target == f32 else literal)

            return target(x), constant
        kind = _operands(name, (x,), allowed)
        return target(x), lambda context, builder, signature, v: emit(builder, kind, v[0])

    word.__name__ = name
    WORDS[name] = intrinsic(word)


_conversion("u32", u32, (u32, i32, u64, boolean))
_conversion("i32", i32, (u32, i32, u64, boolean))
_conversion("u64", u64, (u32, u64))
_conversion("f32", f32, (i32, u32, f32))


def _select(typingctx, condition, a, b):
    if condition != boolean:
        raise TypingError(f"select on {condition}")
    kind = _operands("select", (a, b), (i32, u32, u64, f32, boolean))

    def generate(context, builder, signature, values):
        x, y = (_value(kind, t, v) for t, v in zip(signature.args[1:], values[1:], strict=True))
        return builder.select(values[0], x, y)

    return kind(condition, a, b), generate


_select.__name__ = "select"
WORDS["select"] = intrinsic(_select)

DOT_PAIRS = (
    "{ .reg .b16 a0, a1, b0, b1; .reg .b32 t; mov.b32 {a0, a1}, $2; mov.b32 {b0, b1}, $3; "
    "mad.wide.s16 t, a0, b0, $1; mad.wide.s16 $0, a1, b1, t; }"
)


@intrinsic
def _dot_pairs(typingctx, acc, a, b):
    if (acc, b) != (i32, u32) or a not in (u32,):
        raise TypingError(f"dot_pairs of {acc}, {a}, {b}")

    def generate(context, builder, signature, values):
        return asm(builder, I32, DOT_PAIRS, "=r,r,r,r", list(values))

    return i32(acc, a, b), generate


WORDS["dot_pairs"] = _dot_pairs


@intrinsic
def _dot8(typingctx, acc, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    pairs = (a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
    if acc != i32 or set(pairs) != {u32}:
        raise TypingError(f"dot8 of {acc}, {pairs}")

    def generate(context, builder, signature, values):
        total = values[0]
        for a, b in zip(values[1:9], values[9:], strict=True):
            total = asm(builder, I32, DOT_PAIRS, "=r,r,r,r", [total, a, b])
        return total

    return i32(acc, *pairs), generate


@intrinsic
def _fma4(typingctx, acc, a0, a1, a2, a3, b0, b1, b2, b3):
    pairs = (a0, a1, a2, a3, b0, b1, b2, b3)
    if {acc, *pairs} != {f32}:
        raise TypingError(f"fma4 of {acc}, {pairs}")

    def generate(context, builder, signature, values):
        total = values[0]
        for a, b in zip(values[1:5], values[5:], strict=True):
            total = asm(builder, F32, FMA, "=f,f,f,f", [a, b, total])
        return total

    return f32(acc, *pairs), generate


WORDS["dot8"], WORDS["fma4"] = _dot8, _fma4


def _nullary(name, result, emit):
    def word(typingctx):
        return result(), lambda context, builder, signature, values: emit(builder)

    word.__name__ = name
    WORDS[name] = intrinsic(word)


def _call(builder, name, result, args):
    function = ir.FunctionType(result, [a.type for a in args])
    module = builder.module
    found = module.globals.get(name) or ir.Function(module, function, name)
    return builder.call(found, args)


for _name, _register in (
    ("thread", "tid.x"), ("threads", "ntid.x"), ("block", "ctaid.x"), ("block_y", "ctaid.y"),
    ("blocks", "nctaid.x"),
):  # fmt: skip
    _nullary(_name, u32, lambda b, r=_register: _call(b, f"llvm.nvvm.read.ptx.sreg.{r}", I32, []))
_nullary("true", boolean, lambda b: ir.Constant(I1, 1))
_nullary("false", boolean, lambda b: ir.Constant(I1, 0))


def _effect(name, emit):
    def word(typingctx):
        def generate(context, builder, signature, values):
            emit(builder)
            return context.get_dummy_value()

        return types.void(), generate

    word.__name__ = name
    WORDS[name] = intrinsic(word)


_effect("syncthreads", lambda b: _call(b, "llvm.nvvm.barrier0", ir.VoidType(), []))
_effect(
    "syncwarp",
    lambda b: _call(b, "llvm.nvvm.bar.warp.sync", ir.VoidType(), [ir.Constant(I32, ALL_LANES)]),
)


def _shuffle(builder, mode, value, source):
    pair = ir.LiteralStructType([I32, I1])
    bits = builder.bitcast(value, I32) if value.type == F32 else value
    args = [ir.Constant(I32, ALL_LANES), ir.Constant(I32, mode), bits, source, ir.Constant(I32, 31)]
    found = builder.extract_value(_call(builder, "llvm.nvvm.shfl.sync.i32", pair, args), 0)
    return builder.bitcast(found, F32) if value.type == F32 else found


def _exchange(name, mode, source_kinds):
    def word(typingctx, value, source):
        literal = isinstance(source, types.IntegerLiteral)
        if value not in (i32, u32, f32):
            raise TypingError(f"{name} of {value}")
        if not literal and source not in source_kinds:
            raise RequireLiteralValue(name)

        def generate(context, builder, signature, values):
            return _shuffle(builder, mode, values[0], _value(u32, source, values[1]))

        return value(value, source), generate

    word.__name__ = name
    WORDS[name] = intrinsic(word)


_exchange("shuffle_xor", 3, ())
_exchange("shuffle", 0, (u32,))


def _vote(name, mode):
    def emit(builder, kind, x):
        pair = ir.LiteralStructType([I32, I1])
        args = [ir.Constant(I32, ALL_LANES), ir.Constant(I32, mode), x]
        return builder.extract_value(_call(builder, "llvm.nvvm.vote.sync", pair, args), 1)

    _word(name, 1, (boolean,), emit, boolean)


_vote("all_lanes", 0)
_vote("any_lane", 1)
