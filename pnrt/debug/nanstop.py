"""Stop a run at the first value that is not finite, and say which weight or sum made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pnrt import reference
from pnrt.errors import DifferenceError
from pnrt.program import ELEMENTWISE

if TYPE_CHECKING:
    from pnrt.backend import Tap
    from pnrt.container.gguf import GGUFFile
    from pnrt.program import Step

# 8-bit activations: the scale max|x| / 127 of a block is a finite fp16
TOO_LARGE = 127 * 65520.0
# rows of an embedding table decoded at once
ROWS = 1024


class NotFinite(DifferenceError):
    """A step made a NaN or infinity. A finding: the command line ends with exit status 1."""


class NanStop:
    """An observer that raises NotFinite at the first step whose output is not finite.

    Args:
        file: the model's file, to find the block that is to blame.
        activations: what products see, 'q8_0' or 'f32'.
    """

    def __init__(self, file: GGUFFile, activations: str):
        self.file, self.activations = file, activations
        self.slots: dict[str, np.ndarray] = {}
        self.passed = 0

    def __call__(self, tap: Tap) -> None:
        """Look at one step."""
        step, y = tap.step, tap.values()
        if step.op == "matmul":
            self._too_large(tap)
        bad = ~np.isfinite(y)
        if not bad.any():
            self.slots[step.output] = y.copy()
            self.passed += 1
            return
        t, n = (int(i) for i in np.argwhere(bad)[0])
        place = f"position {tap.start + t}, " + _element(step, n, y.shape[1])
        raise NotFinite(
            f"{step.name}: {_named(y[t, n])} at {place}, the first of {int(bad.sum())} in this "
            f"step; {self._cause(step, t, n)}. {self._before()}. {self._advice(step)}"
        )

    def _before(self) -> str:
        return f"The {self.passed} steps before it were finite"

    def _advice(self, step: Step) -> str:
        if step.weights:
            return f"Look at the tensor with `pnrt check {self.file.path}`, or fetch the file again"
        return f"Record the run with `pnrt trace {self.file.path}` to see the values grow"

    def _too_large(self, tap: Tap) -> None:
        """An input that 8-bit activations cannot hold; the product itself would hide it."""
        step, x = tap.step, self.slots.get(tap.step.inputs[0])
        form = self.file.tensors[step.weights[0]].format
        if x is None or self.activations == "f32" or form.group == 0:
            return
        if (bad := np.abs(x) >= TOO_LARGE).any():
            t, k = (int(i) for i in np.argwhere(bad)[0])
            raise NotFinite(
                f"{step.name}: its input {step.inputs[0]} is {x[t, k]:g} at row {t}, element {k}; "
                f"8-bit activations hold magnitudes below {TOO_LARGE:g}. {self._before()}. "
                "Use --activations f32, or `pnrt check` the file"
            )

    def _cause(self, step: Step, t: int, n: int) -> str:
        """What made element n of row t."""
        if step.op == "matmul":
            return self._product(step, t, n)
        if step.op == "embed":
            return self._table(step.weights[0], n)
        for tensor in (w for w in step.weights if w in self.file.tensors):
            values = self.file.values(tensor).reshape(-1)
            if not np.isfinite(values[n % len(values)]):
                return f"{tensor} element {n % len(values)} is {_named(values[n % len(values)])}"
        read = [
            f"{slot} is {self.slots[slot][t, n]:g} there"
            for slot in step.inputs
            if step.op in ELEMENTWISE and slot in self.slots and n < self.slots[slot].shape[1]
        ]
        return f"its inputs are finite ({', '.join(read)})" if read else "its inputs are finite"

    def _table(self, tensor: str, n: int) -> str:
        """The block of an embedding table whose element n is not finite."""
        rows = self.file.tensors[tensor].rows
        for start in range(0, rows, ROWS):
            bad = ~np.isfinite(self.file.values(tensor, start, start + ROWS)[:, n])
            if bad.any():
                return self._block(tensor, start + int(bad.argmax()))
        return f"{tensor} decodes to finite numbers: the backend's look-up is wrong"

    def _block(self, tensor: str, row: int) -> str | None:
        """The first block of a row that decodes to something not finite."""
        info, values = self.file.tensors[tensor], self.file.values(tensor, row, row + 1)[0]
        bad = np.flatnonzero(~np.isfinite(values))
        if not bad.size:
            return None
        block = int(bad[0]) // info.format.block
        rows = self.file.rows(tensor)[row : row + 1]
        broken = [f for f in info.format.findings(rows) if f.block == block]
        byte = info.offset + row * rows.shape[1]
        byte += broken[0].byte if broken else block * info.format.nbytes
        what = broken[0].found if broken else f"weight {bad[0]} is {_named(values[bad[0]])}"
        return f"{tensor} row {row} block {block} (byte {byte:#x}): {what}"

    def _product(self, step: Step, t: int, n: int) -> str:
        """The block of row n, or the unit whose sum left the range of float32."""
        tensor = step.weights[0]
        if found := self._block(tensor, n):
            return found
        form, x = self.file.tensors[tensor].format, self.slots[step.inputs[0]][t]
        units = -(-len(x) // form.unit)
        # token u sees the first u + 1 units only
        mask = np.arange(len(x)) // form.unit <= np.arange(units)[:, None]
        sums = reference.matmul(
            form.name, self.file.rows(tensor)[n : n + 1], x * mask, self.activations
        )
        left = np.flatnonzero(~np.isfinite(sums[:, 0]))
        if not left.size:
            return (
                f"the reference gives {sums[-1, 0]:g} for {tensor} row {n}: the kernel is wrong, "
                f"see `pnrt diff {self.file.path} cpu reference`"
            )
        first = int(left[0]) * form.unit
        blocks = f"{first // form.block} to {(first + form.unit - 1) // form.block}"
        return f"the sum over {tensor} row {n} leaves float32's range in its blocks {blocks}"


def _named(value: float) -> str:
    return "NaN" if np.isnan(value) else ("+infinity" if value > 0 else "-infinity")


def _element(step: Step, n: int, width: int) -> str:
    if step.op == "matmul":
        return f"row {n} of {step.weights[0]}"
    if step.op == "store_kv":
        half = width // 2
        return f"element {n % half} of the {'key' if n < half else 'value'}"
    heads = step.numbers.get("heads", 1)
    if heads > 1:
        return f"head {n // (width // heads)}, element {n % (width // heads)}"
    return f"element {n}"
