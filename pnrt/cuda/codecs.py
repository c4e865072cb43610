"""How a lane takes 32 packed weights (pack.py) apart: words, codes, scales.

A reader is made for one format and row width. A unit is `blocks` times 32 weights: block b of it (a
u32) is two halves of 8 pairs of codes, and the functions below are @device functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pnrt.cuda.kernel import device, registers, unroll
from pnrt.cuda.lanes import (
    at,
    bits_to_float,
    bytes_high,
    bytes_low,
    f32,
    fetch_f32,
    fetch_half,
    fetch_u16,
    fetch_u32,
    fetch_u32x4,
    half_to_float,
    i32,
    select,
    u32,
    u64,
)
from pnrt.cuda.pack import CODECS, WORDS, groups_of, layout
from pnrt.formats import FORMATS


class Reader(NamedTuple):
    """The @device functions of one format.

    words(codes, row, u, b, q): fill registers q with a block's words.
    pair(q, i): stored codes 2i and 2i + 1 as signed halves of a u32; None where they do not fit.
    code(q, k): stored code k as i32 (or the number itself, f32).
    scales(scales, more, q, row, u, b, s): fill registers s: the scales of both halves, then their
        offsets. None where weights have no scale.
    zero: what a stored code counts as 0. offset: whether there are offsets.
    split: which blocks have two scales: 'none', 'all', or 'middle' (block 2 of 5).
    divisor: what a decoded code times s[2] is divided by, or 0.
    """

    words: Callable
    pair: Callable | None
    code: Callable
    scales: Callable | None
    zero: int
    offset: bool
    blocks: int
    split: str
    divisor: float


def reader(name: str, K: int) -> Reader:
    """The reader of a format for rows of K weights."""
    codec, form, weight = CODECS[name], FORMATS[name], layout(name, 1, K)
    if codec.layout == "pn3t":
        words = _pn3t_words(weight.units)
    else:
        words = _words(weight.units, WORDS[codec.layout] // 4)
    pair = _PAIRS.get(codec.layout)
    code = _CODES.get(codec.layout) or _signed_half(pair)
    scales = _SCALES[codec.scale](name, weight) if codec.scale else None
    offset = codec.scale in ("halves", "k4", "f32m")
    split = {80: "middle", 16: "all"}.get(form.group, "none")
    divisor = float(form.full) if codec.scale == "cyb" else 0.0
    return Reader(words, pair, code, scales, codec.zero, offset, form.unit // 32, split, divisor)


def _words(units, count):
    @device
    def words(codes, row, u, b, q):
        p = at(codes + u64(row) * (units * count * 16), u, 16)
        for c in unroll(count):
            q[4 * c], q[4 * c + 1], q[4 * c + 2], q[4 * c + 3] = fetch_u32x4(p + c * units * 16)

    return words


def _pn3t_words(units):
    @device
    def words(codes, row, u, b, q):
        """Block b starts with pair b of word 3b: shift its 16 pairs to the start of four words."""
        p = at(codes + u64(row) * (units * 64), u, 16)
        raw = registers()
        for i in unroll(4):
            word = b * 3 + i
            raw[i] = fetch_u32(at(p, word // 4 * (units * 4) + word % 4, 4))
        shift = b * 3
        kept = (u32(0x7FFF) >> shift) * 0x00010001
        for i in unroll(3):
            q[i] = (raw[i] >> shift) & kept | (raw[i + 1] << 15 - shift) & (kept ^ 0x7FFF7FFF)
        q[3] = raw[3] >> shift

    return words


@device
def _pn3t_pair(q, i):
    return (q[i // 5] >> i % 5 * 3) & 0x00070007


@device
def _nibble_pair(q, i):
    v = (q[i // 4] >> i % 4 * 4) & 0x000F000F
    return v ^ 0x00080008 if i % 4 == 3 else v


@device
def _three_pair(q, i):
    if i < 15:
        v = (q[i // 5] >> i % 5 * 3) & 0x00070007
    else:
        v = (q[0] >> 15) & 0x00010001 | (q[1] >> 14) & 0x00020002 | (q[2] >> 13) & 0x00040004
    return v


@device
def _byte_pair(q, i):
    v = q[i // 2] ^ 0x00800080
    return bytes_low(v) if i % 2 == 0 else bytes_high(v)


@device
def _e4m3_code(q, k):
    """512 times the value: (8 + m) << (e - 1), and m where e is 0."""
    byte = q[k // 4] >> k % 4 * 8
    e, m = i32((byte >> 3) & 15), i32(byte & 7)
    size = select(e == 0, m, (m + 8) << max(e - 1, 0))
    return select((byte & 0x80) != 0, -size, size)


@device
def _f32_value(q, k):
    return bits_to_float(q[k])


@device
def _half_value(q, k):
    return half_to_float(q[k // 2] >> 16 * (k % 2))


@device
def _bf16_value(q, k):
    return bits_to_float(q[k // 2] << 16 if k % 2 == 0 else q[k // 2] & 0xFFFF0000)


def _signed_half(pair):
    @device
    def code(q, k):
        v = pair(q, k // 2)
        return i32(v << 16) >> 16 if k % 2 == 0 else i32(v) >> 16

    return code


_PAIRS = {
    "pn3t": _pn3t_pair, "nibble": _nibble_pair, "three": _three_pair, "byte": _byte_pair,
}  # fmt: skip
_CODES = {"e4m3": _e4m3_code, "f32": _f32_value, "half": _half_value, "bf16": _bf16_value}


# scales: s[0], s[1] are those of the halves, s[2], s[3] their offsets


def _pn3t_scales(name, weight):
    @device
    def scales(plane, more, q, row, u, b, s):
        both = fetch_u32(at(plane + u64(row) * (weight.units * 4), u, 4))
        low, high = half_to_float(both), half_to_float(both >> 16)
        s[0], s[1] = low if b < 3 else high, low if b < 2 else high

    return scales


def _half_scales(name, weight):
    shift = 1 if CODECS[name].scale == "half64" else 0

    @device
    def scales(plane, more, q, row, u, b, s):
        s[0] = fetch_half(at(plane + u64(row) * weight.row_bytes[1], u >> shift, 2))
        s[1] = s[0]

    return scales


def _halves_scales(name, weight):
    @device
    def scales(plane, more, q, row, u, b, s):
        both = fetch_u32(at(plane + u64(row) * (weight.units * 4), u, 4))
        s[0], s[2] = half_to_float(both), half_to_float(both >> 16)
        s[1], s[3] = s[0], s[2]

    return scales


def _k4_scales(name, weight):
    @device
    def scales(plane, more, q, row, u, b, s):
        both = fetch_u32(at(plane + u64(row) * weight.row_bytes[1], u >> 3, 4))
        small = fetch_u16(at(more + u64(row) * weight.row_bytes[2], u, 2))
        s[0] = half_to_float(both) * f32(small & 0xFF)
        s[2] = -(half_to_float(both >> 16) * f32(small >> 8))
        s[1], s[3] = s[0], s[2]

    return scales


def _word_scales(name, weight):
    @device
    def scales(plane, more, q, row, u, b, s):
        d = half_to_float(q[3])
        s[0], s[1] = d * f32(i32(q[3] << 8) >> 24), d * f32(i32(q[3]) >> 24)

    return scales


def _f32_scales(name, weight):
    groups, offsets = groups_of(name), CODECS[name].scale != "f32"

    @device
    def scales(plane, more, q, row, u, b, s):
        p = u64(row) * weight.row_bytes[1] + u * (groups * 4)
        s[0], s[1] = fetch_f32(plane + p), fetch_f32(plane + p + (groups - 1) * 4)
        if offsets:
            s[2], s[3] = fetch_f32(more + p), fetch_f32(more + p + (groups - 1) * 4)

    return scales


_SCALES = {
    "pn3t": _pn3t_scales, "half64": _half_scales, "half": _half_scales, "halves": _halves_scales,
    "k4": _k4_scales, "word": _word_scales, "f32": _f32_scales, "f32m": _f32_scales,
    "cyb": _f32_scales,
}  # fmt: skip
