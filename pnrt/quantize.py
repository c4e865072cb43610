"""Which tensor gets which weight format, and the file that follows from it.

`plan` decides and computes nothing; `quantize_file` carries a plan out, a few megabytes of rows
at a time. Everything that is not the weight matrix of a product (norms, biases, vectors,
convolution taps, rope factors) is copied byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.container.layout import why_not_gguf
from pnrt.container.writer import check_target
from pnrt.distance import TensorReport
from pnrt.errors import FileError, FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.formats.base import chunks, parallel
from pnrt.mixes import MIXES, Mix, find_mix, is_matrix
from pnrt.models.rotate import rotation_keys, rotation_to_apply
from pnrt.models.rotation import PN_FORMATS, ROTATION_KEYS, Rotation, read_rotation

if TYPE_CHECKING:
    from pnrt.container.gguf import GGUFFile, TensorInfo

Progress = Callable[[str, int, int], None]

# weights decoded at a time: 4 million float32 are 16 MB
CHUNK = 1 << 22

_REPLACED = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class Decision:
    """What happens to one tensor.

    shape is row-major; source and target are format names; block: of the rotation its rows get
    before they are quantized, 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    reason: str
    source_bytes: int
    target_bytes: int
    block: int = 0

    @property
    def kept(self) -> bool:
        """True where the bytes are copied."""
        return self.source == self.target and not self.block


def plan(
    file: GGUFFile,
    mix: str,
    overrides: Sequence[tuple[str, str]] = (),
    rotation: Rotation | None = None,
) -> list[Decision]:
    """Decide the format of every tensor, in file order.

    Args:
        file: an open GGUF file; type ids mapped by hand when it was opened can be written too.
        mix: a name in MIXES, or a format by itself.
        overrides: (regex, format) pairs; the first whose regex matches somewhere in the name wins.
        rotation: the one to apply, see models.rotate.choose_rotation.
    Returns:
        one Decision per tensor.
    Raises:
        ModelError: unknown mix, unknown format, bad regex, or a regex that matches no matrix.
        FormatError: an override names a format whose block does not divide K, or a matrix is
            stored in a format pnrt cannot decode.
    """
    ids = _ids(file)
    chosen = find_mix(mix, ids)
    rules = [_rule(pattern, name, ids) for pattern, name in overrides]
    used: set[str] = set()
    rotation = rotation or Rotation()
    decisions = [
        _decide(file, info, chosen, rules, used, rotation.block_of(info.name, info.columns))
        for info in file.tensors.values()
    ]
    for pattern, name in rules:
        if pattern.pattern not in used:
            raise ModelError(
                f"--tensor-type {pattern.pattern}={name}: in {file.path} the pattern matches no "
                "weight matrix that an earlier one left over. `pnrt inspect` lists the names."
            )
    return decisions


def _ids(file: GGUFFile) -> dict[str, int]:
    """Formats that can be written to a GGUF file, with their ids; those mapped by hand too."""
    ids = {f.name: f.type_id for f in FORMATS.values() if f.weight and f.type_id is not None}
    return ids | {name: i for i, name in file.extra_types.items() if FORMATS[name].weight}


def _rule(pattern: str, name: str, ids: Mapping[str, int]) -> tuple[re.Pattern[str], str]:
    where = f"--tensor-type {pattern}={name}"
    if name not in ids:
        known = f"{', '.join(ids)} can.{why_not_gguf(name)}"
        raise ModelError(f"{where}: no format {name!r} can be written. {known}")
    try:
        return re.compile(pattern), name
    except re.error as problem:
        raise ModelError(
            f"{where}: not a regular expression ({problem}). Correct the pattern."
        ) from None


