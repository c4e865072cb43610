"""Memory operations of tiles: one vector per token, any distance apart."""

from __future__ import annotations

from types import SimpleNamespace

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pnrt.cpu.emit import (
    FLOAT,
    I16,
    I32,
    I64,
    constant,
    half_to_float,
    load_vector,
    splat,
    store_vector,
    vector,
)
from pnrt.cpu.simd import Tile, f32x16, i32x16


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

    return SimpleNamespace(
        count=count,
        zeros=zeros,
        izeros=izeros,
        splat_i32=gather(i32x16, lambda b, p: splat(b, load_vector(b, p, I32, 4))),
        splat_f32=gather(f32x16, lambda b, p: splat(b, load_vector(b, p, FLOAT, 4))),
        load=gather(f32x16, lambda b, p: load_vector(b, p, f32x16.llvm, 4)),
        load_half=gather(f32x16, lambda b, p: half_to_float(b, load_vector(b, p, vector(I16), 2))),
        store=store,
    )
