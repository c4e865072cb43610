"""A run of a model on file: every step's output by name, in program order. RUN.trace.

The file, little endian, readable with NumPy alone:

    0   8 bytes   "PNTRACE1"
    8   uint64    offset of the index
    16  uint64    bytes of the index
    24  32 bytes  sha256 of the index
    64  arrays, each on a multiple of 64 bytes
    index, JSON in UTF-8, at the end of the file

    raw = np.memmap("RUN.trace", np.uint8, "r")
    at, size = map(int, raw[8:24].view("<u8"))
    index = json.loads(raw[at : at + size].tobytes())
    step = index["steps"][17]
    T, W = step["shape"]
    y = raw[step["values"] :][: 4 * T * W].view("<f4").reshape(T, W)

The index tells model (name, bytes, sha256, architecture), backend, device, threads, activations,
kv, rotation, versions, tokens, text, chunk, taps and, step by step: name, op, inputs, weights,
output, start (position of the first row), shape [T, W], min, max, mean, rms (of the finite values;
null without any), nan, inf (how many), sha256 (of the values with every NaN as 0x7fc00000), rows
(offset of uint64 [T]: the first 8 bytes of each row's own sha256) and values (offset, null in a
digest).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pnrt.container.mapped import map_file
from pnrt.container.writer import atomic
from pnrt.errors import FileError, ModelError

if TYPE_CHECKING:
    from pnrt.backend import Tap
    from pnrt.generate import Model
    from pnrt.program import Program, Step

MAGIC = b"PNTRACE1"
HEAD = 64
# bytes hashed in one step
PIECE = 16 << 20

Progress = Callable[[str, int, int], None]


def canonical(x: np.ndarray) -> np.ndarray:
    """float32, contiguous, every NaN the same NaN: what is hashed and compared."""
    x = np.ascontiguousarray(x, np.float32)
    nan = np.isnan(x)
    return np.where(nan, np.float32(np.nan), x) if nan.any() else x


def row_hashes(x: np.ndarray) -> np.ndarray:
    """x [T, W] float32 -> uint64 [T], the first 8 bytes of the sha256 of each row."""
    digests = b"".join(hashlib.sha256(row).digest()[:8] for row in canonical(x))
    return np.frombuffer(digests, "<u8")


@dataclass
class Numbers:
    """What is known of a step's output [T, W], summed up chunk by chunk."""

    count: int = 0
    least: float = np.inf
    most: float = -np.inf
    total: float = 0.0
    squares: float = 0.0
    nan: int = 0
    inf: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, x: np.ndarray) -> None:
        """Take in further rows, canonical."""
        self.digest.update(x)
        self.rows.append(row_hashes(x))
        good = np.isfinite(x)
        nan = int(np.isnan(x).sum())
        self.nan += nan
        self.inf += int(x.size - good.sum()) - nan
        if finite := int(good.sum()):
            values = x[good].astype(np.float64)
            self.count += finite
            self.least = min(self.least, float(values.min()))
            self.most = max(self.most, float(values.max()))
            self.total += float(values.sum())
            self.squares += float(values @ values)

    def summary(self) -> dict[str, Any]:
        """As the index has it."""
        n = self.count
        known = (self.least, self.most, self.total / n, (self.squares / n) ** 0.5) if n else None
        keys = ("min", "max", "mean", "rms")
        return {
            **dict(zip(keys, known or (None,) * 4, strict=True)),
            "nan": self.nan,
            "inf": self.inf,
            "sha256": self.digest.hexdigest(),
        }