def _decide(
    file: GGUFFile,
    info: TensorInfo,
    mix: Mix,
    rules: list[tuple[re.Pattern[str], str]],
    used: set[str],
    block: int,
) -> Decision:
    source = info.type_name

    def keep(reason: str) -> Decision:
        return Decision(info.name, info.shape, source, source, reason, info.nbytes, info.nbytes)

    if not is_matrix(info.name, info.shape):
        return keep("not the matrix of a product")
    if info.format is None:
        raise FormatError(
            f"{file.path}: {info.name} has tensor type {info.type_name}, which pnrt cannot decode; "
            f"it decodes {', '.join(FORMATS)}. {file.advice(info)}"
        )
    n, k = info.shape
    target, reason = None, ""
    for pattern, name in rules:
        if pattern.search(info.name):
            used.add(pattern.pattern)
            if k % FORMATS[name].block:
                raise FormatError(
                    f"{file.path}: {info.name} has rows of {k} weights; {name} needs a multiple of "
                    f"{FORMATS[name].block}. Rows are never padded: choose another format for it."
                )
            target, reason = name, f"--tensor-type {pattern.pattern}"
            break
    if target is None:
        target, reason = mix.choose(info.name, k)
    if block:
        reason += f"; rotated in blocks of {block}"
    elif target == source:
        return keep(f"already {source}")
    size = n * FORMATS[target].row_bytes(k)
    return Decision(info.name, info.shape, source, target, reason, info.nbytes, size, block)


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    mix: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    rotation: str | None = None,
    rotate: str | int | None = None,
    threads: int | None = None,
    extra_types: Mapping[int, str] | None = None,
    progress: Progress | None = None,
) -> list[TensorReport]:
    """Write `source` to `target` with the formats of a mix.

    The target appears under its name only after every written block passed its format's rules and
    the file was opened again and compared with what was sent to it.

    Args:
        source: GGUF file; quantized tensors in it are decoded first.
        target: the file to write; must not be the source.
        mix, overrides: see `plan`.
        rotation: `none` or `hadamard:BLOCK`, for a PN source that does not say whether its weights
            are rotated.
        rotate: "auto" or a block size: rotate the weights first, see models.rotate.
        threads: threads of the quantizers; the bytes do not depend on it.
        extra_types: type ids mapped by hand, for reading and writing, e.g. {42: "e4m3"}.
        progress: called with (tensor name, bytes of the source done, bytes of the source).
    Returns:
        one TensorReport per tensor that changed.
    Raises:
        FormatError: a value is not finite, or a written block breaks its format's rules.
        FileError, ModelError: bad source, target equal to source, target cannot be written, a
            source that is rotated already.
    """
    target = Path(target)
    check_target(target, Path(source))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open_gguf(source, extra_types=extra_types) as file:
            applied = rotation_to_apply(file, rotate, rotation)
            decisions = plan(file, mix, overrides, applied)
            chosen = find_mix(mix, _ids(file))
            metadata = _metadata(file, decisions, chosen, rotation, applied)
            job = _Job(file, decisions, applied, threads, progress)
            plans = [job.plan(decision) for decision in decisions]
            write_gguf(part, metadata, plans, alignment=file.alignment)
        _verify(part, plans, job.hashes)
        os.replace(part, target)
    except FileError as error:
        # the file is known by the name it was to get
        raise FileError(str(error).replace(str(part), str(target))) from None
    finally:
        part.unlink(missing_ok=True)
    return list(job.reports.values())


