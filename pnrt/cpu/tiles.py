"""Memory operations of tiles: one vector per token, any distance apart."""

from __future__ import annotations

from types import SimpleNamespace

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pnrt.emit import (
    FLOAT,
    I16,
    I32,
    I64,
    call_named,
    constant,
    half_to_float,
    load_vector,
    splat,
    store_vector,
    vector,
)  # fmt: skip
from pnrt.simd import Tile, f32x16, i32x16


def _behind(b, address, nbytes):
    return b.add(address, ir.Constant(I64, nbytes))


def tiles(count: int) -> SimpleNamespace:
    """Memory operations of tiles of `count` tokens that lie `stride` bytes apart."""

    def gather(vec, emit):
        tile = Tile(vec, count)

        @intrinsic
        def read(typingctx, address, stride):
            """One vector per token."""

            def code(context, b, signature, args):
                value = ir.Constant(tile.llvm, ir.Undefined)
                for t in range(count):
                    at = b.add(args[0], b.mul(args[1], ir.Constant(I64, t)))
                    value = b.insert_value(value, emit(b, at), t)
                return value

            return tile(types.int64, types.int64), code

        return read

    @intrinsic
    def zeros(typingctx):
        """+0.0 in every lane of every token."""
        tile = Tile(f32x16, count)
        return tile(), lambda context, b, signature, args: ir.Constant(
            tile.llvm, [constant(f32x16.llvm, 0.0)] * count
        )

    @intrinsic
    def izeros(typingctx):
        """Integer 0 in every lane of every token."""
        tile = Tile(i32x16, count)
        return tile(), lambda context, b, signature, args: ir.Constant(
            tile.llvm, [constant(i32x16.llvm, 0)] * count
        )

    @intrinsic
    def store(typingctx, address, stride, value):
        """Write one vector per token."""

        def code(context, b, signature, args):
            for t in range(count):
                at = b.add(args[0], b.mul(args[1], ir.Constant(I64, t)))
                store_vector(b, b.extract_value(args[2], t), at, 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, Tile(f32x16, count)), code

    sums, products = Tile(f32x16, count), Tile(i32x16, count)

    def scaled(b, t, acc, total, factor, dx, sum_):
        # one token after the other: op after op would keep every token's scale in a register
        scale = b.fmul(factor, splat(b, load_vector(b, _behind(b, dx, 4 * t), FLOAT, 4)))
        return call_named(b, "llvm.fma.v16f32", acc.type, [sum_(b, t, total), scale, acc])

    def converted(b, t, total):
        return b.sitofp(b.extract_value(total, t), f32x16.llvm)

    @intrinsic
    def accumulate(typingctx, acc, total, dw, dx):
        """acc + float(total) * (dw * dx), rounded twice; dx: address of one float32 per token."""

        def code(context, b, signature, args):
            acc, total, dw, dx = args
            for t in range(count):
                one = scaled(b, t, b.extract_value(acc, t), total, dw, dx, converted)
                acc = b.insert_value(acc, one, t)
            return acc

        return sums(sums, products, f32x16, types.int64), code

    @intrinsic
    def accumulate_offset(typingctx, acc, total, dw, m, dx, f):
        """The same, then f * (m * dx); f: address of three float32 per token, the first counts."""

        def given(b, t, f):
            return splat(b, load_vector(b, _behind(b, f, 12 * t), FLOAT, 4))

        def code(context, b, signature, args):
            acc, total, dw, m, dx, f = args
            for t in range(count):
                one = scaled(b, t, b.extract_value(acc, t), total, dw, dx, converted)
                acc = b.insert_value(acc, scaled(b, t, one, f, m, dx, given), t)
            return acc

        return sums(sums, products, f32x16, f32x16, types.int64, types.int64), code

    return SimpleNamespace(
        accumulate=accumulate,
        accumulate_offset=accumulate_offset,
        count=count,
        zeros=zeros,
        izeros=izeros,
        splat_i32=gather(i32x16, lambda b, p: splat(b, load_vector(b, p, I32, 4))),
        splat_f32=gather(f32x16, lambda b, p: splat(b, load_vector(b, p, FLOAT, 4))),
        load=gather(f32x16, lambda b, p: load_vector(b, p, f32x16.llvm, 4)),
        load_half=gather(f32x16, lambda b, p: half_to_float(b, load_vector(b, p, vector(I16), 2))),
        store=store,
    )
