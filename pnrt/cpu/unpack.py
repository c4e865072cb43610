"""A packed panel taken apart once for many tokens: into signed bytes, or into float32 weights.

A *record* holds one block of 32 weights of 16 rows: int8 codes in groups of four [8, 16, 4] (for
8-bit floats three such planes: digits of base 128 that carry the sign), then the float32 scales
[segments, 16] and, where the format has them, the negated offsets. Records follow each other in
the contract's order, whatever the format was, so one product serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pnrt.cpu.codec import CODECS, ROWS, SPLITS, groups_of
from pnrt.cpu.dots import add_bytes, dot_tier
from pnrt.cpu.layout import WORDS
from pnrt.cpu.walk import LANES
from pnrt.jit import Kernel, inline, kernel
from pnrt.simd import (
    and_,
    bits,
    bits_f32,
    load_i32,
    mul,
    or_,
    read_i64,
    set_f32,
    shift_left,
    shift_right,
    store_f32,
    store_i32,
    sub_i,
    truncate,
    xor,
)


class Record(NamedTuple):
    """What a block looks like: split 16, 32 or 80 weights per scale, offset, digit planes."""

    split: int
    offset: bool
    planes: int

    @property
    def segments(self) -> int:
        """Scales per block."""
        return 1 if self.split == 32 else 2

    @property
    def nbytes(self) -> int:
        return self.planes * 512 + self.segments * 64 * (1 + self.offset)

    @property
    def blocks(self) -> int:
        """Blocks per unit."""
        return 5 if self.split == 80 else 1

    @property
    def name(self) -> str:
        return f"{self.split}{'m' * self.offset}{'w' * (self.planes > 1)}"


def record_of(name: str) -> Record:
    """The record of a format."""
    codec = CODECS[name]
    return Record(SPLITS[name], codec.scales.offset, 3 if codec.fp8 else 1)


_low7, _left20, _byte, _none = bits(0x7F), shift_left(20), bits(255), bits(0)
_right7, _right14 = shift_right(7), shift_right(14)
_left8, _left16, _left24 = (shift_left(n) for n in (8, 16, 24))
_by8, _by16, _by24 = (shift_right(n) for n in (8, 16, 24))


@inline
def _digits(v):
    """An 8-bit float per lane -> 512 * value as three digits to base 128, signed bytes."""
    # the exponent moved into a float's place gives 2^-120 of the value, subnormals included
    value = bits_f32(_left20(and_(v, _low7())))
    n = truncate(mul(mul(value, set_f32(np.float32(2.0**120))), set_f32(np.float32(512.0))))
    sign = sub_i(_none(), _right7(v))
    low, middle, high = and_(n, _low7()), and_(_right7(n), _low7()), _right14(n)
    return _signed(low, sign), _signed(middle, sign), _signed(high, sign)


@inline
def _signed(digit, sign):
    return and_(sub_i(xor(digit, sign), sign), _byte())


@inline
def _four(a, b, c, d):
    return or_(or_(a, _left8(b)), or_(_left16(c), _left24(d)))


@inline
def _lanes(v):
    return and_(v, _byte()), and_(_by8(v), _byte()), and_(_by16(v), _byte()), _by24(v)


@inline
def _store_digits(v, out):
    a, b, c, d = _lanes(v)
    a, b, c, d = _digits(a), _digits(b), _digits(c), _digits(d)
    store_i32(out, _four(a[0], b[0], c[0], d[0]))
    store_i32(out + 512, _four(a[1], b[1], c[1], d[1]))
    store_i32(out + 1024, _four(a[2], b[2], c[2], d[2]))


def store_codes(name: str) -> Callable:
    """store(w, out): a packed block at w as the code planes of a record."""
    codec = CODECS[name]
    groups, zero = groups_of(codec)
    # the product of unsigned and signed bytes takes codes above zero
    bias = 128 if dot_tier() == "vnni" else 0
    shift = add_bytes((bias - zero) % 256)

    @inline
    def one(v, out):
        store_i32(out, shift(v))

    @inline
    def wide(v, out):
        _store_digits(v, out)
        for plane in range(3):
            at = out + plane * 512
            store_i32(at, biased(load_i32(at)))

    biased = add_bytes(bias)
    each = wide if codec.fp8 else one

    @inline
    def store(w, out):
        g = groups(w)
        each(g[0], out)
        each(g[1], out + 64)
        each(g[2], out + 128)
        each(g[3], out + 192)
        each(g[4], out + 256)
        each(g[5], out + 320)
        each(g[6], out + 384)
        each(g[7], out + 448)

    return store


def _codes_kernel(name: str) -> Kernel:
    record, codec = record_of(name), CODECS[name]
    store, at = store_codes(name), codec.scales.at
    blocks, segments, offset = record.blocks, record.segments, record.offset
    size, nbytes, planes = WORDS[codec.layout] * 64, record.nbytes, record.planes * 512
    second = 16 if segments == 2 else 0

    def unpack(a, panel, out):
        w = read_i64(a) + panel * read_i64(a + 8)
        units, steps, lanes = read_i64(a + 16), read_i64(a + 24), read_i64(a + 32)
        p0, p1 = w + read_i64(a + 40), w + read_i64(a + 48)
        p2, p3 = w + read_i64(a + 56), w + read_i64(a + 64)
        for i in range(lanes):
            for u in range(read_i64(steps + 16 * i), units, LANES):
                for block in range(blocks):
                    store(w, out)
                    k = (u * blocks + block) * 32
                    for segment in range(segments):
                        dw, m = at(p0, p1, p2, p3, k + segment * second)
                        store_f32(out + planes + segment * 64, dw)
                        if offset:
                            store_f32(out + planes + (segments + segment) * 64, m)
                    w += size
                    out += nbytes

    return kernel(unpack, name=f"unpack_{name}_{dot_tier()}")


def _weights_kernel(name: str) -> Kernel:
    """A panel as float32 [k, 16 rows]; elements in the contract's order, whole units."""
    codec, blocks = CODECS[name], record_of(name).blocks
    groups, _ = groups_of(codec)
    value, at, size = codec.value, codec.stored, WORDS[codec.layout] * 64

    @inline
    def four(v, dw, m, out):
        a, b, c, d = _lanes(v)
        store_f32(out, value(a, dw, m))
        store_f32(out + 64, value(b, dw, m))
        store_f32(out + 128, value(c, dw, m))
        store_f32(out + 192, value(d, dw, m))

    def unpack(a, panel, out):
        w = read_i64(a) + panel * read_i64(a + 8)
        units, steps, lanes = read_i64(a + 16), read_i64(a + 24), read_i64(a + 32)
        p0, p1 = w + read_i64(a + 40), w + read_i64(a + 48)
        p2, p3 = w + read_i64(a + 56), w + read_i64(a + 64)
        for i in range(lanes):
            for u in range(read_i64(steps + 16 * i), units, LANES):
                for block in range(blocks):
                    g, k = groups(w), (u * blocks + block) * 32
                    dw, m = at(p0, p1, p2, p3, k)
                    four(g[0], dw, m, out)
                    four(g[1], dw, m, out + 256)
                    four(g[2], dw, m, out + 512)
                    four(g[3], dw, m, out + 768)
                    dw, m = at(p0, p1, p2, p3, k + 16)
                    four(g[4], dw, m, out + 1024)
                    four(g[5], dw, m, out + 1280)
                    four(g[6], dw, m, out + 1536)
                    four(g[7], dw, m, out + 1792)
                    w += size
                    out += 2048

    return kernel(unpack, name=f"unpack_{name}_f32")


_kernels: dict[tuple[str, str], Kernel] = {}


def unpack_kernel(name: str, activations: str) -> Kernel:
    """unpack(arguments, panel, out): records for 'q8_0' activations, weights for 'f32'.

    Arguments: data, stride, units, steps, lanes, planes 0 to 3.
    """
    key = (name, activations)
    if key not in _kernels:
        make = _codes_kernel if activations == "q8_0" else _weights_kernel
        _kernels[key] = make(name)
    return _kernels[key]


def panel_bytes(name: str, units: int, activations: str) -> int:
    """Bytes of an unpacked panel."""
    record = record_of(name)
    block = record.nbytes if activations == "q8_0" else 32 * ROWS * 4
    return units * record.blocks * block
