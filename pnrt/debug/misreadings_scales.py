"""The known ways to read a format's bytes wrongly: scales, offsets, zero points, tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pnrt.debug.misreadings import PN, blocks_of, f32, misreading, read_as, weigh
from pnrt.formats import FORMATS
from pnrt.formats.base import half
from pnrt.formats.codebook import E2M1, NL
from pnrt.formats.kquant import unpack_scales

K4 = ("q4_K", "q5_K")
AFFINE = ("q4_1", "q5_1", "q2_K", *K4)
CENTRED = ("q4_0", "q5_0", "q3_K", "q6_K", "tq1_0", "tq2_0", "cyb_q4", *PN)
# the zero point of each
ZERO = {
    "q4_0": 8, "q5_0": 16, "q3_K": 4, "q6_K": 32, "tq1_0": 1, "tq2_0": 1, "cyb_q4": 8,
    "pn3t": 4, "pn4t": 8,
}  # fmt: skip
TERNARY = ("cyb_ternary", "bitnet_ternary")
SIGNED = ("q4_0", "q5_0", "q3_K", "q6_K", "iq4_nl", "iq4_xs", *PN)
SCALED = tuple(n for n, f in FORMATS.items() if f.weight and f.group and n not in TERNARY)
HALVES = tuple(n for n, f in FORMATS.items() if f.weight and f.group and f.halves)
GROUPED = tuple(n for n, f in FORMATS.items() if f.weight and f.group and f.block > f.group)


@misreading("scale big-endian", "reads the fp16 scales with their bytes swapped", HALVES)
def _(form, rows):
    blocks = blocks_of(form, rows)
    for at, _ in form.halves:
        blocks[:, at : at + 2] = blocks[:, at : at + 2][:, ::-1]
    return read_as(form, rows, blocks)


@misreading("scale without its sign", "takes the magnitude of d", SIGNED)
def _(form, rows):
    blocks = blocks_of(form, rows)
    blocks[:, form.halves[0][0] + 1] &= 0x7F
    return read_as(form, rows, blocks)


@misreading("scale of the block before", "is one block behind with its scales", SCALED)
def _(form, rows):
    codes, scale, offset = form.parts(rows)
    step = form.block // form.group
    moved = None if offset is None else np.roll(offset, step, axis=1)
    return weigh(form, codes, np.roll(scale, step, axis=1), moved)


@misreading("scale of the block behind", "is one block ahead with its scales", SCALED)
def _(form, rows):
    codes, scale, offset = form.parts(rows)
    step = form.block // form.group
    moved = None if offset is None else np.roll(offset, -step, axis=1)
    return weigh(form, codes, np.roll(scale, -step, axis=1), moved)


@misreading("zero point one too high", "subtracts one more than the zero point", CENTRED)
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, codes - 1, scale)


@misreading("zero point one too low", "subtracts one less than the zero point", CENTRED)
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, codes + 1, scale)


@misreading("zero point left out", "takes codes as unsigned", CENTRED)
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, codes + ZERO[form.name], scale)


@misreading("bytes unsigned", "takes signed bytes as 0 to 255", ("q8_0", "cyb_q8"))
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, codes & 255, scale)


@misreading("offset with the wrong sign", "adds what it should subtract", AFFINE)
def _(form, rows):
    codes, scale, offset = form.parts(rows)
    return weigh(form, codes, scale, -offset)


@misreading("offset left out", "never adds the minimum", AFFINE)
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, codes, scale)


@misreading("scale and offset swapped", "takes the second fp16 field as the scale", AFFINE)
def _(form, rows):
    blocks = blocks_of(form, rows)
    (d, _), (m, _) = form.halves
    blocks[:, [d, d + 1, m, m + 1]] = blocks[:, [m, m + 1, d, d + 1]]
    return read_as(form, rows, blocks)


def _reordered(order: Callable[[np.ndarray], np.ndarray]):
    def read(form, rows):
        codes, scale, offset = form.parts(rows)
        per = form.block // form.group
        picked = order(np.arange(per))

        def move(values):
            return values.reshape(len(rows), -1, per)[:, :, picked].reshape(len(rows), -1)

        return weigh(form, codes, move(scale), None if offset is None else move(offset))

    return read


for _name, _says, _order in (
    ("reversed", "takes a block's scales from the last", lambda i: i[::-1]),
    ("swapped in pairs", "exchanges each two of a block's scales", lambda i: i ^ 1),
    ("one late", "takes the scale of the group before", lambda i: np.roll(i, 1)),
    ("one early", "takes the scale of the group behind", lambda i: np.roll(i, -1)),
    ("by halves", "takes them alternately from both halves", lambda i: i.reshape(2, -1).T.ravel()),
):
    misreading(f"sub-block scales {_name}", _says, GROUPED)(_reordered(_order))


def _six_bits(form, rows, scales, minima) -> np.ndarray:
    """Read with other small scales and minima, [n, 8] each."""
    blocks = blocks_of(form, rows)
    codes = form.fields(blocks)[0].reshape(len(rows), -1).astype(np.int32)
    scale = half(blocks, 0)[:, None] * scales
    offset = -(half(blocks, 2)[:, None] * minima)
    return weigh(form, codes, scale.reshape(len(rows), -1), offset.reshape(len(rows), -1))


@misreading("6-bit scales without their high bits", "forgets the two bits kept elsewhere", K4)
def _(form, rows):
    scales, minima = unpack_scales(blocks_of(form, rows)[:, 4:16])
    low = np.where(np.arange(8) < 4, 63, 15)
    return _six_bits(form, rows, scales & low, minima & low)


@misreading("6-bit scales' high bits exchanged", "takes them from each other's bytes", K4)
def _(form, rows):
    raw = blocks_of(form, rows)[:, 4:16]
    a, b, c = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | b >> 6 << 4], axis=1)
    return _six_bits(form, rows, scales, np.concatenate([b & 63, c >> 4 | a >> 6 << 4], axis=1))


@misreading("6-bit scales' last nibbles swapped", "exchanges the last four bytes' nibbles", K4)
def _(form, rows):
    raw = blocks_of(form, rows)[:, 4:16]
    raw[:, 8:] = raw[:, 8:] >> 4 | raw[:, 8:] << 4
    return _six_bits(form, rows, *unpack_scales(raw))


@misreading("6-bit scales packed in a row", "reads twelve bytes as sixteen fields of 6 bits", K4)
def _(form, rows):
    bits = np.unpackbits(blocks_of(form, rows)[:, 4:16], axis=1, bitorder="little")
    values = bits.reshape(-1, 16, 6) @ (1 << np.arange(6))
    return _six_bits(form, rows, values[:, :8], values[:, 8:])


@misreading("scales and minima exchanged", "takes the small minima as small scales", ("q2_K", *K4))
def _(form, rows):
    blocks = blocks_of(form, rows)
    codes, scales, minima, d, dmin = form.fields(blocks)
    codes, n = codes.reshape(len(rows), -1).astype(np.int32), len(rows)
    scale, offset = d[:, None] * minima, -(dmin[:, None] * scales)
    return weigh(form, codes, scale.reshape(n, -1), offset.reshape(n, -1))


def _small(form, rows, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Read q3_K or iq4_xs with other small scales: change takes them 0..63."""
    blocks = blocks_of(form, rows)
    d = half(blocks, form.halves[0][0]).reshape(len(rows), -1)
    d = np.repeat(d, form.block // form.group, axis=1)
    with np.errstate(all="ignore"):
        small = np.where(d != 0, form.parts(rows).scale / d + 32, 0)
    codes = form.parts(rows).codes
    return weigh(form, codes, (d * change(np.rint(small).astype(np.int32))).astype(f32))


@misreading("small scales without their high bits", "forgets bits 4 and 5", ("q3_K", "iq4_xs"))
def _(form, rows):
    return _small(form, rows, lambda s: (s & 15) - 32)


@misreading("small scales unsigned", "does not subtract 32", ("q3_K", "iq4_xs"))
def _(form, rows):
    return _small(form, rows, lambda s: s)


@misreading("small scales unsigned bytes", "takes signed scales as 0 to 255", ("q6_K",))
def _(form, rows):
    blocks = blocks_of(form, rows)
    scale = half(blocks, 208)[:, None] * blocks[:, 192:208].astype(f32)
    return weigh(form, form.parts(rows).codes, scale.reshape(len(rows), -1))


# tables


@misreading("codebook left out", "takes codes as numbers around 8", ("iq4_nl", "iq4_xs"))
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, np.searchsorted(NL, codes) - 8, scale)


@misreading("codebook left out (fp4)", "takes 4-bit floats as numbers", ("mxfp4", "nvfp4"))
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    magnitude = np.searchsorted(E2M1[:8], np.abs(codes))
    return weigh(form, np.sign(codes) * magnitude, 2 * scale)


@misreading("scale doubled", "forgets that the table holds doubled values", ("mxfp4", "nvfp4"))
def _(form, rows):
    codes, scale, _ = form.parts(rows)
    return weigh(form, codes, 2 * scale)


@misreading("the other ternary table", "takes 0, +1, -1 for -1, 0, +1 or the reverse", TERNARY)
def _(form, rows):
    return FORMATS[{"cyb_ternary": "bitnet_ternary"}.get(form.name, "cyb_ternary")].decode(rows)


@misreading("numbers big-endian", "reads numbers with their bytes reversed", ("f32", "f16", "bf16"))
def _(form, rows):
    return read_as(form, rows, blocks_of(form, rows)[:, ::-1])


@misreading("f16 and bf16 exchanged", "takes one 16-bit float for the other", ("f16", "bf16"))
def _(form, rows):
    return FORMATS["bf16" if form.name == "f16" else "f16"].decode(rows)
