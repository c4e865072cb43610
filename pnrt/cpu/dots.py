"""Products of bytes on vectors and tiles: the operations that depend on the instruction set.

Their results do not: every one is exact in int32, however the machine computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pnrt.emit import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    call_named,
    constant,
    halves,
    load_vector,
    pointer,
    vector,
)  # fmt: skip
from pnrt.machine import amx_allowed, cpu_features
from pnrt.simd import Tile, i32x16, lanewise

# bytes and number of the tile registers' rows: three products (16 tokens x 16 int32); activations
# (16 tokens x 32 bytes) and weights (8 groups of four x 16 rows); the same for 16 codes
_BYTES = (64, 64, 64, 32, 64, 16, 64, 64)
_ROWS = (16, 16, 16, 16, 8, 16, 4, 16)


def dot_tier() -> str:
    """'amx', 'vnni', 'avx2' or 'plain': how tiles of tokens are multiplied on this CPU."""
    features = cpu_features()
    if {"amx-int8", "amx-tile", "avx512f"} <= features and amx_allowed():
        return "amx"
    return "vnni" if "avx512vnni" in features else "avx2" if "avx2" in features else "plain"


def _bytewise_dot(b, acc, u, s, extend):
    for byte in range(4):
        up = extend(u, byte)
        sp = b.ashr(b.shl(s, constant(s.type, 24 - 8 * byte)), constant(s.type, 24))
        acc = b.add(acc, b.mul(up, sp))
    return acc


def _unsigned(b):
    return lambda u, byte: b.and_(b.lshr(u, constant(u.type, 8 * byte)), constant(u.type, 255))


def _signed(b):
    return lambda u, byte: b.ashr(b.shl(u, constant(u.type, 24 - 8 * byte)), constant(u.type, 24))


def _madd(b, x, y):
    return call_named(b, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), [x, y])


def _maddubs(b, u8, s8):
    words = vector(I16, 16)
    return _madd(b, call_named(b, "llvm.x86.avx2.pmadd.ub.sw", words, [u8, s8]), constant(words, 1))


def _dot4(b, acc, u, s, wide=False):
    """acc + the four u8 * s8 products of each lane.

    wide: codes may exceed 127, so that pairs of products could saturate 16 bits.
    """
    bytes64, features = vector(I8, 64), cpu_features()
    if "avx512vnni" in features:
        args = [acc, b.bitcast(u, bytes64), b.bitcast(s, bytes64)]
        return call_named(b, "llvm.x86.avx512.vpdpbusd.512", acc.type, args)
    if "avx2" not in features:
        return _bytewise_dot(b, acc, u, s, _unsigned(b))
    if wide:

        def emit(u8, s8):
            eight, low = constant(u8.type, 8), constant(u8.type, 255)
            even = _madd(b, b.and_(u8, low), b.ashr(b.shl(s8, eight), eight))
            return b.add(even, _madd(b, b.lshr(u8, eight), b.ashr(s8, eight)))

        kind = vector(I16, 32)
    else:

        def emit(u8, s8):
            return _maddubs(b, u8, s8)

        kind = bytes64
    return b.add(acc, halves(b, emit, b.bitcast(u, kind), b.bitcast(s, kind)))


def _dot4_signed(b, acc, w, s):
    """acc + the four s8 * s8 products of each lane; not -128 in both of a pair."""
    if "avx2" not in cpu_features():
        return _bytewise_dot(b, acc, w, s, _signed(b))
    bytes32 = vector(I8, 32)

    def emit(w8, s8):
        magnitude = b.select(
            b.icmp_signed("<", w8, constant(bytes32, 0)), b.sub(constant(bytes32, 0), w8), w8
        )
        return _maddubs(b, magnitude, call_named(b, "llvm.x86.avx2.psign.b", bytes32, [s8, w8]))

    kind = vector(I8, 64)
    return b.add(acc, halves(b, emit, b.bitcast(w, kind), b.bitcast(s, kind)))


dot4 = lanewise(i32x16, _dot4)
dot4_wide = lanewise(i32x16, lambda b, acc, u, s: _dot4(b, acc, u, s, wide=True))
dot4_signed = lanewise(i32x16, _dot4_signed)


def _dot_fp8(b, acc, v, s):
    """acc + 512 times the four e4m3 * s8 products of each lane."""
    c, floats = (lambda n: constant(v.type, n)), vector(FLOAT)
    for byte in range(4):
        code = b.lshr(v, c(8 * byte))
        value = b.bitcast(b.shl(b.and_(code, c(0x7F)), c(20)), floats)
        # the exponent in a float's place: 2^-120 of the value, exact
        value = b.fmul(b.fmul(value, constant(floats, 2.0**120)), constant(floats, 512.0))
        n = b.fptosi(value, v.type)
        n = b.select(b.icmp_signed("!=", b.and_(code, c(0x80)), c(0)), b.sub(c(0), n), n)
        x = b.ashr(b.shl(s, c(24 - 8 * byte)), c(24))
        acc = b.add(acc, b.mul(n, x))
    return acc


dot_fp8 = lanewise(i32x16, _dot_fp8)


def add_bytes(n: int):
    """A function that adds n to every byte, modulo 256."""

    def emit(b, v):
        kind = vector(I8, 64)
        return b.bitcast(b.add(b.bitcast(v, kind), constant(kind, n)), v.type)

    return lanewise(i32x16, emit)


def lookup(values: tuple[int, ...]):
    """A function that replaces every byte 0..15 by one of 16 unsigned bytes."""

    def emit(b, v):
        kind, features = vector(I8, 64), cpu_features()
        index = b.bitcast(v, kind)
        if "avx512bw" in features:
            table = ir.Constant(kind, [*values] * 4)
            found = call_named(b, "llvm.x86.avx512.pshuf.b.512", kind, [table, index])
        elif "avx2" in features:
            table = ir.Constant(vector(I8, 32), [*values] * 2)
            found = halves(
                b,
                lambda i: call_named(b, "llvm.x86.avx2.pshuf.b", table.type, [table, i]),
                index,
            )
        else:
            found = constant(kind, values[0])
            for code, value in enumerate(values[1:], 1):
                hit = b.icmp_unsigned("==", index, constant(kind, code))
                found = b.select(hit, constant(kind, value), found)
        return b.bitcast(found, v.type)

    return lanewise(i32x16, emit)


def lookup128(values: tuple[int, ...]):
    """A function that replaces every byte by one of 128, chosen by its low seven bits.

    AVX-512 VBMI only.
    """
    halves_ = values[:64], values[64:]

    def emit(b, v):
        kind = vector(I8, 64)
        index, nothing = b.bitcast(v, kind), constant(kind, 0)
        low, high = (ir.Constant(kind, [*half]) for half in halves_)
        if all(map(any, halves_)):
            name = "llvm.x86.avx512.vpermi2var.qi.512"
            return b.bitcast(call_named(b, name, kind, [low, index, high]), v.type)
        # a third of the work where one half of the table is all zeros
        upper = b.icmp_unsigned("!=", b.and_(index, constant(kind, 64)), nothing)
        table, used = (high, b.not_(upper)) if any(halves_[1]) else (low, upper)
        found = call_named(b, "llvm.x86.avx512.permvar.qi.512", kind, [table, index])
        return b.bitcast(b.select(used, nothing, found), v.type)

    return lanewise(i32x16, emit)


def _signed_like(b, s, v):
    kind = vector(I8, 64)
    sign, s = b.icmp_signed("<", b.bitcast(v, kind), constant(kind, 0)), b.bitcast(s, kind)
    return b.bitcast(b.select(sign, b.sub(constant(kind, 0), s), s), v.type)


# signed_like(s, v): the bytes of s, negated where the byte of v has its top bit set
signed_like = lanewise(i32x16, _signed_like)


# AMX: registers have numbers, the compiler only places the instructions


def _register(n):
    return ir.Constant(I8, n)


def _void(b, name, args):
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


@intrinsic
def tiles_on(typingctx, config):
    """Configure the tile registers from 64 bytes at an address."""

    def emit(context, b, signature, args):
        _void(b, "llvm.x86.ldtilecfg", [pointer(b, args[0], I8)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def tiles_off(typingctx):
    """Give the tile registers back: an idle thread then has no state to save."""

    def emit(context, b, signature, args):
        _void(b, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), emit


def tile_config() -> bytes:
    """The 64 bytes of tiles_on."""
    columns = b"".join(n.to_bytes(2, "little") for n in _BYTES)
    return b"\1" + bytes(15) + columns + bytes(16) + bytes(_ROWS) + bytes(8)


def amx_products(pieces: Sequence[tuple[int, int, int]]):
    """products(x, w, out, before): sums over some bytes of 16 tokens times 16 rows, for each piece.

    A piece is (bytes behind x, bytes behind w, bytes to sum over: 32 or 16). x: tokens of int8, 32
    bytes apart; w: int8 groups of four [8 or 4, 16, 4]; out: int32 [16 tokens, 16 rows] per piece.
    The last three products stay in registers until the next call, which stores them to its
    `before`: an instruction that waits for a product would hold up others.
    """
    held = min(3, len(pieces))

    @intrinsic
    def products(typingctx, x, w, out, before):
        def emit(context, b, signature, args):
            x, w, out, before = args

            def at(base, nbytes):
                return pointer(b, b.add(base, ir.Constant(I64, nbytes)), I8)

            for i, (behind_x, behind_w, depth) in enumerate(pieces):
                c, (a, w8) = _register(i % held), map(_register, (3, 4) if depth == 32 else (5, 6))
                last = i - held
                to = at(out, 1024 * last) if last >= 0 else at(before, 1024 * (last + len(pieces)))
                _void(b, "llvm.x86.tilestored64", [c, to, ir.Constant(I64, 64)])
                _void(b, "llvm.x86.tilezero", [c])
                _void(b, "llvm.x86.tileloadd64", [a, at(x, behind_x), ir.Constant(I64, 32)])
                _void(b, "llvm.x86.tileloadd64", [w8, at(w, behind_w), ir.Constant(I64, 64)])
                _void(b, "llvm.x86.tdpbssd", [c, a, w8])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), emit

    return products


def load_products(count: int):
    """A function that loads a tile of int32 vectors that lie 64 bytes apart."""
    tile = Tile(i32x16, count)

    @intrinsic
    def load(typingctx, address):
        """One vector per token."""

        def code(context, b, signature, args):
            value = ir.Constant(tile.llvm, ir.Undefined)
            for t in range(count):
                at = b.add(args[0], ir.Constant(I64, 64 * t))
                value = b.insert_value(value, load_vector(b, at, i32x16.llvm, 4), t)
            return value

        return tile(types.int64), code

    return load
