"""The known ways to read a format's bytes wrongly, one small function each: codes.

A misreading takes (form, rows [N, row_bytes] uint8) and returns the weights [N, K] float32 that
a program with this fault would see. It is tried on the formats its entry says it can happen to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pnrt.formats import Format
from pnrt.formats.base import field, half
from pnrt.formats.kquant import unpack_planes, unpack_runs
from pnrt.formats.pn import WORDS

f32 = np.float32


class Misreading(NamedTuple):
    """name: short; says: what the program does; formats: where it can happen."""

    name: str
    says: str
    formats: frozenset[str]
    weights: Callable[[Format, np.ndarray], np.ndarray]


MISREADINGS: list[Misreading] = []
PN = ("pn3t", "pn4t")
# bytes of a block that hold two codes each, and the codes of a run: low nibbles, then high ones
NIBBLES = {
    "q4_0": (2, 18, 32), "q4_1": (4, 20, 32), "q5_0": (6, 22, 32), "q5_1": (8, 24, 32),
    "q4_K": (16, 144, 64), "q5_K": (48, 176, 64), "q6_K": (0, 128, 128), "iq4_nl": (2, 18, 32),
    "iq4_xs": (8, 136, 32), "mxfp4": (1, 17, 32), "nvfp4": (4, 36, 16), "cyb_q4": (2, 18, 32),
}  # fmt: skip
FIFTH = {"q5_0": 2, "q5_1": 4}


def misreading(name: str, says: str, formats: tuple[str, ...]):
    """Enter a function into the table."""

    def enter(function):
        MISREADINGS.append(Misreading(name, says, frozenset(formats), function))
        return function

    return enter


def weigh(form: Format, codes, scale, offset=None) -> np.ndarray:
    """codes [N, K], scale and offset [N, K / group] -> [N, K]."""
    with np.errstate(all="ignore"):
        w = codes.astype(f32) * np.repeat(scale, form.group, axis=1)[:, : codes.shape[1]]
        if offset is not None:
            w += np.repeat(offset, form.group, axis=1)[:, : codes.shape[1]]
    return w


def blocks_of(form: Format, rows: np.ndarray) -> np.ndarray:
    """A copy of the rows as blocks [n, S]."""
    return rows.reshape(-1, form.nbytes).copy()


def read_as(form: Format, rows: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """The right reading of other bytes."""
    return form.decode(np.ascontiguousarray(blocks).reshape(rows.shape))


# PN words


def _shifted(form: Format, rows: np.ndarray, shifts: np.ndarray, words=None) -> np.ndarray:
    blocks = blocks_of(form, rows)
    words = field(blocks, 2, WORDS, np.uint32) if words is None else words
    codes = words[:, :, None] >> shifts.astype(np.uint32) & np.uint32(2 * form.zero - 1)
    codes = codes.reshape(len(rows), -1).astype(np.int32) - form.zero
    return weigh(form, codes, half(blocks, 0).reshape(len(rows), -1))


@misreading(
    "element index in the pair's place",
    "shifts code t by bits * t + 16 * (t mod 2), as the format's own CPU engine did (reading A)",
    PN,
)
def _(form, rows):
    t = np.arange(form.per_word)
    # a shift of 32 or more wraps, as a shifter of five bits does
    return _shifted(form, rows, (form.bits * t + 16 * (t % 2)) % 32)


@misreading(
    "codes packed one after the other",
    "shifts code t by bits * t, plain packing without half-words (reading B)",
    PN,
)
def _(form, rows):
    return _shifted(form, rows, form.bits * np.arange(form.per_word))


@misreading("half-words swapped", "takes even codes from the upper half-word", PN)
def _(form, rows):
    return _shifted(form, rows, form.shifts.astype(np.int64) ^ 16)


@misreading(
    "half-words one after the other", "reads all of the low half, then the high one", ("pn3t",)
)
def _(form, rows):
    order = np.argsort(np.arange(form.per_word) % 2, kind="stable")
    return _shifted(form, rows, form.shifts[order])


@misreading("words big-endian", "reads the 32-bit words with their bytes reversed", PN)
def _(form, rows):
    words = field(blocks_of(form, rows), 2, WORDS, np.uint32).byteswap()
    return _shifted(form, rows, form.shifts, words)


# nibbles, fifth bits, planes


@misreading("nibbles swapped", "takes the high nibble where the low one belongs", tuple(NIBBLES))
def _(form, rows):
    blocks = blocks_of(form, rows)
    start, stop, _ = NIBBLES[form.name]
    part = blocks[:, start:stop]
    blocks[:, start:stop] = part >> 4 | part << 4
    return read_as(form, rows, blocks)


@misreading(
    "nibbles interleaved", "takes byte j as elements 2j and 2j + 1, not as two runs", tuple(NIBBLES)
)
def _(form, rows):
    codes, scale, offset = form.parts(rows)
    run = NIBBLES[form.name][2]
    runs = codes.reshape(len(rows), -1, 2, run // 2).swapaxes(2, 3)
    return weigh(form, runs.reshape(codes.shape), scale, offset)


@misreading("fifth bits left out", "never adds the fifth bit", (*FIFTH, "q5_K"))
def _(form, rows):
    blocks = blocks_of(form, rows)
    at, size = (16, 32) if form.name == "q5_K" else (FIFTH[form.name], 4)
    blocks[:, at : at + size] = 0
    return read_as(form, rows, blocks)


@misreading("fifth bits big-endian", "reads the word of fifth bits bytes reversed", tuple(FIFTH))
def _(form, rows):
    blocks, at = blocks_of(form, rows), FIFTH[form.name]
    blocks[:, at : at + 4] = blocks[:, at : at + 4][:, ::-1]
    return read_as(form, rows, blocks)


@misreading(
    "high bits addressed in a row", "takes bit e mod 8 of byte e div 8 as element e's", ("q5_K",)
)
def _(form, rows):
    blocks = blocks_of(form, rows)
    _, scale, offset = form.parts(rows)
    bits = np.unpackbits(blocks[:, 16:48], axis=1, bitorder="little")
    codes = (unpack_runs(blocks[:, 48:]) | bits << 4).reshape(len(rows), -1)
    return weigh(form, codes.astype(np.int32), scale, offset)


@misreading(
    "2-bit planes addressed in a row",
    "takes element e's two bits from byte e div 4",
    ("q2_K", "q6_K", "tq2_0"),
)
def _(form, rows):
    blocks = blocks_of(form, rows)
    start = {"q2_K": 16, "q6_K": 128, "tq2_0": 0}[form.name]
    raw = blocks[:, start : start + 64]
    linear = (raw[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(blocks), 256)
    codes, scale, offset = form.parts(rows)
    change = linear.astype(np.int32) - unpack_planes(raw).astype(np.int32)
    factor = 16 if form.name == "q6_K" else 1
    return weigh(form, codes + factor * change.reshape(codes.shape), scale, offset)
