"""Pack weights for the CPU: lanes are rows, units lie in the order the contract walks them.

A panel is 16 rows. It holds the codes of all units in bit-reversed lane order, then the scales, one
plane per kind, indexed [group, row]. Inside a unit, each 32 codes are stored in one of three
layouts of 32-bit words (one word per row, 16 rows side by side), with code group g = codes
4g .. 4g+3 of the 32, one code per byte:

    byte    8 words: word g is group g
    nibble  4 words: word j has group 2j in the low and group 2j + 1 in the high nibbles
    three   3 words: word j has group 2j in bits 0-2 and group 2j + 1 in bits 3-5 of each byte;
            bits 6-7 are the low two bits of group 6 (word 0), of group 7 (word 1), and the high
            bits of groups 6 and 7 (word 2)

Whatever order the file keeps its codes in, here they ascend, so one quantized activation serves
every format. f32, f16 and bf16 rows are transposed: element k of 16 rows side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pnrt.cpu.simd import (
    i8_at,
    read_i64,
    read_u8,
    read_u16,
    u8_at,
    u16_at,
    write_i32,
)
from pnrt.formats import FORMATS
from pnrt.jit import Kernel, inline, kernel, run

ROWS = 16
LANES = 32
# bytes of a file that are packed at a time, and mapped at most
SLICE = 1 << 25
WORDS = {"byte": 8, "nibble": 4, "three": 3}


class Codec(NamedTuple):
    """How the CPU reads one format: its layout and the scalar readers the pack kernel is made of.

    code(row, k) and plane(row, group) take the address of a row's first byte; code gives the stored
    (not centred) code of weight k; each plane gives 16 bits of scale for a group of weights.
    """

    layout: str
    zero: int
    code: Callable
    planes: tuple[Callable, ...]


def _half_plane(nbytes: int, offset: int, flip: int = 0):
    @inline
    def plane(row, group):
        return read_u16(row + group * nbytes + offset) ^ np.uint16(flip)

    return plane


def _nibble_code(nbytes: int, offset: int):
    """Byte j of a block of 32 has element j in its low and element j + 16 in its high nibble."""

    @inline
    def code(row, k):
        byte = read_u8(row + (k >> 5) * nbytes + offset + (k & 15))
        return np.int32(byte >> np.uint8(4)) if k & 16 else np.int32(byte & np.uint8(15))

    return code


@inline
def _pn4t_code(row, k):
    word = row + (k >> 6) * 34 + 2 + ((k & 63) >> 3) * 4
    t = k & 7
    half = read_u16(word + 2 * (t & 1))
    return (np.int32(half) >> np.int32(4 * (t >> 1))) & np.int32(15)


@inline
def _pn3t_code(row, k):
    block = k // 80
    e = k - block * 80
    t = e % 10
    half = read_u16(row + block * 34 + 2 + (e // 10) * 4 + 2 * (t & 1))
    return (np.int32(half) >> np.int32(3 * (t >> 1))) & np.int32(7)


@inline
def _q8_0_code(row, k):
    return np.int32(i8_at(row + (k >> 5) * 34 + 2)[k & 31]) + np.int32(128)


CODECS = {
    "pn3t": Codec("three", 4, _pn3t_code, (_half_plane(34, 0),)),
    "pn4t": Codec("nibble", 8, _pn4t_code, (_half_plane(34, 0),)),
    "q8_0": Codec("byte", 128, _q8_0_code, (_half_plane(34, 0),)),
    "q4_0": Codec("nibble", 8, _nibble_code(18, 2), (_half_plane(18, 0),)),
    # the offset is stored negated: activation sums are kept negated too
    "q4_1": Codec(
        "nibble", 0, _nibble_code(20, 4), (_half_plane(20, 0), _half_plane(20, 2, 0x8000))
    ),
}
FLOATS = {"f32": 4, "f16": 2, "bf16": 2}


class Weight(NamedTuple):
    """A packed matrix.

    data: uint8, `panels` panels of `stride` bytes; planes: byte offset of each scale plane inside
    a panel; units: units (of 160 or 32 weights) in a row.
    """

    format: str
    N: int
    K: int
    data: np.ndarray
    panels: int
    stride: int
    units: int
    planes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@inline
def lane_of(i):
    """Lane walked at step i: the five bits of i reversed."""
    return ((i & 1) << 4) | ((i & 2) << 2) | (i & 4) | ((i & 8) >> 2) | ((i & 16) >> 4)


def _byte_words(c, out, at):
    for g in range(8):
        c4 = 4 * g
        word = c[c4] | (c[c4 + 1] << 8) | (c[c4 + 2] << 16) | (c[c4 + 3] << 24)
        write_i32(out + at + g * 64, np.int32(word))


def _nibble_words(c, out, at):
    for j in range(4):
        word = np.int64(0)
        for b in range(4):
            word |= (c[8 * j + b] | (c[8 * j + 4 + b] << 4)) << (8 * b)
        write_i32(out + at + j * 64, np.int32(word))


def _three_words(c, out, at):
    for j in range(3):
        word = np.int64(0)
        for b in range(4):
            byte = c[8 * j + b] | (c[8 * j + 4 + b] << 3)
            if j < 2:
                byte |= (c[24 + 4 * j + b] & 3) << 6
            else:
                byte |= ((c[24 + b] >> 2) << 6) | ((c[28 + b] >> 2) << 7)
            word |= byte << (8 * b)
        write_i32(out + at + j * 64, np.int32(word))


_WRITERS = {"byte": _byte_words, "nibble": _nibble_words, "three": _three_words}


def _pack_kernel(name: str) -> Kernel:
    codec, form = CODECS[name], FORMATS[name]
    zero, code, group = codec.zero, codec.code, form.group
    write, words = inline(_WRITERS[codec.layout]), WORDS[codec.layout]
    blocks = form.unit // 32
    first, second = codec.planes[0], codec.planes[-1]
    two = len(codec.planes) == 2

    def pack(a, thread, threads):
        rows, row_bytes, N, K = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        data, stride, units = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
        plane0, plane1, panels = read_i64(a + 56), read_i64(a + 64), read_i64(a + 72)
        c = np.empty(32, np.int64)
        for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
            out = data + panel * stride
            for i in range(LANES):
                for u in range(lane_of(i), units, LANES):
                    for block in range(blocks):
                        start = (u * blocks + block) * 32
                        for r in range(ROWS):
                            row = panel * ROWS + r
                            inside = min(32, K - start) if row < N else 0
                            for k in range(32):
                                c[k] = zero
                            for k in range(inside):
                                c[k] = code(rows + row * row_bytes, start + k)
                            write(c, out, r * 4)
                        out += words * 64
            scales0 = u16_at(data + panel * stride + plane0)
            scales1 = u16_at(data + panel * stride + plane1)
            for g in range((K + group - 1) // group):
                for r in range(ROWS):
                    row = panel * ROWS + r
                    at = rows + row * row_bytes
                    scales0[g * ROWS + r] = first(at, g) if row < N else np.uint16(0)
                    if two:
                        scales1[g * ROWS + r] = second(at, g) if row < N else np.uint16(0)

    return kernel(pack, name=f"pack_{name}")


def _transpose_kernel(size: int) -> Kernel:
    def pack(a, thread, threads):
        rows, row_bytes, N, K = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        data, stride, units = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
        panels = read_i64(a + 72)
        for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
            out = data + panel * stride
            for i in range(LANES):
                for u in range(lane_of(i), units, LANES):
                    for r in range(ROWS):
                        row = panel * ROWS + r
                        source = u8_at(rows + row * row_bytes)
                        target = u8_at(out)
                        inside = min(32, K - 32 * u) if row < N else 0
                        for k in range(inside):
                            for byte in range(size):
                                target[(k * ROWS + r) * size + byte] = source[
                                    (32 * u + k) * size + byte
                                ]
                    out += 32 * ROWS * size

    return kernel(pack, name=f"pack_float{size}")


_kernels: dict[str, Kernel] = {}


def pack_kernel(name: str) -> Kernel:
    """The kernel that packs a format."""
    if name not in _kernels:
        make = _transpose_kernel(FLOATS[name]) if name in FLOATS else _pack_kernel(name)
        _kernels[name] = make
    return _kernels[name]


def layout(name: str, N: int, K: int) -> Weight:
    """Sizes of a packed [N, K] matrix; its data is still empty."""
    form = FORMATS[name]
    unit = form.unit if name in CODECS else 32
    units, panels = -(-K // unit), -(-N // ROWS)
    if name in FLOATS:
        stride, planes = units * 32 * ROWS * FLOATS[name], ()
    else:
        codec = CODECS[name]
        # scales are read for whole units: a last, partial unit finds zeros behind its groups
        groups = -(-units * unit // form.group)
        codes, plane = units * (unit // 32) * WORDS[codec.layout] * 64, groups * ROWS * 2
        planes = tuple(codes + plane * i for i in range(len(codec.planes)))
        stride = codes + plane * len(planes)
    stride = -(-stride // 64) * 64
    return Weight(name, N, K, np.empty(0, np.uint8), panels, stride, units, planes)


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed uint8 memory whose first byte is aligned."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + nbytes]


def pack(
    name: str,
    rows: np.ndarray,
    K: int,
    threads: int,
    before: Callable[[int, int], None] | None = None,
) -> Weight:
    """Pack rows of a format.

    Args:
        rows: [N, row_bytes] uint8 - the file's bytes.
        K: weights per row.
        before: told (first, last) before these rows are read; each row once, in order.
    Returns: Weight with 64-byte aligned data.
    """
    weight = layout(name, len(rows), K)
    data = aligned(weight.panels * weight.stride)
    planes = (*weight.planes, 0, 0)[:2]
    step = max(1, SLICE // (ROWS * rows.shape[1])) * ROWS
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        if before:
            before(first, first + len(part))
        part, out = np.ascontiguousarray(part), data[first // ROWS * weight.stride :]
        run(
            pack_kernel(name), part, rows.shape[1], len(part), K, out, weight.stride,
            weight.units, *planes, -(-len(part) // ROWS), threads=threads,
        )  # fmt: skip
    return weight._replace(data=data)
