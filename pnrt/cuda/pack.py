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

A row may be packed alone, so a tensor can be packed and copied piece by piece. packers.py does it.
"""

from __future__ import annotations

from typing import NamedTuple

from pnrt.formats import FORMATS, get

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
