"""Activations for products: q8_0 codes by the scalar rule, or float32, in the order lanes read."""

from __future__ import annotations

from typing import NamedTuple

from pnrt.cuda.kernel import Device, Kernel, device, kernel, unroll
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


# put(row, units, b, value, code, dx): a warp stores block b of 32 numbers in a token's view


@device
def put_q8_0(row, units, b, value, code, dx):
    """The q8_0 activations of matmul.py."""
    pair = lane() // 2
    store_pair(row, units, b, pair, lane() % 2, code)
    total = half_sums(code)
    meta = at(row, 4 * units + b, 16)
    if lane() % 16 == 0:
        store_i32(meta + 4 + lane() // 4, total)
    if lane() == 0:
        store_f32(meta, dx)
        store_i32(meta + 12, i32(0))


@device
def put_f32(row, units, b, value, code, dx):
    """The f32 activations of matmul.py."""
    store_f32(at(row, (lane() // 4 * units + b) * 4 + lane() % 4, 4), value)


@device
def put_nibble(row, units, b, value, code, dx):
    """The view of matvec's nibble kernel.

    Pairs 0 and 1 of each word times 2^8 and 2^4. Beside a unit: scale / 4096; -8 * 4096 times the
    sum of pairs 0 to 2; 8 * 4096 times that of pairs 3; 4096 times the sum of all, as f32.
    """
    pair = lane() // 2
    j = pair % 4
    shift = u32(8) if j == 0 else u32(4) if j == 1 else u32(0)
    store_pair(row, units, b, pair, lane() % 2, code << i32(shift))
    total = warp_sum(code)
    top = warp_sum(code if j == 3 else 0)
    sums = float_to_bits(f32(total * 4096))
    store_unit(row, units, b, dx * 2.0**-12, (top - total) * 32768, top * 32768, sums)


@device
def put_three(row, units, b, value, code, dx):
    """The view of matvec's three-bit kernel.

    Pairs times the complement of their place in the word. Beside a unit: scale / 4096; -4 * 4096
    times the sums of its halves.
    """
    pair = lane() // 2
    j = pair % 5
    shift = u32(6) if j == 0 else u32(3) if j == 1 or j == 3 else u32(0)
    store_pair(row, units, b, pair, lane() % 2, code << i32(shift))
    first = warp_sum(code if lane() < 16 else 0)
    last = warp_sum(code if lane() >= 16 else 0)
    store_unit(row, units, b, dx * 2.0**-12, first * -16384, last * -16384, i32(0))


@device
def put_byte(row, units, b, value, code, dx):
    """The view of matvec's byte kernel.

    Of four codes, the words 256 x[0] - x[1], 256 x[2] - x[3] and x[1], x[3]. Beside a unit:
    scale / 256; -128 * 256 times the sum of the even codes.
    """
    odd = lane() % 2
    after = shuffle_xor(code, 1)
    word = code if odd == 1 else code * 256 - after
    store_pair(row, units, b, lane() // 4 * 2 + odd, lane() // 2 % 2, word)
    even = warp_sum(code if odd == 0 else 0)
    store_unit(row, units, b, dx * 2.0**-8, even * -32768, i32(0), i32(0))


@device
def put_pn3t(row, units, b, value, code, dx):
    """The view of matvec's pn3t kernel; b is a fifth of a unit.

    80 words of pairs (views.py), then per unit 12 words: five scales / 4096, and -4 * 4096 times
    the sums of its six segments.
    """
    u, fifth = b // 5, b % 5
    e = fifth * 32 + lane()
    word, j = e // 10, e % 10 // 2
    begin = u32(16) if fifth == 2 and lane() >= 16 else u32(0)
    before = shuffle(code, (lane() + 30) & 31)
    part = code - before * 8 if j > 0 and lane() >= begin + 2 else code
    shift = u32(6) if j == 0 else u32(3) if j == 1 or j == 3 else u32(0)
    store_pair(row, units, u, word * 5 + j, lane() % 2, part << i32(shift))
    first = warp_sum(code if lane() < 16 else 0) * -16384
    last = warp_sum(code if lane() >= 16 else 0) * -16384
    if lane() == 0:
        place = 5 + fifth + u32(fifth > 2)
        store_f32(meta_word(row, units, u, fifth), dx * 2.0**-12)
        store_i32(meta_word(row, units, u, place), first if fifth == 2 else first + last)
        if fifth == 2:
            store_i32(meta_word(row, units, u, place + 1), last)
        if fifth == 4:
            store_i32(meta_word(row, units, u, place + 1), i32(0))


@device
def meta_word(row, units, u, i):
    """Address of word i of the 12 beside a pn3t unit."""
    return at(row, ((20 + i // 4) * units + u) * 4 + i % 4, 4)


class View(NamedTuple):
    """An order of activations.

    put: stores a block of 32; coded: as q8_0 codes; nbytes: of a unit; blocks: of 32 per unit;
    whole: columns that are rounded up to a multiple of this; tokens: whether for many.
    """

    put: Device
    coded: bool
    nbytes: int
    blocks: int = 1
    whole: int = 32
    tokens: bool = False

    def units(self, K: int) -> int:
        """Units of a token's K columns."""
        return -(-K // self.whole) * self.whole // (32 * self.blocks)


# the first two in whole units of 160, so that any format can read them
VIEWS = {
    "q8_0": View(put_q8_0, True, 80, whole=160, tokens=True),
    "f32": View(put_f32, False, 128, whole=160, tokens=True),
    "nibble": View(put_nibble, True, 80),
    "three": View(put_three, True, 80),
    "byte": View(put_byte, True, 80),
    "pn3t": View(put_pn3t, True, 92 * 4, blocks=5, whole=160),
}


@device
def note(value, bad):
    """bad [1] u32 becomes 1 where a value is not finite."""
    if float_to_bits(absolute(value)) >= INFINITY_BITS:
        store_u32(bad, u32(1))


def _conversion(name: str, view: View) -> Kernel:
    @kernel(name=f"quantize_{name}" if view.coded else "spread_f32")
    def convert(x: u64, width: u32, K: u32, out: u64, units: u32, bad: u64):
        """x [T, width] f32 -> the view; a warp takes a block of 32, block_y a token.

        bad [1] u32 becomes 1 where a value is not finite or its block's scale overflows.
        """
        b, token = global_warp(), block_y()
        if b < units * view.blocks:
            value = read(x, width, K, token, b * 32 + lane())
            row = out + u64(token) * view.nbytes * u64(units)
            code, dx = i32(0), f32(0)
            if view.coded:
                code, dx = code_block(value, bad)
            else:
                note(value, bad)
            view.put(row, units, b, value, code, dx)

    return convert


CONVERSIONS = {name: _conversion(name, view) for name, view in VIEWS.items()}


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return list(CONVERSIONS.values())
