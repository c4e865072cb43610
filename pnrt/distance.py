"""How far weights are from what they were before they got another format."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class TensorReport:
    """How far a written tensor is from its source (the rotated one where it is rotated).

    Attributes:
        relative_rms: sqrt(sum (y - x)^2 / sum x^2); 0 for an all-zero tensor.
        max_error: largest |y - x|.
        worst_block: (row, block, relative RMS of that block) with the largest squared error.
    """

    name: str
    source: str
    target: str
    relative_rms: float = 0.0
    max_error: float = 0.0
    worst_block: tuple[int, int, float] = (0, 0, 0.0)
    _error: float = field(default=0.0, repr=False)
    _energy: float = field(default=0.0, repr=False)
    _worst: float = field(default=-1.0, repr=False)

    def add(self, first_row: int, x: np.ndarray, y: np.ndarray, block: int) -> None:
        """Take in rows x [N, K] float32 and what they became, y [N, K] float32."""
        wide = x.astype(np.float64).reshape(len(x), -1, block)
        difference = y.reshape(wide.shape) - wide
        error, energy = (np.einsum("rcb,rcb->rc", v, v) for v in (difference, wide))
        row, column = (int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
        worst, total = float(error[row, column]), float(energy[row, column])
        largest = float(max(difference.max(), -difference.min()))
        relative = (worst / total) ** 0.5 if total else 0.0
        place = (first_row + row, column, relative)
        sums = (float(error.sum()), float(energy.sum()), worst)
        self.merge(TensorReport("", "", "", 0.0, largest, place, *sums))

    def merge(self, other: TensorReport) -> None:
        """Take in what was measured of later rows."""
        self.max_error = max(self.max_error, other.max_error)
        self._error += other._error
        self._energy += other._energy
        self.relative_rms = (self._error / self._energy) ** 0.5 if self._energy else 0.0
        if other._worst > self._worst:
            self._worst, self.worst_block = other._worst, other.worst_block
