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

    def accumulate(segments: int, offset: bool, memory: bool):
        """accumulate(acc, low, high, scales, dx, f): acc with a block's segments added in turn.

        Each adds float(total) * (dw * dx), rounded twice, and f * (m * dx) where there are offsets.

        low, high: totals of the halves, or of the whole block; with memory, the addresses of their
        vectors. scales: address of the dw of each segment, then the m; dx: of one float32 per
        token; f: of three, for the halves and both.
        """
        sums, given = Tile(f32x16, count), types.int64 if memory else Tile(i32x16, count)

        @intrinsic
        def add(typingctx, acc, low, high, scales, dx, f):
            def code(context, b, signature, args):
                acc, low, high, scales, dx, f = args

                def number(address, nbytes):
                    return splat(b, load_vector(b, _behind(b, address, nbytes), FLOAT, 4))

                def scaled(one, total, factor, d):
                    args = [total, b.fmul(factor, d), one]
                    return call_named(b, "llvm.fma.v16f32", one.type, args)

                factors = [
                    load_vector(b, _behind(b, scales, 64 * i), f32x16.llvm, 4)
                    for i in range(segments * (1 + offset))
                ]
                # one token after the other: else every token's scale would be in a register
                for t in range(count):
                    one, d = b.extract_value(acc, t), number(dx, 4 * t)
                    for i, total in enumerate((low, high)[:segments]):
                        if memory:
                            total = load_vector(b, _behind(b, total, 64 * t), i32x16.llvm, 4)
                        else:
                            total = b.extract_value(total, t)
                        total = b.sitofp(total, f32x16.llvm)
                        one = scaled(one, total, factors[i], d)
                        if offset:
                            part = number(f, 12 * t + 4 * (i if segments == 2 else 2))
                            one = scaled(one, part, factors[segments + i], d)
                    if memory:
                        # keep it so: LLVM would load many tokens first, and spill them
                        kind = ir.FunctionType(one.type, [one.type])
                        one = b.call(ir.InlineAsm(kind, "", "=v,0,~{memory}", True), [one])
                    acc = b.insert_value(acc, one, t)
                return acc

            return sums(sums, given, given, *[types.int64] * 3), code

        return add

    return SimpleNamespace(
        accumulate=accumulate,
        count=count,
        zeros=zeros,
        izeros=izeros,
        splat_i32=gather(i32x16, lambda b, p: splat(b, load_vector(b, p, I32, 4))),
        splat_f32=gather(f32x16, lambda b, p: splat(b, load_vector(b, p, FLOAT, 4))),
        load=gather(f32x16, lambda b, p: load_vector(b, p, f32x16.llvm, 4)),
        load_half=gather(f32x16, lambda b, p: half_to_float(b, load_vector(b, p, vector(I16), 2))),
        store=store,
    )
