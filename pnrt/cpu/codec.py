"""How the CPU holds each format: the one table (CODECS) that packing and multiplying read.

Whatever order the file keeps its codes in, here they ascend, so one quantized activation serves
every format. Scales lie in planes behind the codes, indexed [group, row].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pnrt import rows
from pnrt.cpu.dots import lookup
from pnrt.cpu.layout import GROUPS
from pnrt.formats import FORMATS
from pnrt.jit import inline
from pnrt.simd import (
    and_,
    bits,
    bits_f32,
    div,
    larger_i,
    load_half,
    load_i8,
    load_i16,
    load_u8,
    mul,
    or_,
    read_u16,
    set_f32,
    shift_left,
    sub,
    sub_i,
    to_f32,
)

ROWS = 16
# formats without scales, by bytes per weight; fixed-point rows are decoded before they are packed
FLOATS = {"f32": 4, "f16": 2, "bf16": 2, "cyb_u32": 4, "cyb_u16": 4}


class Plane(NamedTuple):
    """Scales of one kind: bytes of each, weights it covers, read(row address, index) -> int."""

    size: int
    per: int
    read: Callable


class Scales(NamedTuple):
    """Where weight scales come from.

    at(p0, p1, p2, p3, k) -> (dw, -m): the scale and the negated offset of weight k for 16 rows,
    float32, from the addresses of the planes. m is meaningless without an offset.
    """

    planes: tuple[Plane, ...]
    at: Callable
    offset: bool = False


class Codec(NamedTuple):
    """How the CPU reads one format.

    codes(row, u, n, c): the first n codes of unit u of the row at an address, to the bytes at c.
    zero: what a stored code of weight zero is. table: codebook, in place of code - zero.
    value(v, dw, -m) -> float32 weight of byte codes v in 32-bit lanes, as FORMATS decodes it,
    with the scales that stored(p0, p1, p2, p3, k) gives. fp8: codes are 8-bit floats.
    """

    layout: str
    zero: int
    codes: Callable
    scales: Scales
    value: Callable
    stored: Callable
    table: tuple[int, ...] = ()
    fp8: bool = False


def groups_of(codec: Codec) -> tuple[Callable, int]:
    """groups(address) -> 8 vectors of unsigned bytes, and the byte that stands for zero."""
    groups = GROUPS[codec.layout]
    if not codec.table:
        return groups, codec.zero
    find = lookup(tuple(value + 128 for value in codec.table))

    @inline
    def values(w):
        g = groups(w)
        return (
            find(g[0]), find(g[1]), find(g[2]), find(g[3]),
            find(g[4]), find(g[5]), find(g[6]), find(g[7]),
        )  # fmt: skip

    return values, 128


def _half(nbytes: int, offset: int, per: int, flip: int = 0) -> Plane:
    @inline
    def read(row, index):
        return np.int64(read_u16(row + index * nbytes + offset) ^ np.uint16(flip))

    return Plane(2, per, read)


def _halves(per: int, nbytes: int, offset: int, minimum: int | None = None) -> Scales:
    """A half per block, and perhaps a half that is added."""
    first = _half(nbytes, offset, per)
    if minimum is None:

        @inline
        def at(p0, p1, p2, p3, k):
            dw = load_half(p0 + k // per * 32)
            return dw, dw

        return Scales((first,), at)

    @inline
    def both(p0, p1, p2, p3, k):
        return load_half(p0 + k // per * 32), load_half(p1 + k // per * 32)

    # the sums of activations are kept negated: so is what multiplies them
    return Scales((first, _half(nbytes, minimum, per, 0x8000)), both, offset=True)


def _small(per: int, read: Callable, d: Plane, minimum: Callable | None = None, dmin=None):
    """A half per superblock times a small integer per group: d * s, and perhaps dmin * n."""

    @inline
    def factor(small, half, k):
        return mul(load_half(half + (k >> 8) * 32), to_f32(load_i8(small + k // per * 16)))

    if minimum is None:

        @inline
        def at(p0, p1, p2, p3, k):
            dw = factor(p0, p1, k)
            return dw, dw

        return Scales((Plane(1, per, read), d), at)

    @inline
    def both(p0, p1, p2, p3, k):
        return factor(p0, p1, k), factor(p2, p3, k)

    planes = (Plane(1, per, read), d, Plane(1, per, minimum), dmin)
    return Scales(planes, both, offset=True)


def _power(read: Callable, factor: float) -> Scales:
    """2^(e - 127) * factor from a byte e per 32 weights."""
    up, tiny = shift_left(23), bits(0x00400000)

    @inline
    def at(p0, p1, p2, p3, k):
        # e = 0 is 2^-127, a subnormal: the smallest of these bit patterns
        e = larger_i(up(load_u8(p0 + (k >> 5) * 16)), tiny())
        dw = mul(bits_f32(e), set_f32(np.float32(factor)))
        return dw, dw

    return Scales((Plane(1, 32, read),), at)


def _fixed(nbytes: int, full: int) -> tuple[Scales, Callable]:
    """S / 256 / full from 16 bits; decoding multiplies by S / 256 first and then divides."""

    @inline
    def read(row, index):
        return np.int64(read_u16(row + index * nbytes))

    @inline
    def at(p0, p1, p2, p3, k):
        dw = div(to_f32(load_i16(p0 + (k >> 5) * 32)), set_f32(np.float32(256 * full)))
        return dw, dw

    @inline
    def stored(p0, p1, p2, p3, k):
        dw = mul(to_f32(load_i16(p0 + (k >> 5) * 32)), set_f32(np.float32(1 / 256)))
        return dw, dw

    return Scales((Plane(2, 32, read),), at), stored


@inline
def _one(p0, p1, p2, p3, k):
    dw = set_f32(np.float32(1.0))
    return dw, dw


def _plain(zero: int, offset: bool) -> Callable:
    centre = bits(zero)

    @inline
    def value(v, dw, m):
        code = to_f32(sub_i(v, centre()))
        if offset:
            return sub(mul(code, dw), m)
        return mul(code, dw)

    return value


@inline
def _fp8_value(v, dw, m):
    # the exponent moved into a float's place gives 2^-120 of the value, subnormals included
    sign = _left24(and_(v, _top_bit()))
    magnitude = _left20(and_(v, _low7()))
    return mul(mul(bits_f32(or_(sign, magnitude)), set_f32(np.float32(2.0**120))), dw)


_left20, _left24, _low7, _top_bit = shift_left(20), shift_left(24), bits(0x7F), bits(0x80)


def _codec(name: str, layout: str, scales: Scales, more: dict | None = None) -> Codec:
    read, zero, table = rows.CODES[name]
    value = _plain(128 if table else zero, scales.offset)
    found = Codec(layout, zero, read, scales, value, scales.at, table)
    return found._replace(**(more or {}))


def _k(nbytes, offset, per, read, minimum=None, second=0) -> Scales:
    d, dmin = _half(nbytes, offset, 256), _half(nbytes, second, 256)
    return _small(per, read, d, minimum, dmin)


def _make() -> dict[str, Codec]:
    e4m3 = _halves(32, 34, 0)

    @inline
    def e4m3_at(p0, p1, p2, p3, k):
        dw = mul(load_half(p0 + (k >> 5) * 32), set_f32(np.float32(2.0**-9)))
        return dw, dw

    eights, eights_stored = _fixed(34, 127)
    fours, fours_stored = _fixed(18, 8)

    @inline
    def over_127(v, dw, m):
        return div(mul(to_f32(sub_i(v, _bias())), dw), set_f32(np.float32(127.0)))

    @inline
    def over_8(v, dw, m):
        return mul(mul(to_f32(sub_i(v, _eight())), dw), set_f32(np.float32(0.125)))

    fp8 = {"value": _fp8_value, "fp8": True}
    table = {
        "pn3t": ("three", _halves(80, 34, 0)),
        "pn4t": ("nibble", _halves(64, 34, 0)),
        "q8_0": ("byte", _halves(32, 34, 0)),
        "q4_0": ("nibble", _halves(32, 18, 0)),
        "q4_1": ("nibble", _halves(32, 20, 0, 2)),
        "q5_0": ("five", _halves(32, 22, 0)),
        "q5_1": ("five", _halves(32, 24, 0, 2)),
        "q2_K": ("two", _k(84, 80, 16, rows.q2_k_scale, rows.q2_k_minimum, 82)),
        "q3_K": ("three", _k(110, 108, 16, rows.q3_k_scale)),
        "q4_K": (
            "nibble", _k(144, 0, 32, rows.six_bits(144, False), rows.six_bits(144, True), 2)
        ),
        "q5_K": ("five", _k(176, 0, 32, rows.six_bits(176, False), rows.six_bits(176, True), 2)),
        "q6_K": ("six", _k(210, 208, 16, rows.q6_k_scale)),
        "iq4_nl": ("nibble", _halves(32, 18, 0)),
        "iq4_xs": ("nibble", _k(136, 0, 32, rows.iq4_xs_scale)),
        "tq1_0": ("two", _halves(256, 54, 52)),
        "tq2_0": ("two", _halves(256, 66, 64)),
        "mxfp4": ("nibble", _power(rows.mxfp4_scale, 0.5)),
        "nvfp4": ("nibble", Scales((Plane(2, 16, rows.nvfp4_scale),), _halves(16, 0, 0).at)),
        "e4m3": ("byte", e4m3._replace(at=e4m3_at), {"stored": e4m3.at, **fp8}),
        "mxfp8": (
            "byte", _power(rows.mxfp8_scale, 2.0**-9),
            {"stored": _power(rows.mxfp8_scale, 1.0).at, **fp8},
        ),
        "mxfp8_264": (
            "byte", _power(rows.mxfp8_264_scale, 2.0**-9),
            {"stored": _power(rows.mxfp8_264_scale, 1.0).at, **fp8},
        ),
        "cyb_q8": ("byte", eights, {"value": over_127, "stored": eights_stored}),
        "cyb_q4": ("nibble", fours, {"value": over_8, "stored": fours_stored}),
        "cyb_ternary": ("two", Scales((), _one)),
        "bitnet_ternary": ("two", Scales((), _one)),
    }  # fmt: skip
    return {name: _codec(name, *entry) for name, entry in table.items()}


_bias, _eight = bits(128), bits(8)
CODECS = _make()
# a scale covers this many weights inside a unit; 80 stands for the six segments of pn3t
SPLITS = {name: FORMATS[name].group if FORMATS[name].group in (16, 80) else 32 for name in CODECS}
