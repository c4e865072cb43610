"""How 32 codes of a row lie in words: read as vectors of bytes, written by the pack.

Packed codes of 32 weights lie in words of 32 bits (one word per row, 16 rows side by side), with
code group g = codes 4g .. 4g+3 of the 32, one code per byte:

    byte    8 words: word g is group g
    nibble  4 words: word j has group 2j in the low and group 2j + 1 in the high nibbles
    two     2 words: bits 2i, 2i + 1 of each byte of word j are group 4j + i
    three   3 words: word j has group 2j in bits 0-2 and group 2j + 1 in bits 3-5 of each byte;
            bits 6-7 are the low two bits of group 6 (word 0), of group 7 (word 1), and the high
            bits of groups 6 and 7 (word 2)
    five    the nibble words, then 1 word: bit g of each byte is the fifth bit of group g
    six     the nibble words, then the two words of `two` with the upper bits
"""

from __future__ import annotations

import numpy as np

from pnrt.jit import inline
from pnrt.simd import and_, bits, load_i32, or_, shift_left, shift_right

WORDS = {"byte": 8, "nibble": 4, "two": 2, "three": 3, "five": 5, "six": 6}

# code groups of a layout, as vectors of bytes

_low3, _low4, _two_bits = bits(0x07070707), bits(0x0F0F0F0F), bits(0x03030303)
_bit2, _bit4, _bits45 = bits(0x04040404), bits(0x10101010), bits(0x30303030)
_right1, _right2, _right3, _right4, _right5, _right6 = (shift_right(n) for n in range(1, 7))
_left1, _left2, _left3, _left4 = (shift_left(n) for n in range(1, 5))


@inline
def _byte_groups(w):
    return (
        load_i32(w),
        load_i32(w + 64),
        load_i32(w + 128),
        load_i32(w + 192),
        load_i32(w + 256),
        load_i32(w + 320),
        load_i32(w + 384),
        load_i32(w + 448),
    )


@inline
def _nibble_groups(w):
    a, b, c, d = load_i32(w), load_i32(w + 64), load_i32(w + 128), load_i32(w + 192)
    return (
        and_(a, _low4()),
        and_(_right4(a), _low4()),
        and_(b, _low4()),
        and_(_right4(b), _low4()),
        and_(c, _low4()),
        and_(_right4(c), _low4()),
        and_(d, _low4()),
        and_(_right4(d), _low4()),
    )


@inline
def _two_groups(w):
    a, b = load_i32(w), load_i32(w + 64)
    return (
        and_(a, _two_bits()),
        and_(_right2(a), _two_bits()),
        and_(_right4(a), _two_bits()),
        and_(_right6(a), _two_bits()),
        and_(b, _two_bits()),
        and_(_right2(b), _two_bits()),
        and_(_right4(b), _two_bits()),
        and_(_right6(b), _two_bits()),
    )


@inline
def _three_groups(w):
    a, b, c = load_i32(w), load_i32(w + 64), load_i32(w + 128)
    return (
        and_(a, _low3()),
        and_(_right3(a), _low3()),
        and_(b, _low3()),
        and_(_right3(b), _low3()),
        and_(c, _low3()),
        and_(_right3(c), _low3()),
        or_(and_(_right6(a), _two_bits()), and_(_right4(c), _bit2())),
        or_(and_(_right6(b), _two_bits()), and_(_right5(c), _bit2())),
    )


@inline
def _five_groups(w):
    n, h = _nibble_groups(w), load_i32(w + 256)
    return (
        or_(n[0], and_(_left4(h), _bit4())),
        or_(n[1], and_(_left3(h), _bit4())),
        or_(n[2], and_(_left2(h), _bit4())),
        or_(n[3], and_(_left1(h), _bit4())),
        or_(n[4], and_(h, _bit4())),
        or_(n[5], and_(_right1(h), _bit4())),
        or_(n[6], and_(_right2(h), _bit4())),
        or_(n[7], and_(_right3(h), _bit4())),
    )


@inline
def _six_groups(w):
    n, a, b = _nibble_groups(w), load_i32(w + 256), load_i32(w + 320)
    return (
        or_(n[0], and_(_left4(a), _bits45())),
        or_(n[1], and_(_left2(a), _bits45())),
        or_(n[2], and_(a, _bits45())),
        or_(n[3], and_(_right2(a), _bits45())),
        or_(n[4], and_(_left4(b), _bits45())),
        or_(n[5], and_(_left2(b), _bits45())),
        or_(n[6], and_(b, _bits45())),
        or_(n[7], and_(_right2(b), _bits45())),
    )


GROUPS = {
    "byte": _byte_groups,
    "nibble": _nibble_groups,
    "two": _two_groups,
    "three": _three_groups,
    "five": _five_groups,
    "six": _six_groups,
}


# writers: 32 codes as 8 words of 4 bytes -> the words of one row, 64 bytes apart


@inline
def _write_nibbles(c, out):
    for j in range(4):
        out[16 * j] = c[2 * j] | (c[2 * j + 1] << np.uint32(4))


@inline
def _write_twos(c, shift, out):
    for j in range(2):
        word = np.uint32(0)
        for i in range(4):
            part = (c[4 * j + i] >> np.uint32(shift)) & np.uint32(0x03030303)
            word |= part << np.uint32(2 * i)
        out[16 * j] = word


@inline
def _write_byte(c, out, high):
    for j in range(8):
        out[16 * j] = c[j]


@inline
def _write_nibble(c, out, high):
    _write_nibbles(c, out)


@inline
def _write_two(c, out, high):
    _write_twos(c, 0, out)


@inline
def _write_three(c, out, high):
    for j in range(3):
        word = c[2 * j] | (c[2 * j + 1] << np.uint32(3))
        if j < 2:
            word |= (c[6 + j] & np.uint32(0x03030303)) << np.uint32(6)
        else:
            word |= (c[6] & np.uint32(0x04040404)) << np.uint32(4)
            word |= (c[7] & np.uint32(0x04040404)) << np.uint32(5)
        out[16 * j] = word


@inline
def _write_five(c, out, high):
    word = np.uint32(0)
    for j in range(8):
        word |= ((c[j] >> np.uint32(4)) & np.uint32(0x01010101)) << np.uint32(j)
    high[0] = word
    for j in range(4):
        low = np.uint32(0x0F0F0F0F)
        out[16 * j] = (c[2 * j] & low) | ((c[2 * j + 1] & low) << np.uint32(4))


@inline
def _write_six(c, out, high):
    _write_twos(c, 4, high)
    for j in range(4):
        low = np.uint32(0x0F0F0F0F)
        out[16 * j] = (c[2 * j] & low) | ((c[2 * j + 1] & low) << np.uint32(4))


WRITERS = {
    "byte": _write_byte,
    "nibble": _write_nibble,
    "two": _write_two,
    "three": _write_three,
    "five": _write_five,
    "six": _write_six,
}
