"""Two runs side by side: the first step that differs, what agreed before it, by how much.

Steps are compared in program order and over all positions: a step reads only steps before it, at
its own and earlier positions, so the first that differs is where the fault came in, whatever
chunks the runs were fed in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pnrt.debug.compare import ordered
from pnrt.debug.sides import Live, Recorded, Remote
from pnrt.debug.trace import Trace, canonical
from pnrt.errors import ModelError

Side = Recorded | Live | Remote
Progress = Callable[[str, int, int], None]
# what two runs should share, and where the index of a trace has it
SETTINGS = ("activations", "kv", "rotation")


@dataclass
class StepDifference:
    """One step of both runs, or of one.

    Attributes:
        state: "equal" (bits), "within" (the tolerance), "differs", "shape" (of another size),
            "only in A", "only in B".
        rows, elements: how many differ; total: elements compared.
        first: (position, element) of the first difference; element None where only hashes are.
        a, b: its two readings; a_bits, b_bits: their float32 patterns.
        ulp, relative_rms, max_error: the largest distance in float32 steps, sqrt(sum (b - a)^2 /
            sum a^2), the largest |b - a|; None where only hashes are.
    """

    name: str
    op: str
    state: str = "equal"
    rows: int = 0
    elements: int = 0
    total: int = 0
    first: tuple[int, int | None] | None = None
    a: float | None = None
    b: float | None = None
    a_bits: str = ""
    b_bits: str = ""
    ulp: int | None = 0
    relative_rms: float | None = 0.0
    max_error: float | None = 0.0

    @property
    def agrees(self) -> bool:
        return self.state in ("equal", "within")


@dataclass
class Report:
    """What `compare_runs` found.

    Attributes:
        a, b: names of the sides; runs: the index of each without its steps.
        steps: in program order. notes: what else differs between the runs.
        first: number of the first step that differs, None without one.
        blame: of that step, as pnrt.debug.blame makes it, or None.
    """

    a: str
    b: str
    runs: list[dict[str, Any]]
    tolerance: float
    steps: list[StepDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: int | None = None
    blame: dict[str, Any] | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        return self.first is None


def difference(
    a: Side,
    b: Side,
    tokens: Sequence[int],
    *,
    chunks: tuple[int, int] = (512, 512),
    all: bool = False,
    tolerance: float = 0.0,
    progress: Progress | None = None,
) -> Report:
    """Run both sides on the same tokens, compare every step, and blame the first that differs.

    Args:
        chunks: tokens fed at a time, per side. all: logits of every position.
        tolerance: relative RMS a step may differ by; 0 demands bits.
    Raises: ModelError where runs of the sides cannot be compared.
    """
    from pnrt.debug.blame import blame

    with tempfile.TemporaryDirectory(prefix="pnrt-diff-") as folder:
        paths = [
            side.record(tokens, Path(folder) / name, chunk, all)
            for side, name, chunk in zip((a, b), ("a.trace", "b.trace"), chunks, strict=True)
        ]
        with Trace(paths[0]) as left, Trace(paths[1]) as right:
            report = compare_runs(left, right, a.name, b.name, tolerance, progress)
            if report.first is not None:
                report.blame = blame(report, (a, b), (left, right))
    return report


def compare_runs(
    left: Trace,
    right: Trace,
    a: str,
    b: str,
    tolerance: float = 0.0,
    progress: Progress | None = None,
) -> Report:
    """Compare two traces of the same tokens, step by step.

    Raises: ModelError for traces of other tokens, or without a step in common.
    """
    for ours, theirs in ((left.index, right.index), (right.index, left.index)):
        if ours["tokens"] != theirs["tokens"]:
            raise ModelError(
                f"{a} ran {len(left.index['tokens'])} tokens, {b} "
                f"{len(right.index['tokens'])} others; runs of the same tokens can be compared. "
                "Record one of them again, with --tokens as the other's index has them."
            )
    runs = [{k: v for k, v in t.index.items() if k != "steps"} for t in (left, right)]
    report = Report(a, b, runs, tolerance, notes=_notes(*runs))
    names = list(left.steps)
    names += [name for name in right.steps if name not in left.steps]
    if not set(left.steps) & set(right.steps):
        raise ModelError(
            f"{a} and {b} have no step in common: A has {', '.join(list(left.steps)[:3])}, B "
            f"{', '.join(list(right.steps)[:3])}; names must match. Compare runs of one program."
        )
    for done, name in enumerate(names):
        if progress:
            progress("comparing", done, len(names))
        report.steps.append(_step(left, right, name, tolerance))
    # a step one run did not record says nothing; one of another shape does
    apart = [i for i, s in enumerate(report.steps) if s.state in ("differs", "shape")]
    report.first = apart[0] if apart else None
    missing = sum(s.state.startswith("only") for s in report.steps)
    if missing:
        report.notes.append(f"{missing} steps are in one of the runs only")
    return report


def _notes(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What else is different about two runs."""
    notes = [
        f"{key}: {ours[key]} in A, {theirs[key]} in B"
        for key in SETTINGS
        if ours.get(key) != theirs.get(key)
    ]
    if ours["model"]["sha256"] != theirs["model"]["sha256"]:
        notes.append(
            f"the models are two files: {ours['model']['name']} {ours['model']['sha256'][:12]} in "
            f"A, {theirs['model']['name']} {theirs['model']['sha256'][:12]} in B"
        )
    return notes