class Recorder:
    """An observer that keeps a run; give it a stream to write the arrays into.

    Args:
        T: tokens of the run; wanted: how many of the last get logits.
        widths: step name -> width (Program.widths).
        taps: globs of step names; all when empty.
        stream: where arrays go, at absolute offsets; None to keep numbers only.
        full: write values too, not only digests.
    """

    def __init__(
        self,
        program: Program,
        T: int,
        wanted: int,
        widths: dict[str, int],
        taps: Sequence[str] = (),
        stream: BinaryIO | None = None,
        full: bool = False,
    ):
        head = {step.name for step in program.head}
        self.stream, self.steps, self.numbers, at = stream, {}, {}, HEAD
        for step in select(program, taps):
            rows = wanted if step.name in head else T
            first, width = T - rows, widths[step.name]
            entry = {
                "name": step.name, "op": step.op, "inputs": list(step.inputs),
                "weights": list(step.weights), "output": step.output, "start": first,
                "shape": [rows, width], "rows": at, "values": None,
            }  # fmt: skip
            at = _aligned(at + 8 * rows)
            if full:
                entry["values"] = at
                at = _aligned(at + 4 * rows * width)
            self.steps[step.name], self.numbers[step.name] = entry, Numbers()
        self.nbytes = at

    def __call__(self, tap: Tap) -> None:
        """Take in one step of the run."""
        entry = self.steps.get(tap.step.name)
        if entry is None or tap.T == 0:
            return
        x = canonical(tap.values())
        self.numbers[tap.step.name].add(x)
        if self.stream and entry["values"] is not None:
            self.stream.seek(entry["values"] + (tap.start - entry["start"]) * x.shape[1] * 4)
            self.stream.write(x.astype("<f4"))

    def summary(self) -> list[dict[str, Any]]:
        """The steps as the index has them."""
        return [{**entry, **self.numbers[name].summary()} for name, entry in self.steps.items()]

    def finish(self, about: dict[str, Any]) -> dict[str, Any]:
        """Write row hashes and index; the index."""
        index = {"format": "pnrt trace", "version": 1, **about, "steps": self.summary()}
        if self.stream:
            for name, entry in self.steps.items():
                self.stream.seek(entry["rows"])
                self.stream.write(b"".join(part.tobytes() for part in self.numbers[name].rows))
            text = json.dumps(index, allow_nan=False).encode()
            place = np.array([self.nbytes, len(text)], "<u8").tobytes()
            self.stream.seek(0)
            self.stream.write(MAGIC + place + hashlib.sha256(text).digest())
            self.stream.seek(self.nbytes)
            self.stream.write(text)
        return index


