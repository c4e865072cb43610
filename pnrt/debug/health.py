"""What is odd about a tensor's bytes though no rule is broken: dead blocks, scales, codes.

Counts come from histograms of bytes, not from decoded weights: a pass over a file stays quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pnrt.container.layout import TensorInfo
from pnrt.formats import Format
from pnrt.formats.base import field as field_of
from pnrt.formats.pn import PN

# a share of weights on the outermost codes above this is odd; quantized noise has a few per cent
SATURATED = 0.5
# weights per code above which a code that never occurs is odd
EXPECTED = 1000
# kinds of oddities, and what each means
KINDS = {
    "dead": "every weight of the block is zero",
    "zero scale": "the block is its offset and nothing else",
    "-0 scale": "its products are -0; ggml writes it for blocks of zeros",
    "subnormal scale": "few of its digits are left, and none where subnormals are flushed",
}


def _split(counts: np.ndarray, shifts: np.ndarray, mask: int) -> np.ndarray:
    """Counts of patterns -> counts of the codes inside them."""
    patterns = np.arange(len(counts))
    return sum(
        np.bincount(patterns >> int(s) & mask, counts, mask + 1).astype(np.int64) for s in shifts
    )


NIBBLE = np.array([0, 4])
PLANES = np.arange(0, 8, 2)
# bytes of a block that hold codes, shifts of the codes in a byte, and their mask
CODES: dict[str, tuple[int, int, np.ndarray, int]] = {
    "q4_0": (2, 18, NIBBLE, 15), "q4_1": (4, 20, NIBBLE, 15), "q4_K": (16, 144, NIBBLE, 15),
    "iq4_nl": (2, 18, NIBBLE, 15), "iq4_xs": (8, 136, NIBBLE, 15), "mxfp4": (1, 17, NIBBLE, 15),
    "nvfp4": (4, 36, NIBBLE, 15), "cyb_q4": (2, 18, NIBBLE, 15), "q2_K": (16, 80, PLANES, 3),
    "tq2_0": (0, 64, PLANES, 3), "q8_0": (2, 34, np.zeros(1, int), 255),
    "cyb_ternary": (0, 1, PLANES, 3), "bitnet_ternary": (0, 1, PLANES, 3),
    "cyb_q8": (2, 34, np.zeros(1, int), 255), "e4m3": (2, 34, np.zeros(1, int), 255),
}  # fmt: skip
# formats whose outermost codes are not extremes of a range, or are most of all codes
UNRANGED = ("mxfp4", "nvfp4", "tq2_0", "cyb_ternary", "bitnet_ternary", "e4m3", "q2_K")
# the byte that codes of zero make, where one does
ZEROS = {"q4_0": 0x88, "q8_0": 0, "tq2_0": 0x55}


@dataclass
class Health:
    """Counts of one tensor.

    Attributes:
        blocks: in all; counts: kind -> blocks; first: kind -> (row, block, byte in the file).
        codes: how often each stored code occurs (q8_0: from -128), None for other formats.
        saturated: share of weights on the lowest and highest code; None where that means nothing.
    """

    tensor: str
    format: str
    blocks: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    codes: list[int] | None = None
    saturated: float | None = None

    def notes(self) -> list[tuple[tuple[int, int, int] | None, str, str]]:
        """(place or None, what was found, what it means) for each oddity."""
        out = [
            (self.first[kind], f"{kind}: {n} of {self.blocks} blocks, the first here", KINDS[kind])
            for kind, n in self.counts.items()
        ]
        if self.saturated is not None and self.saturated > SATURATED:
            text = f"{self.saturated:.0%} of the weights are on the outermost codes"
            out.append((None, text, "the scales are too small for them, or the weights are binary"))
        if self.codes and self.format not in UNRANGED and len(self.codes) <= 16:
            unused = [code for code, n in enumerate(self.codes) if not n]
            if unused and sum(self.codes) > EXPECTED * len(self.codes):
                text = f"code {', '.join(map(str, unused))} never occurs"
                out.append((None, text, "a quantizer that uses its range would have used it"))
        return out


class Examination:
    """Takes in a tensor's rows chunk by chunk."""

    def __init__(self, info: TensorInfo):
        self.info, self.form = info, info.format
        self.health = Health(info.name, self.form.name)
        self._counter = _counter(self.form)
        self._codes: np.ndarray | None = None

    def add(self, rows: np.ndarray, first: int) -> None:
        """Take in rows [n, row_bytes] uint8, the first of which is row `first`."""
        form = self.form
        if not form.group:
            return
        blocks = np.ascontiguousarray(rows).reshape(-1, form.nbytes)
        self.health.blocks += len(blocks)
        for kind, bad in _oddities(form, blocks):
            at = np.flatnonzero(bad)
            if not len(at):
                continue
            counts = self.health.counts
            if kind not in counts:
                row, block = divmod(int(at[0]), rows.shape[1] // form.nbytes)
                byte = (first + row) * rows.shape[1] + block * form.nbytes
                self.health.first[kind] = first + row, block, self.info.offset + byte
            counts[kind] = counts.get(kind, 0) + len(at)
        if self._counter:
            found = self._counter(blocks)
            self._codes = found if self._codes is None else self._codes + found

    def done(self) -> Health:
        """The counts of all rows."""
        if self._codes is not None:
            self.health.codes = [int(n) for n in self._codes]
            if self.form.name not in UNRANGED and self._codes.sum():
                ends = self._codes[[0, -1]].sum()
                if self.form.name in ("q8_0", "cyb_q8"):
                    # -128 is never written: -127 is the lowest
                    ends += self._codes[1]
                self.health.saturated = float(ends / self._codes.sum())
        return self.health


def _counter(form: Format) -> Callable[[np.ndarray], np.ndarray] | None:
    """A function blocks -> counts of codes."""
    if isinstance(form, PN):
        shifts, mask = form.shifts[::2], 2 * form.zero - 1

        def halves(blocks: np.ndarray) -> np.ndarray:
            words = np.ascontiguousarray(blocks[:, 2:]).view("<u2").reshape(-1)
            return _split(np.bincount(words, minlength=1 << 16), shifts, mask)

        return halves
    if form.name not in CODES:
        return None
    start, stop, shifts, mask = CODES[form.name]
    signed = form.name in ("q8_0", "cyb_q8")

    def nibbles(blocks: np.ndarray) -> np.ndarray:
        part = np.ascontiguousarray(blocks[:, start:stop])
        if part.shape[1] % 2 == 0:
            # two bytes at a time, then taken apart: half the work
            pairs = np.bincount(part.view("<u2").reshape(-1), minlength=1 << 16).reshape(256, 256)
            counts = pairs.sum(0) + pairs.sum(1)
        else:
            counts = np.bincount(part.reshape(-1), minlength=256)
        out = _split(counts, shifts, mask)
        return np.roll(out, 128) if signed else out

    return nibbles


def _oddities(form: Format, blocks: np.ndarray):
    """(kind, [n] bool) for what a block's bytes show."""
    if not form.halves:
        return
    scales = [field_of(blocks, at, 1, np.uint16)[:, 0] for at, _ in form.halves]
    magnitudes = [bits & 0x7FFF for bits in scales]
    d, magnitude = scales[0], magnitudes[0]
    dead = np.bitwise_or.reduce(magnitudes) == 0
    if isinstance(form, PN) or form.name in ZEROS:
        zero = _zero_codes(form)
        start = 2 if form.halves[0][0] == 0 else 0
        # a look at one byte leaves few blocks to look at whole
        some = np.flatnonzero(blocks[:, start + len(zero) - 1] == zero[-1])
        dead[some] |= (blocks[some, start : start + len(zero)] == zero).all(1)
    # times a scale that is infinite or NaN zero codes are NaN
    dead &= np.max(magnitudes, axis=0) < 0x7C00
    yield "dead", dead
    yield "zero scale", (d == 0) & ~dead
    yield "-0 scale", d == 0x8000
    yield "subnormal scale", (magnitude > 0) & (magnitude < 0x0400)


def _zero_codes(form: Format) -> np.ndarray:
    """The bytes behind a scale when all codes are zero weights."""
    if isinstance(form, PN):
        block = form.pack(np.zeros(1, np.float16), np.full((1, form.block), form.zero))
        return block[0, 2:]
    return np.full(form.nbytes - 2, ZEROS[form.name], np.uint8)
