"""Check a model file byte by byte: every broken rule, with tensor, row, block and byte.

Works from the file alone, no backend needed, in chunks of rows: memory stays small for any file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pnrt.container.kinds import open_any
from pnrt.container.layout import TensorInfo
from pnrt.container.mapped import MappedFile
from pnrt.container.values import ArrayValue, Problem
from pnrt.debug.health import Examination, Health
from pnrt.errors import FileError, ModelError
from pnrt.formats import by_id
from pnrt.models.rotation import read_rotation

# bytes looked at in one step
STEP = 16 << 20
ROTATION_KEYS = ("pnrt.rotation.", "prism.hadamard.")


@dataclass(frozen=True)
class FileFinding:
    """One broken rule.

    tensor: its name, empty for the container itself. row, block: None unless inside a tensor's
    data. byte: absolute offset in the file, None if no single byte is to blame.
    """

    tensor: str
    row: int | None
    block: int | None
    byte: int | None
    found: str
    allowed: str

    def __str__(self) -> str:
        place = [self.tensor or "file"]
        if self.row is not None:
            place.append(f"row {self.row} block {self.block}")
        if self.byte is not None:
            place.append(f"(byte {self.byte:#x})")
        return f"{' '.join(place)}: {self.found}; {self.allowed}"


def check_file(
    path: str | Path,
    *,
    notes: list[FileFinding] | None = None,
    health: list[Health] | None = None,
    about: dict[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **opening: Any,
) -> list[FileFinding]:
    """Every finding of a file, container first, then tensor by tensor.

    Args:
        notes: if given, receives what is odd but not wrong: gaps, trailing bytes, unknown types,
            PN tensors of which nobody says whether they are rotated, and with `health` dead blocks,
            zero, -0 and subnormal scales, saturated and unused codes.
        health: if given, receives the counts of every tensor.
        about: if given, receives what the file says of itself: rotation.
        progress: called with (bytes done, bytes in all).
        opening: what else `open_any` takes.
    Raises: FileError only if there is no file to read.
    """
    return list(
        iter_findings(path, notes=notes, health=health, about=about, progress=progress, **opening)
    )


def iter_findings(
    path: str | Path,
    *,
    notes: list[FileFinding] | None = None,
    health: list[Health] | None = None,
    about: dict[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **opening: Any,
) -> Iterator[FileFinding]:
    """`check_file` as a stream, for files with more findings than anyone wants in memory."""
    path = Path(path)
    problems: list[Problem] = []
    try:
        file = open_any(path, problems=problems, **opening)
    except FileError as error:
        # without a problem in it there was no file to read
        if not hasattr(error, "problem"):
            raise
        yield from map(_from_problem, problems)
        yield _from_problem(error.problem)
        return
    with file:
        yield from map(_from_problem, problems)
        if notes is not None:
            notes.extend(map(_from_problem, file.notes))
        yield from _texts(file)
        yield from _rotation(file, notes, {} if about is None else about)
        total = sum(info.nbytes for info in file.tensors.values())
        done = 0
        for name, info in file.tensors.items():
            if info.format is None and notes is not None:
                found = f"type {info.type_name} is not known to pnrt"
                if kind := by_id(info.type_id, opening.get("extra_types")):
                    found = f"rows of {info.columns} weights are no whole {kind.name} blocks"
                allowed = f"its {info.nbytes} bytes were not checked. {file.advice(info)}"
                notes.append(FileFinding(name, None, None, info.offset, found, allowed))
            if info.format and not info.format.weight:
                found = f"its type is {info.format.name}"
                allowed = "that codes activations; weights take another"
                yield FileFinding(name, None, None, info.offset, found, allowed)
            examination = Examination(info) if health is not None and info.format else None
            for findings, size in _steps(file, info, examination):
                yield from findings
                done += size
                if progress:
                    progress(done, total)
            if examination:
                health.append(examination.done())
                if notes is not None:
                    notes.extend(_odd(health[-1]))


def _steps(
    file: MappedFile, info: TensorInfo, examination: Examination | None
) -> Iterator[tuple[list[FileFinding], int]]:
    """Findings and bytes covered, a chunk of rows at a time."""
    if info.format is None:
        yield [], info.nbytes
        return
    rows = file.rows(info.name)
    size = rows.shape[1]
    step = max(1, STEP // size)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if examination:
            examination.add(part, start)
        yield (
            [
                FileFinding(
                    info.name,
                    start + bad.row,
                    bad.block,
                    info.offset + (start + bad.row) * size + bad.byte,
                    bad.found,
                    bad.allowed,
                )
                for bad in info.format.findings(part)
            ],
            part.nbytes,
        )
    # a check reads everything once: keep it from filling memory with pages nobody reads again
    file.drop_pages(info.name)


def _odd(health: Health) -> Iterator[FileFinding]:
    for place, found, meaning in health.notes():
        row, block, byte = place or (None, None, None)
        yield FileFinding(health.tensor, row, block, byte, found, meaning)


def rotation_of(file: MappedFile) -> str:
    """What a file says of its rotation, for people.

    Raises: ModelError for a damaged declaration, or PN tensors without any.
    """
    found = read_rotation(file)
    if found.kind == "none":
        return f"none ({found.source})"
    blocks = ", ".join(f"{k}: {b}" for k, b in sorted(found.blocks.items()))
    return f"{found.kind}, {len(found.tensors)} tensors, blocks by width {blocks}"


def _rotation(
    file: MappedFile, notes: list[FileFinding] | None, about: dict[str, str]
) -> Iterator[FileFinding]:
    """A damaged declaration is a finding, a missing one a note."""
    try:
        about["rotation"] = rotation_of(file)
    except ModelError as error:
        text = str(error).removeprefix(f"{file.path}: ")
        if any(key.startswith(ROTATION_KEYS) for key in file.metadata):
            yield FileFinding("", None, None, None, text, "a rotation is declared whole, or not")
        elif notes is not None:
            allowed = "without it a run needs --rotation"
            notes.append(FileFinding("", None, None, None, text.split("; one is")[0], allowed))


def _texts(file: MappedFile) -> Iterator[FileFinding]:
    """String arrays are read lazily; a check reads them all."""
    for value in file.metadata.values():
        if isinstance(value, ArrayValue) and value.kind == "string":
            yield from map(_from_problem, value.problems())


def _from_problem(problem: Problem) -> FileFinding:
    tensor = problem.about.removeprefix("tensor ") if problem.about.startswith("tensor ") else ""
    found = problem.found if tensor or not problem.about else f"{problem.about} {problem.found}"
    return FileFinding(tensor, None, None, problem.byte, found, problem.allowed)