def _aligned(n: int) -> int:
    return -(-n // 64) * 64


def select(program: Program, taps: Sequence[str]) -> list[Step]:
    """The steps whose names match one of the globs; all without a glob.

    Raises: ModelError for a glob that matches nothing.
    """
    names = [step.name for step in program.steps]
    for glob in taps:
        if not any(fnmatchcase(name, glob) for name in names):
            shown = ", ".join(names[:3] + names[-2:])
            raise ModelError(
                f"--taps {glob}: matches none of the {len(names)} steps, which are named {shown}; "
                "a glob such as 'blk.*.ffn*' is needed. `pnrt trace` without --taps lists all."
            )
    chosen = [n for n in names if not taps or any(fnmatchcase(n, glob) for glob in taps)]
    return [step for step in program.steps if step.name in set(chosen)]


def record(
    model: Model,
    tokens: Sequence[int],
    path: Path | None = None,
    *,
    taps: Sequence[str] = (),
    full: bool = False,
    chunk: int = 512,
    all: bool = False,
    about: dict[str, Any] | None = None,
    also: Sequence[Callable[[Tap], None]] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run tokens from an empty state and record every step.

    Args:
        path: the trace to write, atomically; None to compute the index only.
        taps: globs of step names; full: with values; all: logits of every position.
        about: further entries of the index.
        also: further observers, told each tap before it is recorded.
    Returns: the index.
    """
    tell = progress or (lambda what, done, total: None)
    file, T = model.file, len(tokens)
    widths = model.program.widths(lambda tensor: file.tensors[tensor].rows)
    options = (model.program, T, T if all else 1, widths, taps)
    step = max(1, min(chunk, model.session.chunk))
    total, done = -(-T // step) * len(model.program.body) + len(model.program.head), 0

    def run(recorder: Recorder) -> dict[str, Any]:
        def observe(tap: Tap) -> None:
            nonlocal done
            done += 1
            tell(f"tracing, {tap.step.name}", min(done, total), total)
            for other in (*also, recorder):
                other(tap)

        model.reset()
        model.session.observer = observe
        try:
            model.eval(tokens, chunk, all)
        finally:
            model.session.observer = None
        return recorder.finish(
            {**describe(model), "tokens": [int(t) for t in tokens], "chunk": chunk}
            | {"taps": list(taps)}
            | (about or {})
        )

    if path is None:
        return run(Recorder(*options))
    needed = Recorder(*options, full=full).nbytes
    with atomic(path, needed) as stream:
        return run(Recorder(*options, stream=stream, full=full))


def describe(model: Model) -> dict[str, Any]:
    """What a run depends on: model, backend, precision, versions."""
    from importlib.metadata import version

    from pnrt import __version__
    from pnrt.machine import cpu_target

    session = model.session
    return {
        "model": {
            "name": model.file.path.name,
            "bytes": model.file.size,
            "sha256": file_hash(model.file.path),
            "architecture": model.config.architecture,
        },
        "backend": session.backend.name,
        "device": cpu_target()[0],
        "threads": session.threads,
        "activations": session.activations,
        "kv": session.kv,
        "rotation": model.rotation.kind,
        "versions": {
            "pnrt": __version__,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "numba": version("numba"),
        },
    }


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def is_trace(path: Path) -> bool:
    """Whether a file starts as a trace does."""
    try:
        with open(path, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class Trace:
    """An open trace, memory-mapped; a context manager.

    index: as in the file. steps: name -> entry, in program order.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._map: mmap.mmap | None = map_file(self.path, "a trace")
        try:
            self.index = self._index()
            self.steps = {entry["name"]: entry for entry in self.index["steps"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._broken(f"its index cannot be understood ({error!r})") from error

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Give the map back."""
        self._map = None

    @property
    def full(self) -> bool:
        """Whether values are there, not only digests."""
        return all(entry["values"] is not None for entry in self.steps.values())

    def values(self, name: str) -> np.ndarray:
        """[T, W] float32 of a step, a view of the file; FileError if they are not what was hashed.

        KeyError for a step that is not there, ValueError in a digest.
        """
        entry = self.steps[name]
        if entry["values"] is None:
            raise ValueError(f"{self.path}: {name}: a digest has no values")
        T, W = entry["shape"]
        x = self._array("<f4", T * W, entry["values"]).reshape(T, W)
        if hashlib.sha256(np.ascontiguousarray(x)).hexdigest() != entry["sha256"]:
            raise self._broken(f"the values of {name} do not have their recorded sha256")
        return x

    def rows(self, name: str) -> np.ndarray:
        """uint64 [T]: the hash of each row of a step."""
        entry = self.steps[name]
        return self._array("<u8", entry["shape"][0], entry["rows"])

    def _array(self, kind: str, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(self._map, kind, count, offset)

    def _index(self) -> dict[str, Any]:
        head, size = bytes(self._map[:HEAD]), len(self._map)
        if not head.startswith(MAGIC):
            raise FileError(
                f"{self.path}: its first bytes are {head[:8]!r}; a trace starts with "
                f"{MAGIC!r}. `pnrt trace FILE -p TEXT -o RUN.trace` makes one."
            )
        at, length = (int(n) for n in np.frombuffer(head.ljust(HEAD, b"\0"), "<u8", 2, 8))
        text = bytes(self._map[at : at + length])
        if at + length != size or hashlib.sha256(text).digest() != head[24:56]:
            raise self._broken(f"{size} bytes, and no intact index at byte {at}")
        index = json.loads(text)
        if index["version"] != 1:
            raise self._broken(f"version {index['version']}; this pnrt reads version 1")
        for entry in index["steps"]:
            T, W = entry["shape"]
            ends = [entry["rows"] + 8 * T]
            if entry["values"] is not None:
                ends.append(entry["values"] + 4 * T * W)
            if min(T, W) < 0 or max(ends) > at:
                raise self._broken(f"the arrays of {entry['name']} lie outside it")
        return index

    def _broken(self, what: str) -> FileError:
        return FileError(
            f"{self.path}: {what}; a whole, unchanged trace is needed. Record it again."
        )
