"""Codes and small scales straight from the bytes of a row, one function per way to keep them.

codes(row, u, n, c) writes the first n codes of unit u of the row at an address into the bytes at c;
scale(row, index) gives the integer of a group, counted along the row. Both backends pack with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pnrt.formats.codebook import E2M1, NL
from pnrt.formats.fp8 import e4m3_magnitude
from pnrt.jit import inline
from pnrt.simd import i8_at, read_u8, read_u16, read_u64, u8_at, u16_at, u64_at

# a byte in all eight bytes of a word: codes are read eight at a time
_ALL = 0x0101010101010101
_1, _3, _15 = (np.uint64(_ALL * byte) for byte in (1, 3, 15))

# readers of codes: one unit of a row


def nibbles(nbytes: int, offset: int, runs: int = 1):
    """Byte j of 16 has element j in its low and element j + 16 in its high nibble."""

    @inline
    def codes(row, u, n, c):
        q, out = row + u // runs * nbytes + offset + u % runs * 16, u64_at(c)
        for i in range(2):
            both = read_u64(q + 8 * i)
            out[i], out[i + 2] = both & _15, both >> np.uint64(4) & _15

    return codes


@inline
def _spread(bits):
    """Bit i of eight becomes byte i, 0 or 1."""
    each = np.uint64(bits) * np.uint64(_ALL) & np.uint64(0x8040201008040201)
    return each + np.uint64(_ALL * 0x7F) >> np.uint64(7) & _1


def fives(nbytes: int, offset: int):
    """The nibbles of 32 weights behind their fifth bits, bit j of 32 for weight j."""
    low = nibbles(nbytes, offset + 4)

    @inline
    def codes(row, u, n, c):
        low(row, u, n, c)
        high, out = u8_at(row + u * nbytes + offset), u64_at(c)
        for i in range(4):
            out[i] |= _spread(high[i]) << np.uint64(4)

    return codes


def bytes_codes(nbytes: int, offset: int, flip: int = 0, runs: int = 1):
    """One byte per weight."""
    flips = np.uint64(_ALL * flip)

    @inline
    def codes(row, u, n, c):
        q = row + u // runs * nbytes + offset + u % runs * 32
        for i in range(4):
            u64_at(c)[i] = read_u64(q + 8 * i) ^ flips

    return codes


def planes(nbytes: int, offset: int):
    """Two bits per weight: 32 bytes hold 4 planes of 32 weights."""

    @inline
    def codes(row, u, n, c):
        r = u & 7
        q, shift = row + (u >> 3) * nbytes + offset + (r >> 2) * 32, np.uint64(2 * (r & 3))
        for i in range(4):
            u64_at(c)[i] = read_u64(q + 8 * i) >> shift & _3

    return codes


@inline
def word(at):
    """The uint32 at an address that is aligned to 2 bytes only, as a block's words are."""
    return np.uint32(read_u16(at)) | np.uint32(read_u16(at + 2)) << np.uint32(16)


def _apart(bits: int):
    """A function that takes the lowest four codes of so many bits to bytes 0, 2, 4, 6."""
    low, second, third, fourth = (np.uint64((1 << bits) - 1 << i * bits) for i in range(4))
    step = np.uint64(16 - bits)

    @inline
    def apart(half):
        far = (half & third) | (half & fourth) << step
        return (half & low) | (half & second) << step | far << step << step

    return apart


_threes, _fours = _apart(3), _apart(4)


@inline
def pn3t_codes(row, u, n, c):
    """Ten codes of three bits per word: element t in half t mod 2, pair t // 2."""
    for block in range(2 if n == 160 else 1):
        words, out = row + (2 * u + block) * 34 + 2, c + 80 * block
        for w in range(8):
            low = np.uint64(word(words + 4 * w))
            high = low >> np.uint64(16)
            u64_at(out + 10 * w)[0] = _threes(low) | (_threes(high) << np.uint64(8))
            last = (low >> np.uint64(12)) & np.uint64(7)
            last |= ((high >> np.uint64(12)) & np.uint64(7)) << np.uint64(8)
            u16_at(out + 10 * w + 8)[0] = np.uint16(last)


@inline
def pn4t_codes(row, u, n, c):
    """Eight codes of four bits per word: element t in half t mod 2, pair t // 2."""
    words = row + (u >> 1) * 34 + 2 + (u & 1) * 16
    for w in range(4):
        low = np.uint64(word(words + 4 * w))
        u64_at(c + 8 * w)[0] = _fours(low) | (_fours(low >> np.uint64(16)) << np.uint64(8))


