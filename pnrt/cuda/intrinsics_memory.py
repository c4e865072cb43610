"""The words of lanes.py that read and write memory, as numba intrinsics; added to WORDS."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import RequireLiteralValue, TypingError
from numba.cuda.extending import intrinsic

from pnrt.cuda.intrinsics import F32, I8, I16, I32, LLVM, WORDS, asm, f32, i32, u32, u64


def _pointer(builder, address, kind):
    return builder.inttoptr(address, ir.PointerType(kind, 1))


def _extended(builder, name, value):
    """What a load gives, as a value of the language."""
    if name in ("u8", "u16"):
        return builder.zext(value, I32)
    if name == "i8":
        return builder.sext(value, I32)
    if name == "half":
        return asm(builder, F32, "cvt.f32.f16 $0, $1;", "=f,h", [value])
    return value


_MEMORY = {
    "f32": (F32, f32, 4), "i32": (I32, i32, 4), "u32": (I32, u32, 4), "u16": (I16, u32, 2),
    "u8": (I8, u32, 1), "i8": (I8, i32, 1), "half": (I16, f32, 2),
}  # fmt: skip


def _load(verb, name, count=1):
    stored, kind, size = _MEMORY[name]
    element = stored if count == 1 else ir.VectorType(stored, count)
    full = f"{verb}_{name}" + (f"x{count}" if count > 1 else "")
    result = kind if count == 1 else types.UniTuple(kind, count)

    def word(typingctx, address):
        if address != u64:
            raise TypingError(f"{full} at {address}: an address is u64")

        def generate(context, builder, signature, values):
            loaded = builder.load(_pointer(builder, values[0], element), align=size * count)
            if verb == "fetch":
                loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
            if count == 1:
                return _extended(builder, name, loaded)
            parts = [builder.extract_element(loaded, ir.Constant(I32, i)) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, parts)

        return result(address), generate

    word.__name__ = full
    WORDS[full] = intrinsic(word)


for _verb in ("load", "fetch"):
    for _name in _MEMORY:
        _load(_verb, _name)
_load("fetch", "u32", 2)
_load("fetch", "u32", 4)
_load("fetch", "f32", 4)


def _store(name, count=1):
    stored, kind, size = _MEMORY[name]
    full = f"store_{name}" + (f"x{count}" if count > 1 else "")

    def typed(address, values):
        if address != u64 or any(v != kind for v in values):
            raise TypingError(f"{full}: needs an address (u64) and {kind}, not {address}, {values}")

        def generate(context, builder, signature, args):
            v = args[1]
            if stored in (I8, I16):
                v = builder.trunc(v, stored)
            if count > 1:
                v = ir.Constant(ir.VectorType(stored, count), ir.Undefined)
                for i, each in enumerate(args[1:]):
                    v = builder.insert_element(v, each, ir.Constant(I32, i))
            builder.store(v, _pointer(builder, args[0], v.type), align=size * count)
            return context.get_dummy_value()

        return types.void(address, *values), generate

    _fixed(full, count, typed)


def _fixed(full, count, typed):
    """A word of an address and `count` values."""
    if count == 1:

        def word(typingctx, address, a):
            return typed(address, (a,))

    else:

        def word(typingctx, address, a, b, c, d):
            return typed(address, (a, b, c, d))

    word.__name__ = full
    WORDS[full] = intrinsic(word)


for _name in ("f32", "i32", "u32", "u16", "u8"):
    _store(_name)
_store("u32", 4)


@intrinsic
def _shared(typingctx, nbytes):
    if not isinstance(nbytes, types.IntegerLiteral):
        raise RequireLiteralValue("shared")

    def generate(context, builder, signature, values):
        kind = ir.ArrayType(I8, nbytes.literal_value)
        memory = ir.GlobalVariable(builder.module, kind, "shared_memory", addrspace=3)
        memory.align, memory.linkage = 16, "internal"
        memory.initializer = ir.Constant(kind, ir.Undefined)
        return builder.ptrtoint(memory, I32)

    return u32(nbytes), generate


WORDS["shared"] = _shared


def _shared_load(name, count=1):
    _, kind, _ = _MEMORY[name]
    full = f"shared_load_{name}" + (f"x{count}" if count > 1 else "")
    result = kind if count == 1 else types.UniTuple(kind, count)
    letter = "f" if kind == f32 else "r"

    def word(typingctx, address):
        if address != u32:
            raise TypingError(f"{full} at {address}: a shared address is u32")

        def generate(context, builder, signature, values):
            if count == 1:
                text = "ld.shared.b32 $0, [$1];"
                return asm(builder, LLVM[kind], text, f"={letter},r", list(values), True)
            names = ", ".join(f"${i}" for i in range(count))
            text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}];"
            struct = ir.LiteralStructType([LLVM[kind]] * count)
            constraints = ",".join([f"={letter}"] * count) + ",r"
            found = asm(builder, struct, text, constraints, list(values), True)
            parts = [builder.extract_value(found, i) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, parts)

        return result(address), generate

    word.__name__ = full
    WORDS[full] = intrinsic(word)


def _shared_store(name, count=1):
    _, kind, _ = _MEMORY[name]
    full = f"shared_store_{name}" + (f"x{count}" if count > 1 else "")
    letter = "f" if kind == f32 else "r"
    names = ", ".join(f"${i + 1}" for i in range(count))
    vector = f".v{count}.b32 [$0], {{{names}}};" if count > 1 else f".b32 [$0], {names};"

    def typed(address, values):
        if address != u32 or any(v != kind for v in values):
            raise TypingError(f"{full}: needs a shared address (u32) and {kind}")

        def generate(context, builder, signature, args):
            constraints = "r," + ",".join([letter] * count)
            asm(builder, ir.VoidType(), f"st.shared{vector}", constraints, list(args), True)
            return context.get_dummy_value()

        return types.void(address, *values), generate

    _fixed(full, count, typed)


for _name, _count in (("f32", 1), ("u32", 1), ("u32", 2), ("u32", 4)):
    _shared_load(_name, _count)
for _name, _count in (("f32", 1), ("u32", 1), ("u32", 4)):
    _shared_store(_name, _count)
