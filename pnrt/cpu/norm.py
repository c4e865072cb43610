"""RMS and L2 norms: a lane-32 sum of squares, then one factor r for the whole run of numbers."""

from __future__ import annotations

import numpy as np

from pnrt.cpu.elementwise import share
from pnrt.jit import inline, kernel
from pnrt.simd import (
    bits_float,
    butterfly,
    f32_at,
    fma,
    load_f32,
    load_first,
    read_i32,
    read_i64,
    zero,
)


@inline
def sum_of_squares(x, n):
    """Lane-32 sum of the squares of n float32 at an address; needs no memory behind the last."""
    low = high = zero()
    whole = n // 32 * 32
    for i in range(0, whole, 32):
        p = x + i * 4
        a, b = load_f32(p), load_f32(p + 64)
        low, high = fma(a, a, low), fma(b, b, high)
    if whole < n:
        p = x + whole * 4
        a, b = load_first(p, n - whole), load_first(p + 64, n - whole - 16)
        low, high = fma(a, a, low), fma(b, b, high)
    return butterfly(low, high)


@kernel(name="rms_norm")
def rms_norm_kernel(a, thread, threads):
    """(x * r) * w with r = 1 / sqrt(mean + eps): `heads` runs of n numbers, all by one weight.

    Arguments: x, x width, weight [n], out, out width, n, heads, stride (from run to run of x; they
    are consecutive in out), eps bits, control.
    """
    x, wx, weight = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    out, wo, n, heads = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    stride, eps = read_i64(a + 56), bits_float(read_i32(a + 64))
    first, last = share(read_i64(read_i64(a + 72)), thread, threads)
    for t in range(first, last):
        for h in range(heads):
            source, target = x + (t * wx + h * stride) * 4, out + (t * wo + h * n) * 4
            mean = sum_of_squares(source, n) / np.float32(n)
            r = np.float32(1.0) / np.sqrt(mean + eps)
            p, w, q = f32_at(source), f32_at(weight), f32_at(target)
            for i in range(n):
                q[i] = (p[i] * r) * w[i]


@kernel(name="l2_norm")
def l2_norm_kernel(a, thread, threads):
    """(x * r) * scale with r = 1 / sqrt(sum + eps), for `heads` consecutive runs of n numbers.

    Arguments: x, x width, first (of x), out, out width, n, heads, eps bits, scale bits, control.
    """
    x, wx, offset = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    out, wo, n, heads = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    eps, scale = bits_float(read_i32(a + 56)), bits_float(read_i32(a + 64))
    first, last = share(read_i64(read_i64(a + 72)), thread, threads)
    for t in range(first, last):
        for h in range(heads):
            source, target = x + (t * wx + offset + h * n) * 4, out + (t * wo + h * n) * 4
            r = np.float32(1.0) / np.sqrt(sum_of_squares(source, n) + eps)
            p, q = f32_at(source), f32_at(target)
            for i in range(n):
                q[i] = (p[i] * r) * scale