@inline
def q3_k_codes(row, u, n, c):
    """Two bits in planes, the third apart."""
    block, r = row + (u >> 3) * 110, u & 7
    q, shift = block + 32 + (r >> 2) * 32, np.uint64(2 * (r & 3))
    for i in range(4):
        high = read_u64(block + 8 * i) >> np.uint64(r) & _1
        u64_at(c)[i] = read_u64(q + 8 * i) >> shift & _3 | high << np.uint64(2)


def runs(nbytes: int, offset: int, high: int | None = None):
    """Nibbles of 256: 32 bytes hold a run of 32 low and one of 32 high; fifth bits at `high`."""
    fifth = high is not None
    behind = high or 0

    @inline
    def codes(row, u, n, c):
        block, r = row + (u >> 3) * nbytes, u & 7
        q, shift = block + offset + (r >> 1) * 32, np.uint64(4 * (r & 1))
        for i in range(4):
            code = read_u64(q + 8 * i) >> shift & _15
            if fifth:
                high = read_u64(block + behind + 8 * i) >> np.uint64(r) & _1
                code |= high << np.uint64(4)
            u64_at(c)[i] = code

    return codes


@inline
def q6_k_codes(row, u, n, c):
    """Low nibbles in runs of 64, high pairs in planes."""
    block, r = row + (u >> 3) * 210, u & 7
    low, shift = block + (r >> 2) * 64 + (r & 1) * 32, np.uint64(4 * ((r >> 1) & 1))
    high, up = block + 128 + (r >> 2) * 32, np.uint64(2 * (r & 3))
    for i in range(4):
        pair = read_u64(high + 8 * i) >> up & _3
        u64_at(c)[i] = read_u64(low + 8 * i) >> shift & _15 | pair << np.uint64(4)


@inline
def _digit(byte, power):
    return ((np.uint32(byte) * np.uint32(power) & np.uint32(255)) * np.uint32(3)) >> np.uint32(8)


@inline
def tq1_codes(row, u, n, c):
    """Digits of base 3: 32 bytes of five, 16 bytes of five, 4 bytes of four."""
    out = u8_at(c)
    block, r = row + (u >> 3) * 54, u & 7
    powers = (1, 3, 9, 27, 81)
    if r < 5:
        q = u8_at(block)
        for j in range(32):
            out[j] = _digit(q[j], powers[r])
    else:
        # 16 bytes of five digits, then 4 bytes of four
        q = u8_at(block + 32)
        for j in range(16):
            out[j] = _digit(q[j], powers[2 * (r - 5)])
        if r < 7:
            for j in range(16):
                out[16 + j] = _digit(q[j], powers[2 * (r - 5) + 1])
        else:
            q = u8_at(block + 48)
            for j in range(16):
                out[16 + j] = _digit(q[j & 3], powers[j >> 2])


@inline
def nvfp4_codes(row, u, n, c):
    """Groups of 16: eight low nibbles, then the same bytes' high ones."""
    q, out = row + (u >> 1) * 36 + 4 + (u & 1) * 16, u64_at(c)
    for h in range(2):
        both = read_u64(q + 8 * h)
        out[2 * h], out[2 * h + 1] = both & _15, both >> np.uint64(4) & _15


def pairs(values: tuple[int, int, int, int]):
    """Two bits per weight in the order of the bytes' bits, by a table of -1, 0 and 1."""
    table = np.array(values, np.int8) + np.uint8(1)

    @inline
    def codes(row, u, n, c):
        out = u8_at(c)
        q = u8_at(row + u * 8)
        for j in range(n):
            out[j] = table[(q[j >> 2] >> (2 * (j & 3))) & 3]

    return codes


# readers of small scales: index counts groups of the row


@inline
def q2_k_scale(row, index):
    """Low nibble of a byte per group."""
    return np.int64(read_u8(row + (index >> 4) * 84 + (index & 15)) & 15)


@inline
def q2_k_minimum(row, index):
    """High nibble of a byte per group."""
    return np.int64(read_u8(row + (index >> 4) * 84 + (index & 15)) >> 4)


@inline
def q3_k_scale(row, index):
    """Six bits in two places, minus 32."""
    s, g = row + (index >> 4) * 110 + 96, index & 15
    low = (np.int64(read_u8(s + (g & 7))) >> (4 * (g >> 3))) & 15
    high = (np.int64(read_u8(s + 8 + (g & 3))) >> (2 * (g >> 2))) & 3
    return (low | (high << 4)) - 32