def _step(left: Trace, right: Trace, name: str, tolerance: float) -> StepDifference:
    ours, theirs = left.steps.get(name), right.steps.get(name)
    entry = ours or theirs
    out = StepDifference(name, entry["op"])
    if ours is None or theirs is None:
        out.state = f"only in {'B' if ours is None else 'A'}"
        return out
    # runs may have kept the logits of more or fewer positions
    first = max(ours["start"], theirs["start"])
    stop = min(e["start"] + e["shape"][0] for e in (ours, theirs))
    if ours["shape"][1] != theirs["shape"][1] or stop <= first:
        out.state = "shape"
        return out
    out.total = (stop - first) * ours["shape"][1]
    if ours["sha256"] == theirs["sha256"] and ours["shape"] == theirs["shape"]:
        return out
    cuts = [slice(first - e["start"], stop - e["start"]) for e in (ours, theirs)]
    rows = left.rows(name)[cuts[0]] != right.rows(name)[cuts[1]]
    if not rows.any():
        return out
    out.state, out.rows = "differs", int(rows.sum())
    if ours["values"] is None or theirs["values"] is None:
        out.first = (first + int(rows.argmax()), None)
        out.ulp = out.relative_rms = out.max_error = None
        return out
    measure(out, left.values(name)[cuts[0]], right.values(name)[cuts[1]], first)
    if tolerance and out.relative_rms <= tolerance:
        out.state = "within"
    return out


def measure(out: StepDifference, x: np.ndarray, y: np.ndarray, first: int = 0) -> None:
    """Fill in how far [T, W] float32 y is from x, in a step that differs."""
    x, y = canonical(x), canonical(y)
    apart = x.view(np.uint32) != y.view(np.uint32)
    out.elements = int(apart.sum())
    t, n = (int(i) for i in np.argwhere(apart)[0])
    out.first = (first + t, n)
    out.a, out.b = float(x[t, n]), float(y[t, n])
    out.a_bits, out.b_bits = (f"0x{v[t, n].view(np.uint32):08x}" for v in (x, y))
    with np.errstate(all="ignore"):
        # equal infinities are no distance apart
        error = np.where(apart, y.astype(np.float64) - x, 0.0)
        energy = float(np.square(x.astype(np.float64)).sum())
        squares = float(np.square(error).sum())
        out.max_error = float(np.abs(error).max())
    out.ulp = int(np.abs(ordered(x) - ordered(y))[apart].max())
    out.relative_rms = (squares / energy) ** 0.5 if energy else (np.inf if squares else 0.0)
    if np.isnan(out.relative_rms):
        out.relative_rms = np.inf
