"""Rotary embedding in place, and the store of keys and values into the cache.

Both take their tokens as one share of consecutive rows, so no barrier lies between them. A key is
stored as [block of 16 positions, element, position]: attention's lanes are positions. A value is
stored as [position, element].
"""

from __future__ import annotations

from pnrt.cpu.elementwise import share
from pnrt.jit import kernel
from pnrt.simd import f32_at, fma_scalar, half_bits, read_i64, u16_at


@kernel(name="rope")
def rope_kernel(a, thread, threads):
    """Rotate pairs of every head: r0 = fma(-x1, s, x0 c), r1 = fma(x1, c, x0 s).

    Arguments: x, width, heads, head dim, pairs, neox, cos [positions, pairs], sin, control.
    """
    x, width, heads, dim = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    pairs, neox = read_i64(a + 32), read_i64(a + 40)
    cosines, sines, control = read_i64(a + 48), read_i64(a + 56), read_i64(a + 64)
    start = read_i64(control + 8)
    # the partner's distance, and from one pair to the next
    far, step = (pairs, 1) if neox else (1, 2)
    first, last = share(read_i64(control), thread, threads)
    for t in range(first, last):
        c, s = f32_at(cosines + (start + t) * pairs * 4), f32_at(sines + (start + t) * pairs * 4)
        for h in range(heads):
            p = f32_at(x + (t * width + h * dim) * 4)
            for j in range(pairs):
                x0, x1 = p[j * step], p[j * step + far]
                p[j * step] = fma_scalar(-x1, s[j], x0 * c[j])
                p[j * step + far] = fma_scalar(x1, c[j], x0 * s[j])


@kernel(name="store_kv")
def store_kernel(a, thread, threads):
    """Append keys and values to the cache of one layer.

    Arguments: k, k width, v, v width, kv heads, head dim, key cache, value cache, positions (of the
    cache, a multiple of 16), half (1: fp16, 0: float32), control.
    """
    k, wk, v, wv = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    heads, dim = read_i64(a + 32), read_i64(a + 40)
    keys, values, capacity = read_i64(a + 48), read_i64(a + 56), read_i64(a + 64)
    half, control = read_i64(a + 72), read_i64(a + 80)
    start = read_i64(control + 8)
    first, last = share(read_i64(control), thread, threads)
    for t in range(first, last):
        at = start + t
        for h in range(heads):
            p, q = f32_at(k + (t * wk + h * dim) * 4), f32_at(v + (t * wv + h * dim) * 4)
            key = h * capacity * dim + (at >> 4) * dim * 16 + (at & 15)
            value = (h * capacity + at) * dim
            if half:
                k16, v16 = u16_at(keys + key * 2), u16_at(values + value * 2)
                for i in range(dim):
                    k16[i * 16] = half_bits(p[i])
                    v16[i] = half_bits(q[i])
            else:
                k32, v32 = f32_at(keys + key * 4), f32_at(values + value * 4)
                for i in range(dim):
                    k32[i * 16] = p[i]
                    v32[i] = q[i]