def six_bits(nbytes: int, minimum: bool):
    """Scale or minimum of a group of q4_K or q5_K: 12 bytes for eight of both."""
    first, shift = (4, 4) if minimum else (0, 0)

    @inline
    def read(row, index):
        s, g = row + (index >> 3) * nbytes + 4, index & 7
        if g < 4:
            return np.int64(read_u8(s + first + g) & 63)
        low = (np.int64(read_u8(s + 4 + g)) >> shift) & 15
        return low | ((np.int64(read_u8(s + first + g - 4)) >> 6) << 4)

    return read


@inline
def q6_k_scale(row, index):
    """An int8 per group."""
    return np.int64(i8_at(row + (index >> 4) * 210 + 192)[index & 15])


@inline
def iq4_xs_scale(row, index):
    """Six bits in two places, minus 32."""
    block, r = row + (index >> 3) * 136, index & 7
    low = (np.int64(read_u8(block + 4 + (r >> 1))) >> (4 * (r & 1))) & 15
    high = (np.int64(read_u16(block + 2)) >> (2 * r)) & 3
    return (low | (high << 4)) - 32


_UE4M3 = np.where(np.arange(256) == 0x7F, 0, e4m3_magnitude(np.arange(256) & 0x7F) / 2)
_UE4M3 = _UE4M3.astype(np.float16).view(np.uint16)


@inline
def nvfp4_scale(row, index):
    """Half an unsigned 8-bit float per 16 weights, as the bits of an fp16."""
    return np.int64(_UE4M3[read_u8(row + (index >> 2) * 36 + (index & 3))])


@inline
def mxfp4_scale(row, index):
    """The block's exponent byte."""
    return np.int64(read_u8(row + index * 17))


@inline
def mxfp8_scale(row, index):
    """The block's exponent byte."""
    return np.int64(read_u8(row + index * 33))


@inline
def mxfp8_264_scale(row, index):
    """One of eight exponent bytes behind the codes."""
    return np.int64(read_u8(row + (index >> 3) * 264 + 256 + (index & 7)))


class Codes(NamedTuple):
    """How the codes of a format are read.

    read: codes(row, u, n, c) as above; zero: what the code of weight zero is; table: the values of
    codes, in place of code - zero. Codes of e4m3 and mxfp8 are 8-bit floats.
    """

    read: Callable
    zero: int = 0
    table: tuple[int, ...] = ()


_NL, _E2M1 = (tuple(int(v) for v in table) for table in (NL, E2M1))
# every format with scales
CODES = {
    "pn3t": Codes(pn3t_codes, 4),
    "pn4t": Codes(pn4t_codes, 8),
    "q8_0": Codes(bytes_codes(34, 2, 0x80), 128),
    "q4_0": Codes(nibbles(18, 2), 8),
    "q4_1": Codes(nibbles(20, 4)),
    "q5_0": Codes(fives(22, 2), 16),
    "q5_1": Codes(fives(24, 4)),
    "q2_K": Codes(planes(84, 16)),
    "q3_K": Codes(q3_k_codes, 4),
    "q4_K": Codes(runs(144, 16)),
    "q5_K": Codes(runs(176, 48, 16)),
    "q6_K": Codes(q6_k_codes, 32),
    "iq4_nl": Codes(nibbles(18, 2), 0, _NL),
    "iq4_xs": Codes(nibbles(136, 8, 8), 0, _NL),
    "tq1_0": Codes(tq1_codes, 1),
    "tq2_0": Codes(planes(66, 0), 1),
    "mxfp4": Codes(nibbles(17, 1), 0, _E2M1),
    "nvfp4": Codes(nvfp4_codes, 0, _E2M1),
    "e4m3": Codes(bytes_codes(34, 2)),
    "mxfp8": Codes(bytes_codes(33, 1)),
    "mxfp8_264": Codes(bytes_codes(264, 0, 0, 8)),
    "cyb_q8": Codes(bytes_codes(34, 2, 0x80), 128),
    "cyb_q4": Codes(nibbles(18, 2), 8),
    "cyb_ternary": Codes(pairs((0, 1, -1, 0)), 1),
    "bitnet_ternary": Codes(pairs((-1, 0, 1, 0)), 1),
}
