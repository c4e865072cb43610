"""Elementwise operations on [T, width] float32 slots, and the elementary functions of the CPU.

Every kernel here takes its tokens as one share of consecutive rows ("tokens" split), so kernels
that follow each other on the same share need no barrier between them.
"""

from __future__ import annotations

import numpy as np
from numba.extending import intrinsic

from pnrt import scalars, simd
from pnrt.jit import inline, kernel
from pnrt.simd import f32_at, read_i64


@intrinsic
def _select(typingctx, condition, a, b):
    """Choose without a branch, so that loops vectorize."""
    from numba import types

    def emit(context, builder, signature, args):
        return builder.select(*args)

    return a(types.boolean, a, a), emit


class _Primitives:
    """What scalars.build needs, for numba on the CPU (which contracts nothing)."""

    add = staticmethod(inline(lambda a, b: a + b))
    sub = staticmethod(inline(lambda a, b: a - b))
    mul = staticmethod(inline(lambda a, b: a * b))
    div = staticmethod(inline(lambda a, b: a / b))
    f32 = staticmethod(inline(lambda a: np.float32(a)))
    i32 = staticmethod(inline(lambda a: np.int32(a)))
    fma = staticmethod(simd.fma_scalar)
    float_to_bits = staticmethod(simd.float_bits)
    bits_to_float = staticmethod(simd.bits_float)
    select = staticmethod(_select)
    compile = staticmethod(inline)


functions = scalars.build(_Primitives)
_silu, _sigmoid = functions.silu, functions.sigmoid


@inline
def share(n, thread, threads):
    """Half-open range of the n items that one thread works on."""
    return n * thread // threads, n * (thread + 1) // threads


@kernel(name="add")
def add_kernel(a, thread, threads):
    """out = x + y. Arguments: x, x width, y, y width, out, out width, n, control."""
    x, wx, y, wy = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    out, wo, n = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    first, last = share(read_i64(read_i64(a + 56)), thread, threads)
    for t in range(first, last):
        p, q, r = f32_at(x + t * wx * 4), f32_at(y + t * wy * 4), f32_at(out + t * wo * 4)
        for i in range(n):
            r[i] = p[i] + q[i]


@kernel(name="add_bias")
def bias_kernel(a, thread, threads):
    """x += bias, the same row for every token. Arguments: x, width, bias, n, control."""
    x, width, bias, n = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    first, last = share(read_i64(read_i64(a + 32)), thread, threads)
    q = f32_at(bias)
    for t in range(first, last):
        p = f32_at(x + t * width * 4)
        for i in range(n):
            p[i] += q[i]


@kernel(name="scale")
def scale_kernel(a, thread, threads):
    """x *= factor, one number for the whole matrix. Arguments: x, width, factor, n, control."""
    x, width, factor, n = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    first, last = share(read_i64(read_i64(a + 32)), thread, threads)
    q = f32_at(factor)
    for t in range(first, last):
        p = f32_at(x + t * width * 4)
        for i in range(n):
            p[i] *= q[0]


@kernel(name="swiglu")
def swiglu_kernel(a, thread, threads):
    """out = silu(gate) * up. Arguments as add_kernel's."""
    x, wx, y, wy = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    out, wo, n = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    first, last = share(read_i64(read_i64(a + 56)), thread, threads)
    for t in range(first, last):
        p, q, r = f32_at(x + t * wx * 4), f32_at(y + t * wy * 4), f32_at(out + t * wo * 4)
        for i in range(n):
            r[i] = _silu(p[i]) * q[i]


@kernel(name="sigmoid")
def sigmoid_kernel(a, thread, threads):
    """out = sigmoid(x). Arguments: x, x width, out, out width, n, control."""
    x, wx, out, wo, n = (
        read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24), read_i64(a + 32),
    )  # fmt: skip
    first, last = share(read_i64(read_i64(a + 40)), thread, threads)
    for t in range(first, last):
        p, q = f32_at(x + t * wx * 4), f32_at(out + t * wo * 4)
        for i in range(n):
            q[i] = _sigmoid(p[i])


@kernel(name="sigmoid_gate")
def sigmoid_gate_kernel(a, thread, threads):
    """out = x * sigmoid(gate), `heads` runs of n numbers; consecutive in x and out.

    Arguments: x, x width, gate, gate width, out, out width, n, heads, stride (from run to run of
    gate), first (of gate), control.
    """
    x, wx, gate, wg = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    out, wo, n, heads = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48), read_i64(a + 56)
    stride, offset = read_i64(a + 64), read_i64(a + 72)
    first, last = share(read_i64(read_i64(a + 80)), thread, threads)
    for t in range(first, last):
        for h in range(heads):
            p, r = f32_at(x + (t * wx + h * n) * 4), f32_at(out + (t * wo + h * n) * 4)
            q = f32_at(gate + (t * wg + h * stride + offset) * 4)
            for i in range(n):
                r[i] = p[i] * _sigmoid(q[i])
