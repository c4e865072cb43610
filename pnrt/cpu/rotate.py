"""The Sylvester-Hadamard transform of blocks of a vector, and the order of heads.

Work is split by (token, block): one block of 1024 numbers stays in the first-level cache.
"""

from __future__ import annotations

import numpy as np

from pnrt.cpu.elementwise import share
from pnrt.jit import inline, kernel
from pnrt.simd import (
    add,
    bits_float,
    f32_at,
    hadamard_step,
    i32_at,
    load_f32,
    mul,
    read_i32,
    read_i64,
    set_f32,
    store_f32,
    sub,
)

_step1, _step2, _step4, _step8 = (hadamard_step(h) for h in (1, 2, 4, 8))


@inline
def _small(x, signs, out, block, inverse, scale):
    """A block of fewer than 16 numbers."""
    p, q, s = f32_at(x), f32_at(out), f32_at(signs)
    before, after = signs != 0 and inverse == 0, signs != 0 and inverse != 0
    for i in range(block):
        q[i] = p[i] * s[i] if before else p[i]
    h = 1
    while h < block:
        for i in range(block):
            if i & h == 0:
                a, b = q[i], q[i + h]
                q[i], q[i + h] = a + b, a - b
        h *= 2
    for i in range(block):
        q[i] = (q[i] * scale) * s[i] if after else q[i] * scale


@inline
def _wide(x, signs, out, block, inverse, scale):
    """A block of 16 numbers or more: steps inside vectors, then two steps per pass over memory."""
    before, after = signs != 0 and inverse == 0, signs != 0 and inverse != 0
    for i in range(0, block * 4, 64):
        v = load_f32(x + i)
        if before:
            v = mul(v, load_f32(signs + i))
        store_f32(out + i, _step8(_step4(_step2(_step1(v)))))
    h = 64
    while 2 * h < block * 4:
        for first in range(0, block * 4, 4 * h):
            for i in range(out + first, out + first + h, 64):
                a, b = load_f32(i), load_f32(i + h)
                c, d = load_f32(i + 2 * h), load_f32(i + 3 * h)
                e, f, g, k = add(a, b), sub(a, b), add(c, d), sub(c, d)
                store_f32(i, add(e, g))
                store_f32(i + h, add(f, k))
                store_f32(i + 2 * h, sub(e, g))
                store_f32(i + 3 * h, sub(f, k))
        h *= 4
    if h < block * 4:
        for i in range(out, out + h, 64):
            a, b = load_f32(i), load_f32(i + h)
            store_f32(i, add(a, b))
            store_f32(i + h, sub(a, b))
    factor = set_f32(scale)
    for i in range(0, block * 4, 64):
        v = mul(load_f32(out + i), factor)
        if after:
            v = mul(v, load_f32(signs + i))
        store_f32(out + i, v)


@kernel(name="hadamard")
def hadamard_kernel(a, thread, threads):
    """Signs, butterflies with h = 1, 2, 4, ..., one multiplication; inverse: signs come last.

    Arguments: x, x width, signs [n] float32 (or address 0), out (may be x), out width, n, size (of
    blocks: a power of two that divides n), inverse, scale bits, control.
    """
    x, wx, signs = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    out, wo, n, block = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    inverse, scale = read_i64(a + 56), bits_float(read_i32(a + 64))
    blocks = n // block
    first, last = share(read_i64(read_i64(a + 72)) * blocks, thread, threads)
    for item in range(first, last):
        t, start = item // blocks, item % blocks * block
        source, target = x + (t * wx + start) * 4, out + (t * wo + start) * 4
        sign = signs + start * 4 if signs else np.int64(0)
        if block < 16:
            _small(source, sign, target, block, inverse, scale)
        else:
            _wide(source, sign, target, block, inverse, scale)


@kernel(name="regroup")
def regroup_kernel(a, thread, threads):
    """Tiled heads to grouped ones: head r * groups + g of x becomes head g * (heads / groups) + r.

    Arguments: x, x width, out, out width, n (numbers per head), heads, groups, control.
    """
    x, wx, out, wo = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    n, heads, groups = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    first, last = share(read_i64(read_i64(a + 56)), thread, threads)
    for t in range(first, last):
        for h in range(heads):
            to = h % groups * (heads // groups) + h // groups
            source, target = i32_at(x + (t * wx + h * n) * 4), i32_at(out + (t * wo + to * n) * 4)
            for i in range(n):
                target[i] = source[i]
