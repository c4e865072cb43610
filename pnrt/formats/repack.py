"""Repacking at load: e4m3 as mxfp8, for hardware that multiplies by powers of two.

What that costs is measured as it happens: the error against the stored weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.formats.base import Format, chunks, parallel

SOURCE = "e4m3"
CHOICES = ("mxfp8:ceil", "mxfp8:floor")


@dataclass
class Cost:
    """The error of one repacked tensor: sums of squares, so that costs add up."""

    error: float
    energy: float

    @property
    def relative_rms(self) -> float:
        """sqrt(sum (y - x)^2 / sum x^2), 0 for an all-zero tensor."""
        return (self.error / self.energy) ** 0.5 if self.energy else 0.0


@dataclass
class Repack:
    """A target for e4m3 weights; made by `parse`. costs: tensor name -> Cost, as they are read."""

    target: Format
    rule: str
    costs: dict[str, Cost] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Repack:
        """From mxfp8:ceil (nothing saturates; mxfp8 for short) or mxfp8:floor (OCP's rule)."""
        name = "mxfp8:ceil" if text == "mxfp8" else text
        if name not in CHOICES:
            raise FormatError(
                f"--repack {text}: there are mxfp8 and {', '.join(CHOICES)}. Choose one of them."
            )
        kind, rule = name.split(":")
        return cls(FORMATS[kind].with_rule(rule), rule)

    def target_of(self, form: Format) -> Format:
        """The format that weights of `form` get."""
        return self.target if form.name == SOURCE else form

    def convert(
        self, name: str, form: Format, rows: np.ndarray, threads: int | None = None
    ) -> np.ndarray:
        """Rows [N, row_bytes] of a format -> rows of its target; the cost is noted under `name`."""
        if form.name != SOURCE:
            return rows
        columns = form.columns(rows.shape[1])
        out = np.empty((len(rows), self.target.row_bytes(columns)), np.uint8)
        parts = chunks(len(rows), columns)
        sums = np.zeros((len(parts), 2))

        def work(i: int) -> None:
            x = form.decode(rows[parts[i]])
            out[parts[i]] = self.target.quantize(x, threads=1)
            left = self.target.decode(out[parts[i]])
            left -= x
            sums[i] = np.square(left, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()

        parallel(work, list(range(len(parts))), threads)
        self.costs[name] = Cost(*map(float, sums.sum(axis=0)))
        return out

    def sentence(self) -> str:
        """What was repacked, and its error against the stored weights."""
        if not self.costs:
            return f"repacked: nothing, the model has no {SOURCE} weights"
        total = Cost(
            sum(cost.error for cost in self.costs.values()),
            sum(cost.energy for cost in self.costs.values()),
        )
        worst = max(self.costs, key=lambda name: self.costs[name].relative_rms)
        return (
            f"repacked: {len(self.costs)} tensors from {SOURCE} to {self.target.name}, scale rule "
            f"{self.rule}; relative RMS error against the stored weights {total.relative_rms:.5f}, "
            f"at most {self.costs[worst].relative_rms:.5f} in {worst}"
        )
