"""Pack weights for the GPU: codes and scales in planes whose 16 bytes per lane lie side by side.

A lane of the contract is a lane of the warp, so a plane runs [row][quad][unit][4 words]: 32 lanes
that read a quad of 32 consecutive units read 512 consecutive bytes. Codes of a unit, by layout:

    pn3t    16 words, the file's: pair j of a word in bits 3j and 16 + 3j; scales as two halves
    nibble  4 words of 8: pair j (elements 2j, 2j + 1) in bits 4j and 16 + 4j, the topmost bit of
            each half flipped, so that the top pair is signed in place
    three   3 words: pair 5w + j of 15 in bits 3j and 16 + 3j, bit b of pair 15 in bits 15 and 31
            of word b; the fourth word is d (fp16) and two signed scales
    byte    8 words: four codes, the even ones plus 128
    e4m3    8 words: four codes as in the file
    f32, half, bf16   the numbers

A row may be packed alone, so a tensor can be packed and copied piece by piece.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pnrt.formats import FORMATS, fp8, get
from pnrt.formats.base import field
from pnrt.formats.kquant import unpack_scales

# rows of every plane are allocated in multiples of this, for kernels that take several at once
ROWS = 4
ALIGNMENT = 256


class Codec(NamedTuple):
    """How a format lies in memory.

    layout: of the codes; zero: what is subtracted from a stored code; scale: how scales are kept:
    'pn3t' two halves per unit, 'half64' a half per two units, 'half' one per unit, 'halves' scale
    and offset, 'k4' q4_K's, 'word' in the codes, 'f32' a float per group, 'f32m' also an offset,
    'cyb' also the scale that decoding divides after the product.
    """

    layout: str
    zero: int
    scale: str


_TUNED = {
    "pn3t": Codec("pn3t", 4, "pn3t"),
    "pn4t": Codec("nibble", 8, "half64"),
    "q4_0": Codec("nibble", 8, "half"),
    "q4_1": Codec("nibble", 0, "halves"),
    "q4_K": Codec("nibble", 0, "k4"),
    "q3_K": Codec("three", 4, "word"),
    "q8_0": Codec("byte", 0, "half"),
    "e4m3": Codec("e4m3", 0, "f32"),
    "mxfp8": Codec("e4m3", 0, "f32"),
    "mxfp8_264": Codec("e4m3", 0, "f32"),
    "f16": Codec("half", 0, ""),
    "bf16": Codec("bf16", 0, ""),
}
_OFFSETS = ("q2_K", "q5_1", "q5_K")
_DIVIDED = ("cyb_q8", "cyb_q4")


def _codec(name: str) -> Codec:
    if name in _TUNED:
        return _TUNED[name]
    if FORMATS[name].group == 0:
        return Codec("f32", 0, "")
    scale = "f32m" if name in _OFFSETS else "cyb" if name in _DIVIDED else "f32"
    return Codec("byte", 0, scale)


CODECS = {name: _codec(name) for name, form in FORMATS.items() if form.weight}
# words of codes per unit
WORDS = {
    "pn3t": 16, "nibble": 4, "three": 4, "byte": 8, "e4m3": 8, "f32": 32, "half": 16, "bf16": 16,
}  # fmt: skip


class Weight(NamedTuple):
    """A packed matrix.

    units: per row; row_bytes: of each plane (codes, then scales); offsets: of each plane in bytes,
    from the matrix's address; nbytes: of all planes.
    """

    format: str
    N: int
    K: int
    units: int
    row_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def groups_of(name: str) -> int:
    """Scales a unit of 32 has in the 'f32' planes."""
    return 2 if FORMATS[name].group == 16 else 1


def layout(name: str, N: int, K: int) -> Weight:
    """Sizes of a packed [N, K] matrix. Raises FormatError for a K that does not divide."""
    form, codec = get(name), CODECS[name]
    form.row_bytes(K)
    units = -(-K // form.unit)
    row_bytes = (units * WORDS[codec.layout] * 4, *_scale_bytes(name, units))
    offsets, at = [], 0
    for size in row_bytes:
        offsets.append(at)
        at = -(-(at + -(-N // ROWS) * ROWS * size) // ALIGNMENT) * ALIGNMENT
    return Weight(name, N, K, units, row_bytes, tuple(offsets), at)


def _scale_bytes(name: str, units: int) -> tuple[int, ...]:
    per_group = units * groups_of(name) * 4
    return {
        "": (), "word": (), "pn3t": (units * 4,), "half64": (-(-units // 2) * 2,),
        "half": (units * 2,), "halves": (units * 4,), "k4": (-(-units // 8) * 4, units * 2),
        "f32": (per_group,), "f32m": (per_group, per_group), "cyb": (per_group, per_group),
    }[CODECS[name].scale]  # fmt: skip


def pack_rows(name: str, rows: np.ndarray, K: int) -> tuple[np.ndarray, ...]:
    """rows [n, row bytes] uint8 of a format -> each plane [n, its row bytes] uint8."""
    codec, units = CODECS[name], layout(name, 1, K).units
    rows = np.ascontiguousarray(rows)
    planes = _PACKERS[codec.layout](name, rows, units)
    return tuple(np.ascontiguousarray(p).reshape(len(rows), -1).view(np.uint8) for p in planes)


def pack(name: str, rows: np.ndarray, K: int) -> tuple[Weight, np.ndarray]:
    """Pack a whole matrix: its layout and its bytes."""
    weight = layout(name, len(rows), K)
    data = np.zeros(weight.nbytes, np.uint8)
    for at, plane in zip(weight.offsets, pack_rows(name, rows, K), strict=True):
        data[at : at + plane.size] = plane.reshape(-1)
    return weight, data


def quads(words: np.ndarray) -> np.ndarray:
    """[n, units, words] -> [n, quad, units, 4]."""
    n, units, count = words.shape
    return words.reshape(n, units, count // 4, 4).transpose(0, 2, 1, 3)


def _padded(a: np.ndarray, width: int) -> np.ndarray:
    return np.pad(a, ((0, 0), (0, width - a.shape[1])))


def _pack_pn3t(name, rows, units):
    blocks = rows.reshape(len(rows), -1, 34)
    blocks = np.pad(blocks, ((0, 0), (0, units * 2 - blocks.shape[1]), (0, 0)))
    flat = blocks.reshape(-1, 34)
    # kernels rely on the reserved bits being zero
    words = field(flat, 2, 8, np.uint32).reshape(len(rows), units, 16) & np.uint32(0x7FFF7FFF)
    return quads(words), field(flat, 0, 1, np.uint16)


def _unsigned(name, rows, units):
    """Stored codes [n, units, 32] uint8, zeros of the format behind the last."""
    form, zero = FORMATS[name], CODECS[name].zero
    codes = form.parts(rows).codes + zero
    codes = np.pad(codes, ((0, 0), (0, units * 32 - codes.shape[1])), constant_values=zero)
    return codes.astype(np.uint8).reshape(len(rows), units, 32)


def _pack_nibble(name, rows, units):
    if name == "pn4t":
        flat = rows.reshape(-1, 34)
        words = field(flat, 2, 8, np.uint32).reshape(len(rows), units, 4)
        return quads(words ^ np.uint32(0x80008000)), field(flat, 0, 1, np.uint16)
    codes = _unsigned(name, rows, units).reshape(len(rows), units, 4, 4, 2).astype(np.uint32)
    shifts = (4 * np.arange(4)[:, None] + 16 * np.arange(2)).astype(np.uint32)
    words = np.bitwise_or.reduce(codes << shifts, axis=(3, 4)) ^ np.uint32(0x80008000)
    return quads(words), *_nibble_scales(name, rows, units)


def _nibble_scales(name, rows, units):
    flat = rows.reshape(-1, FORMATS[name].nbytes)
    if name == "q4_0":
        return (field(flat, 0, 1, np.uint16),)
    if name == "q4_1":
        return (field(flat, 0, 1, np.uint32),)
    scales, minima = unpack_scales(flat[:, 4:16])
    return field(flat, 0, 1, np.uint32), np.stack([scales, minima], axis=-1)


def _pack_three(name, rows, units):
    codes = _unsigned(name, rows, units).reshape(len(rows), units, 16, 2).astype(np.uint32)
    words = np.zeros((len(rows), units, 4), np.uint32)
    shifts = (3 * np.arange(5)[:, None] + 16 * np.arange(2)).astype(np.uint32)
    for w in range(3):
        words[..., w] = np.bitwise_or.reduce(codes[:, :, 5 * w : 5 * w + 5] << shifts, axis=(2, 3))
        top = (codes[:, :, 15] >> np.uint32(w)) & np.uint32(1)
        words[..., w] |= top[..., 0] << np.uint32(15) | top[..., 1] << np.uint32(31)
    flat = rows.reshape(-1, FORMATS[name].nbytes)
    d = field(flat, 108, 1, np.uint16).astype(np.uint32).repeat(8, axis=1)
    small = _q3_scales(flat).reshape(-1, 8, 2).view(np.uint8).astype(np.uint32)
    words[..., 3] = (d | small[..., 0] << 16 | small[..., 1] << 24).reshape(len(rows), units)
    return (words,)


def _q3_scales(flat: np.ndarray) -> np.ndarray:
    """The signed 6-bit scales of q3_K blocks: [n, 110] -> [n, 16] int8."""
    low, high = flat[:, 96:104], flat[:, 104:108]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    twos = (high[:, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    return ((nibbles | twos << 4).astype(np.int8) - np.int8(32)).astype(np.int8)


def _group_planes(name, rows, units, scale, offset):
    groups, width = groups_of(name), FORMATS[name].group
    if width > 32:
        scale = scale.repeat(width // 32, axis=1)
    wanted = units * groups
    planes = [p for p in (scale, offset) if p is not None]
    # behind the end of a row the codes are zero and any scale does
    planes = [np.pad(p, ((0, 0), (0, max(0, wanted - p.shape[1]))), mode="edge") for p in planes]
    planes = [p[:, :wanted].astype(np.float32) for p in planes]
    return planes


def _pack_byte(name, rows, units):
    codes, scale, offset = FORMATS[name].parts(rows)
    codes = _padded(codes, units * 32).astype(np.int8).view(np.uint8)
    codes[:, ::2] ^= 0x80
    words = quads(codes.view(np.uint32).reshape(len(rows), units, 8))
    if name == "q8_0":
        return words, field(rows.reshape(-1, 34), 0, 1, np.uint16)
    if CODECS[name].scale == "cyb":
        whole = field(rows.reshape(-1, FORMATS[name].nbytes), 0, 1, np.int16).astype(np.float32)
        offset = (whole / np.float32(256)).reshape(len(rows), -1)
    return words, *_group_planes(name, rows, units, scale, offset)


def _pack_e4m3(name, rows, units):
    codes, scale, offset = FORMATS[name].parts(rows)
    order = np.argsort(fp8.INTEGERS, kind="stable")
    found = np.searchsorted(fp8.INTEGERS, _padded(codes, units * 32), sorter=order)
    words = order[found].astype(np.uint8).view(np.uint32).reshape(len(rows), units, 8)
    return quads(words), *_group_planes(name, rows, units, scale, offset)


def _pack_floats(name, rows, units):
    dtype = {"f16": np.uint16, "bf16": np.uint16}.get(name, np.float32)
    values = rows.view(dtype) if name in ("f16", "bf16") else FORMATS[name].decode(rows)
    words = _padded(values, units * 32).view(np.uint32).reshape(len(rows), units, -1)
    return (quads(words),)


_PACKERS = {
    "pn3t": _pack_pn3t, "nibble": _pack_nibble, "three": _pack_three, "byte": _pack_byte,
    "e4m3": _pack_e4m3, "f32": _pack_floats, "half": _pack_floats, "bf16": _pack_floats,
}  # fmt: skip
