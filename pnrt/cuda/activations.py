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
    shuffle,
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


@device
def warp_sum(value):
    """i32 of 32 lanes -> their sum, in every lane."""
    for s in unroll((16, 8, 4, 2, 1)):
        value += shuffle_xor(value, s)
    return value


@device
def store_pair(row, units, u, place, half, value):
    """Store an i32 as one half of word `place` of unit u: quads [words / 4][units][4]."""
    at_word = (place // 4 * units + u) * 4 + place % 4
    store_u16(at(row, at_word * 2 + half, 2), u32(value))


@device
def store_unit(row, units, u, dx, a, b, c):
    """Store what stands beside a unit's 16 words: its scale and three more numbers (i32)."""
    if lane() == 0:
        meta = at(row, 4 * units + u, 16)
        store_f32(meta, dx)
        store_i32(meta + 4, a)
        store_i32(meta + 8, b)
        store_i32(meta + 12, c)


@kernel(name="quantize_nibble")
def quantize_nibble(x: u64, width: u32, K: u32, out: u64, units: u32, bad: u64):
    """x [K] f32 -> the view of matvec's nibble kernel.

    Pairs 0 and 1 of each word times 2^8 and 2^4. Beside a unit: scale / 4096; -8 * 4096 times the
    sum of pairs 0 to 2; 8 * 4096 times that of pairs 3; 4096 times the sum of all, as f32.
    """
    u, pair = global_warp(), lane() // 2
    if u < units:
        code, dx = code_block(read(x, width, K, u32(0), u * 32 + lane()), bad)
        j = pair % 4
        shift = u32(8) if j == 0 else u32(4) if j == 1 else u32(0)
        store_pair(out, units, u, pair, lane() % 2, code << i32(shift))
        total = warp_sum(code)
        top = warp_sum(code if j == 3 else 0)
        sums = float_to_bits(f32(total * 4096))
        store_unit(out, units, u, dx * 2.0**-12, (top - total) * 32768, top * 32768, sums)


@kernel(name="quantize_three")
def quantize_three(x: u64, width: u32, K: u32, out: u64, units: u32, bad: u64):
    """x [K] f32 -> the view of matvec's three-bit kernel.

    Pairs times the complement of their place in the word. Beside a unit: scale / 4096; -4 * 4096
    times the sums of its halves.
    """
    u, pair = global_warp(), lane() // 2
    if u < units:
        code, dx = code_block(read(x, width, K, u32(0), u * 32 + lane()), bad)
        j = pair % 5
        shift = u32(6) if j == 0 else u32(3) if j == 1 or j == 3 else u32(0)
        store_pair(out, units, u, pair, lane() % 2, code << i32(shift))
        first = warp_sum(code if lane() < 16 else 0)
        last = warp_sum(code if lane() >= 16 else 0)
        store_unit(out, units, u, dx * 2.0**-12, first * -16384, last * -16384, i32(0))


@kernel(name="quantize_byte")
def quantize_byte(x: u64, width: u32, K: u32, out: u64, units: u32, bad: u64):
    """x [K] f32 -> the view of matvec's byte kernel.

    Of four codes, the words 256 x[0] - x[1], 256 x[2] - x[3] and x[1], x[3]. Beside a unit:
    scale / 256; -128 * 256 times the sum of the even codes.
    """
    u = global_warp()
    if u < units:
        code, dx = code_block(read(x, width, K, u32(0), u * 32 + lane()), bad)
        odd = lane() % 2
        after = shuffle_xor(code, 1)
        value = code if odd == 1 else code * 256 - after
        store_pair(out, units, u, lane() // 4 * 2 + odd, lane() // 2 % 2, value)
        even = warp_sum(code if odd == 0 else 0)
        store_unit(out, units, u, dx * 2.0**-8, even * -32768, i32(0), i32(0))


@kernel(name="quantize_pn3t")
def quantize_pn3t(x: u64, width: u32, K: u32, out: u64, units: u32, bad: u64):
    """x [K] f32 -> the view of matvec's pn3t kernel; a warp takes a fifth of a unit.

    80 words of pairs (views.py), then per unit 12 words: five scales / 4096, and -4 * 4096 times
    the sums of its six segments.
    """
    item = global_warp()
    u, b = item // 5, item % 5
    if u < units:
        code, dx = code_block(read(x, width, K, u32(0), item * 32 + lane()), bad)
        e = b * 32 + lane()
        word, j = e // 10, e % 10 // 2
        begin = u32(16) if b == 2 and lane() >= 16 else u32(0)
        before = shuffle(code, (lane() + 30) & 31)
        value = code - before * 8 if j > 0 and lane() >= begin + 2 else code
        shift = u32(6) if j == 0 else u32(3) if j == 1 or j == 3 else u32(0)
        store_pair(out, units, u, word * 5 + j, lane() % 2, value << i32(shift))
        first = warp_sum(code if lane() < 16 else 0) * -16384
        last = warp_sum(code if lane() >= 16 else 0) * -16384
        if lane() == 0:
            place = 5 + b + u32(b > 2)
            store_f32(meta_word(out, units, u, b), dx * 2.0**-12)
            store_i32(meta_word(out, units, u, place), first if b == 2 else first + last)
            if b == 2:
                store_i32(meta_word(out, units, u, place + 1), last)
            if b == 4:
                store_i32(meta_word(out, units, u, place + 1), i32(0))


@device
def meta_word(row, units, u, i):
    """Address of word i of the 12 beside a pn3t unit."""
    return at(row, ((20 + i // 4) * units + u) * 4 + i % 4, 4)


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


# one-token views: their kernels
VIEWS = {
    "nibble": quantize_nibble,
    "three": quantize_three,
    "byte": quantize_byte,
    "pn3t": quantize_pn3t,
}


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [quantize, spread, *VIEWS.values()]
