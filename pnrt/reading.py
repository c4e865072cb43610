"""From the mapped file to a backend: weights validated, repacked where asked, packed or decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from pnrt.container.gguf import GGUFFile
from pnrt.errors import FormatError
from pnrt.formats.repack import Repack
from pnrt.models.rotation import Rotation
from pnrt.models.steps import SIGNS
from pnrt.program import Program

Progress = Callable[[str, int, int], None]

# bytes of a file validated at a time
SLICE = 1 << 25


class WeightReader:
    """Reads the weights of one model.

    Args:
        file: an open GGUF file; rotation: of the same file.
        validate: refuse blocks that break a rule of their format.
        repack: another format for some of the weights, None to take them as stored.
    """

    def __init__(
        self,
        file: GGUFFile,
        rotation: Rotation,
        validate: bool = True,
        repack: Repack | None = None,
    ):
        self.file, self.rotation, self.validate, self.repack = file, rotation, validate, repack

    def format(self, name: str) -> str | None:
        """The format a backend gets a tensor in; None for a type id pnrt does not know."""
        form = self.file.tensors[name].format
        if form and self.repack:
            form = self.repack.target_of(form)
        return form.name if form else None

    def shape(self, name: str) -> tuple[str, int, int]:
        """Format, rows and columns of a tensor, or of a rotation's signs, as a backend gets it."""
        if name.startswith(SIGNS):
            return "f32", 1, int(name.removeprefix(SIGNS))
        info = self.file.tensors[name]
        return self.format(name), info.rows, info.columns

    def rows(self, name: str) -> np.ndarray:
        """[N, row_bytes] uint8 of a tensor in that format.

        Raises: FormatError at the first block that breaks a rule of the stored format.
        """
        info, rows = self.file.tensors[name], self.file.rows(name)
        step = max(1, SLICE // rows.shape[1])
        for first in range(0, len(rows), step):
            self._check(name, first, first + step)
            self.file.drop_pages(name, first, min(first + step, len(rows)))
        return self.repack.convert(name, info.format, rows) if self.repack else rows

    def _check(self, name: str, first: int, last: int) -> None:
        """Refuse rows first..last of a tensor if a block breaks a rule of the stored format.

        Without validation only for what a product would not show.
        """
        info, rows = self.file.tensors[name], self.file.rows(name)
        if bad := info.format.first_finding(rows[first:last], lost=not self.validate):
            row = first + bad.row
            byte = info.offset + row * rows.shape[1] + bad.byte
            raise FormatError(
                f"{self.file.path}: {name} row {row} block {bad.block} (byte {byte:#x}): "
                f"{bad.found}; {bad.allowed}. Convert or fetch the file again; "
                f"`pnrt check {self.file.path}` lists everything that is wrong."
            )

    def vector(self, name: str) -> np.ndarray:
        """A vector as float32; also the signs of a rotation."""
        if name.startswith(SIGNS):
            return self.rotation.signs[int(name.removeprefix(SIGNS))].astype(np.float32)
        form = self.file.tensors[name].format
        if self.validate:
            self.rows(name)
        return np.ascontiguousarray(form.decode(self.file.rows(name)).reshape(-1))

    def read(self, program: Program, engine: Any, tell: Progress) -> dict[str, Any]:
        """Matrices packed by the backend, vectors decoded, the embedding as (format, rows)."""
        matrices = program.matrices()
        total = sum(self.file.tensors[name].nbytes for name in matrices) // 2**20
        weights: dict[str, Any] = {}
        done = 0
        for name, after in itertools.zip_longest(matrices, matrices[1:]):
            tell("packing weights, MiB", done // 2**20, total)
            weights[name] = self._pack(engine, name, after)
            done += self.file.tensors[name].nbytes
        tell("packing weights, MiB", total, total)
        for step in program.steps:
            for name in step.weights:
                if step.op == "embed":
                    # a tied table is also a matrix: the look-up keeps rows under its own key
                    weights[f"{name}:rows"] = (self.format(name), self.rows(name))
                elif name not in weights:
                    weights[name] = self.vector(name)
        return weights

    def _pack(self, engine: Any, name: str, after: str | None) -> Any:
        """One matrix: while a slice is packed, the next one is read; the last one's pages go.

        after: the matrix that comes next.
        """
        info, form = self.file.tensors[name], self.format(name)
        if form != info.format.name:
            return engine.pack(form, self.rows(name), info.columns)

        def before(first: int, last: int) -> None:
            self.file.drop_pages(name, 0, first)
            if last < info.rows:
                self.file.fetch_pages(name, last, min(2 * last - first, info.rows))
            elif after:
                ahead = self.file.tensors[after]
                self.file.fetch_pages(after, 0, min(ahead.rows, SLICE * ahead.rows // ahead.nbytes))
            self._check(name, first, last)

        weight = engine.pack(form, self.file.rows(name), info.columns, before)
        self.file.drop_pages(name)
        return weight