class _Job:
    """The state of one conversion: what was read, written and measured."""

    def __init__(
        self,
        file: GGUFFile,
        decisions: list[Decision],
        rotation: Rotation | None,
        threads: int | None,
        progress: Progress | None,
    ):
        self.file, self.threads, self.progress = file, threads, progress
        self.signs = rotation.signs if rotation else {}
        self.total = sum(decision.source_bytes for decision in decisions)
        self.done = 0
        self.hashes: dict[str, bytes] = {}
        self.reports: dict[str, TensorReport] = {}

    def plan(self, decision: Decision) -> TensorPlan:
        """The writer's view of one tensor."""
        info = self.file.tensors[decision.name]
        type_id = info.type_id if decision.kept else _ids(self.file)[decision.target]
        shape, size = decision.shape, decision.target_bytes
        return TensorPlan(decision.name, shape, type_id, size, lambda: self._data(decision))

    def _data(self, decision: Decision) -> Iterator[memoryview]:
        info = self.file.tensors[decision.name]
        digest = hashlib.blake2b(digest_size=16)
        chunks = self._raw(info) if info.format is None else self._rows(info, decision)
        for data, source_bytes in chunks:
            digest.update(data)
            yield data
            self.done += source_bytes
            if self.progress:
                self.progress(decision.name, self.done, self.total)
        self.hashes[decision.name] = digest.digest()
        self.file.drop_pages(decision.name)

    def _raw(self, info: TensorInfo) -> Iterator[tuple[memoryview, int]]:
        data = self.file.data(info.name)
        for start in range(0, info.nbytes, CHUNK):
            part = data[start : start + CHUNK]
            yield memoryview(part), len(part)

    def _rows(self, info: TensorInfo, decision: Decision) -> Iterator[tuple[memoryview, int]]:
        rows = self.file.rows(info.name)
        step = max(1, CHUNK // max(1, info.columns))
        report = TensorReport(info.name, decision.source, decision.target)
        for first in range(0, len(rows), step):
            old = np.ascontiguousarray(rows[first : first + step])
            # small pieces stay in the cache through all steps, and are what threads share
            pieces = chunks(len(old), info.columns)
            done: list[tuple[np.ndarray, TensorReport]] = [None] * len(pieces)

            def work(i, first=first, old=old, pieces=pieces, done=done):
                start = first + pieces[i].start
                done[i] = self._piece(info, decision, start, old[pieces[i]])

            parallel(work, range(len(pieces)), self.threads)
            for new, part in done:
                report.merge(part)
                yield memoryview(new).cast("B"), 0
            yield memoryview(b""), old.nbytes
            # the pages stay in the system's cache, but are this process's no longer
            self.file.drop_pages(info.name, first, min(first + step, len(rows)))
        if not decision.kept:
            self.reports[info.name] = report

    def _piece(
        self, info: TensorInfo, decision: Decision, first: int, old: np.ndarray
    ) -> tuple[np.ndarray, TensorReport]:
        """Rows from `first` on in their new format, checked, and how far they are from the old."""
        report = TensorReport(info.name, decision.source, decision.target)
        target = FORMATS[decision.target]
        if decision.kept and info.format.block > 1:
            self._refuse_findings(info, info.format, first, old)
            return old, report
        x = info.format.decode(old)
        _refuse_non_finite(self.file, info, first, x)
        if decision.kept:
            return old, report
        if decision.block:
            x = self._rotated(x, decision.block)
        try:
            new = target.quantize(x, threads=1)
        except FormatError as problem:
            raise FormatError(
                f"{self.file.path}: {info.name} from row {first}: {problem}"
            ) from None
        self._refuse_findings(info, target, first, new)
        report.add(first, x, target.decode(new), target.block if target.block > 1 else 32)
        return new, report

    def _rotated(self, x: np.ndarray, block: int) -> np.ndarray:
        # compiled code is loaded by the first rotation, not by the import
        from pnrt.formats.fwht import rotate

        return rotate(x, block, self.signs.get(x.shape[1]), threads=1)

    def _refuse_findings(self, info: TensorInfo, fmt, first: int, rows: np.ndarray) -> None:
        found = fmt.first_finding(rows)
        if found:
            raise FormatError(
                f"{self.file.path}: {info.name} row {first + found.row} block {found.block}: "
                f"{found.found}; {found.allowed}. "
                "Nothing was written; `pnrt check` lists everything that is wrong with the source."
            )


def _refuse_non_finite(file: GGUFFile, info: TensorInfo, first: int, x: np.ndarray) -> None:
    finite = np.isfinite(x)
    if not finite.all():
        bad = np.argwhere(~finite)
        row, column = (int(i) for i in bad[0])
        more = f" (and {len(bad) - 1} more nearby)" if len(bad) > 1 else ""
        raise FormatError(
            f"{file.path}: {info.name} row {first + row} column {column} is {x[row, column]}{more};"
            " weights must be finite. Nothing was written; convert the model again from its source."
        )


def _verify(path: Path, plans: list[TensorPlan], hashes: dict[str, bytes]) -> None:
    """Open what was written and compare names, types, shapes and bytes with what was sent."""
    with open_gguf(path) as file:
        if list(file.tensors) != [p.name for p in plans]:
            raise FileError(
                f"{path}: the tensors read back are not those written. "
                "The disk is at fault, or report this."
            )
        for p in plans:
            info = file.tensors[p.name]
            if (info.type_id, tuple(info.shape)) != (p.type_id, tuple(p.shape)):
                raise FileError(
                    f"{path}: {p.name} reads back with another type or shape than "
                    "was written. The disk is at fault, or report this."
                )
            data = file.data(p.name)
            digest = hashlib.blake2b(digest_size=16)
            row = info.nbytes // info.rows
            step = max(1, CHUNK // row)
            for first in range(0, info.rows, step):
                digest.update(data[first * row : (first + step) * row])
                file.drop_pages(p.name, first, min(first + step, info.rows))
            if digest.digest() != hashes[p.name]:
                raise FileError(
                    f"{path}: the bytes of {p.name} read back differ from those written; "
                    "the disk or the file system is at fault. Nothing was kept."
                )


def _metadata(
    file: GGUFFile,
    decisions: list[Decision],
    mix: Mix,
    declared: str | None,
    applied: Rotation | None,
) -> list:
    """The source's keys unchanged, but for the file type and what says how weights are rotated."""
    has_pn = any(d.target in PN_FORMATS for d in decisions)
    was_pn = any(d.source in PN_FORMATS for d in decisions)
    kept = [entry for entry in file.raw_metadata() if entry[0] not in _REPLACED]
    if mix.file_type is not None:
        kept.append(("general.file_type", "uint32", mix.file_type))
    kept.append(("general.quantization_version", "uint32", 2))
    if applied:
        kept = [entry for entry in kept if not entry[0].startswith(ROTATION_KEYS)]
        return kept + rotation_keys(applied)
    # a rotated source stays rotated: its keys travel; a silent PN one is refused here
    source = read_rotation(file, declared) if was_pn else Rotation()
    if (has_pn or was_pn) and not any(entry[0].startswith(ROTATION_KEYS) for entry in kept):
        kept += rotation_keys(source)
    return kept


__all__ = ["MIXES", "Decision", "Mix", "TensorReport", "plan", "quantize_file"]
