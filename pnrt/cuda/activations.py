"""Activations for products: q8_0 codes by the scalar rule, or float32, in the order lanes read."""

from __future__ import annotations

from pnrt.cuda.kernel import Kernel, device, kernel, unroll
from pnrt.cuda.lanes import (
    absolute,
    at,
    bits_to_float,
    block_y,
    f32,
    float_to_bits,
    float_to_half,
    global_warp,
    half_to_float,
    i32,
    lane,
    load_f32,
    shuffle_xor,
    store_f32,
    store_i32,
    store_u16,
    store_u32,
    truncate,
    u32,
    u64,
)

INFINITY_BITS = 0x7F800000


@device
def read(x, width, K, token, k):
    """x[token, k], 0.0 behind the last column."""
    value = f32(0)
    if k < K:
        value = load_f32(at(x + u64(token) * 4 * u64(width), k, 4))
    return value


@device
def code_block(value, bad):
    """A warp's 32 values -> this lane's code (i32) and the block's scale; bad [1] u32 notes NaN.

    d = max|x| / 127 codes, its fp16 rounding is the scale; halves round away from zero.
    """
    top = float_to_bits(absolute(value))
    for s in unroll((16, 8, 4, 2, 1)):
        top = max(top, shuffle_xor(top, s))
    d = bits_to_float(top) / 127.0
    dx = half_to_float(float_to_half(d))
    fits = top < INFINITY_BITS and dx <= 65504.0
    inverse = 1.0 / d
    # 1 / d is infinite where the scale rounds to zero, whatever the codes
    usable = fits and inverse < bits_to_float(i32(INFINITY_BITS))
    v = value * inverse if usable else 0.0
    whole = truncate(v)
    rest = v - f32(whole)
    code = whole + i32(rest >= 0.5) - i32(rest <= -0.5)
    if not fits and lane() == 0:
        store_u32(bad, u32(1))
    return code, dx


@device
def half_sums(code):
    """Sums of a code over lanes 0-15 and 16-31, each in the lanes of its half."""
    total = code
    for s in unroll((8, 4, 2, 1)):
        total += shuffle_xor(total, s)
    return total


@kernel(name="quantize_q8_0")
def quantize(x: u64, width: u32, K: u32, out: u64, blocks: u32, bad: u64):
    """x [T, width] f32 -> the q8_0 activations of matmul.py; a warp takes a block, block_y a token.

    bad [1] u32 becomes 1 where a value is not finite or its block's scale overflows.
    """
    b, token = global_warp(), block_y()
    if b < blocks:
        code, dx = code_block(read(x, width, K, token, b * 32 + lane()), bad)
        row = out + u64(token) * 80 * u64(blocks)
        pair = lane() // 2
        store_u16(at(row, (pair // 4 * blocks + b) * 8 + pair % 4 * 2 + lane() % 2, 2), u32(code))
        total = half_sums(code)
        meta = at(row, 4 * blocks + b, 16)
        if lane() % 16 == 0:
            store_i32(meta + 4 + lane() // 4, total)
        if lane() == 0:
            store_f32(meta, dx)
            store_i32(meta + 12, i32(0))


@kernel(name="spread_f32")
def spread(x: u64, width: u32, K: u32, out: u64, blocks: u32, bad: u64):
    """x [T, width] f32 -> the f32 activations of matmul.py; launched as quantize."""
    b, token = global_warp(), block_y()
    if b < blocks:
        value = read(x, width, K, token, b * 32 + lane())
        row = out + u64(token) * 128 * u64(blocks)
        store_f32(at(row, (lane() // 4 * blocks + b) * 4 + lane() % 4, 4), value)
        if float_to_bits(absolute(value)) >= INFINITY_BITS:
            store_u32(bad, u32(1))


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [quantize, spread]
