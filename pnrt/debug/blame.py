"""Whose fault a difference is: the step again on both sides, the reference as judge, split small.

The first step that differs has inputs that agree. From them the step is run again on each side that
can run, and by the reference with each side's weights. A product is then split: a row of the
matrix, a unit of the row, a segment of the unit, one weight; the smallest piece a side gets wrong
is named with what it read and what the file says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pnrt.container.gguf import GGUFFile, open_gguf
from pnrt.debug.trace import Trace, canonical
from pnrt.errors import PnrtError
from pnrt.program import ELEMENTWISE

if TYPE_CHECKING:
    from pnrt.debug.diff import Report, Side
    from pnrt.program import Program, Step

# elements of a row that the reference judges
JUDGED = 64
# rows of the head that a run computes at a time
HEAD_ROWS = 64


def blame(report: Report, sides: tuple[Side, Side], traces: tuple[Trace, Trace]) -> dict[str, Any]:
    """Look into the first step that differs.

    Returns: a dict ready for JSON: step, position, element, inputs (that agreed), again (what each
        side says when run again), judge (whether each side's row is the reference's), verdict, and
        piece: the smallest part that is wrong, or None.
    """
    found = report.steps[report.first]
    entry = traces[0].steps[found.name]
    out = {
        "step": found.name, "op": found.op, "position": found.first and found.first[0],
        "element": found.first and found.first[1], "inputs": entry["inputs"] or ["tokens"],
        "weights": entry["weights"], "again": {}, "judge": {}, "verdict": "", "piece": None,
    }  # fmt: skip
    if found.state == "shape":
        out["verdict"] = "the step has another width or other positions on each side"
        return out
    if found.first[1] is None:
        out["verdict"] = "a digest has no values to look into: record that run with --full"
        return out
    runs = next((side for side in sides if side.file), None)
    if runs is None:
        out["verdict"] = "neither side can run; name the model first to have the step judged"
        return out
    if any(report.runs[0].get(key) != report.runs[1].get(key) for key in ("activations", "kv")):
        out["verdict"] = "the runs have different settings (see the notes), so bits may differ"
        return out
    import pnrt

    options = {**runs.options, "backend": "reference", "threads": None}
    options |= {k: report.runs[0][k] for k in ("activations", "kv")}
    options["context"] = len(report.runs[0]["tokens"])
    with pnrt.load(runs.file, **options) as judge:
        Blame(report, sides, traces, judge, out).run()
    return out


class Blame:
    """The work on one step.

    Args:
        judge: the model of one side on the reference.
        out: the dict to fill.
    """

    def __init__(self, report, sides, traces, judge, out):
        self.sides, self.traces, self.judge, self.out = sides, traces, judge, out
        self.names = ("A", "B")
        self.program: Program = judge.program
        self.activations = judge.session.activations
        self.step: Step = next(s for s in self.program.steps if s.name == out["step"])
        self.t, self.n = out["position"], out["element"]
        self.tokens = np.array(report.runs[0]["tokens"])
        self.states: dict[int, np.ndarray] = {}
        self.entries = [trace.steps[self.step.name] for trace in traces]
        self.recorded = [
            canonical(trace.values(self.step.name)[self.t - entry["start"]])
            for trace, entry in zip(traces, self.entries, strict=True)
        ]

    def run(self) -> None:
        """Fill in the dict."""
        inputs = self._inputs()
        if inputs is None:
            self.out["verdict"] = (
                "its inputs were not recorded: run without --taps to have it split"
            )
            return
        opened: list[GGUFFile | None] = []
        try:
            opened.extend(open_gguf(s.file) if s.file else None for s in self.sides)
            self._again(inputs)
            self._judge(inputs, opened)
            same = self._weights(opened)
            if same is None:
                self._split(inputs)
            self.out["verdict"] = self._verdict()
        finally:
            for file in filter(None, opened):
                file.close()

    def _inputs(self) -> dict[str, np.ndarray] | None:
        """Slot -> rows of all positions, as the step read them; None where not recorded."""
        last: dict[str, str] = {}
        for step in self.program.steps:
            if step.name == self.step.name:
                break
            last[step.output] = step.name
        found = {"tokens": self.tokens} if not self.step.inputs else {}
        for slot in self.step.inputs:
            if slot in self.program.states:
                found[slot] = np.zeros(self.program.states[slot], np.float32)
                continue
            # a file that has no values of a step stops here, as does a slot nobody wrote
            name = last.get(slot)
            trace = next((t for t in self.traces if t.steps.get(name, {}).get("values")), None)
            if trace is None:
                return None
            found[slot] = trace.values(name)
        return found

    def _cut(self, inputs: dict[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows of positions start .. stop of the inputs; caches up to stop, states before start."""
        T, cut = len(self.tokens), {}
        for slot, x in inputs.items():
            if slot.startswith("cache."):
                cut[slot] = x[:stop]
            elif slot in self.program.states:
                cut[slot] = self._state(inputs, slot, start)
            else:
                # rows of the head are those of the last positions
                cut[slot] = x[start - (T - len(x)) : stop - (T - len(x))]
        return cut

    def _state(self, inputs: dict[str, np.ndarray], slot: str, start: int) -> np.ndarray:
        """A state before position `start`, as the reference leaves it; zeros before the first."""
        if start == 0:
            return inputs[slot]
        if start not in self.states:
            earlier = self._cut(inputs, 0, start)
            self.states[start] = self.judge.session.compute(self.step, earlier, 0)[1]
        return self.states[start]

    def _range(self, side: int) -> tuple[int, int]:
        """The positions that a side computed together with t."""
        first, entry = 0, self.entries[side]
        size, T = self.traces[side].index["chunk"], len(self.tokens)
        if self.step in self.program.head:
            first, size = entry["start"], HEAD_ROWS
        start = first + (self.t - first) // size * size
        return start, min(T, start + size)

    def _redo(self, side: int, inputs: dict[str, np.ndarray]) -> np.ndarray | None:
        """Row t of the step, run again by a side among the rows it ran it with."""
        start, stop = self._range(side)
        y = self.sides[side].redo(self.step.name, self._cut(inputs, start, stop), start)
        return None if y is None else canonical(y[self.t - start])

    def _again(self, inputs: dict[str, np.ndarray]) -> None:
        for side, name in enumerate(self.names):
            try:
                y = self._redo(side, inputs)
            except PnrtError as error:
                self.out["again"][name] = f"cannot be run alone ({error})"
                continue
            if y is None:
                self.out["again"][name] = "a recorded run"
            elif _same(y, self.recorded[side]):
                self.out["again"][name] = "the same bits"
            else:
                n = int(_apart(y, self.recorded[side])[0])
                self.out["again"][name] = (
                    f"other bits: {y[n]!r} instead of {self.recorded[side][n]!r} at element {n}"
                )

    def _judge(self, inputs: dict[str, np.ndarray], files: Sequence[GGUFFile | None]) -> None:
        """Whether each side's row is what the reference makes of its own weights."""
        for side, name in enumerate(self.names):
            file = files[side] or next(f for f in files if f)
            apart = _apart(*self.recorded)[:JUDGED]
            expected = self._expected(file, inputs, apart)
            got = self.recorded[side][apart]
            wrong = _apart(expected, got)
            self.out["judge"][name] = {
                "right": not wrong.size,
                "reference": [float(v) for v in expected[:1]],
                "wrong": [int(apart[i]) for i in wrong[:8]],
            }

    def _expected(self, file: GGUFFile, inputs: dict, elements: np.ndarray) -> np.ndarray:
        """The reference's values of some elements of row t, with a file's weights."""
        cut = self._cut(inputs, self.t, self.t + 1)
        if self.step.op == "matmul":
            return self._product(file, elements, cut[self.step.inputs[0]])[0]
        session = self.judge.session
        kept = session.weights
        own: dict[str, Any] = {}
        # a rotation's signs are no tensor
        for tensor in (w for w in self.step.weights if w in file.tensors):
            if self.step.op == "embed":
                own[f"{tensor}:rows"] = (file.tensors[tensor].format.name, file.rows(tensor))
            else:
                own[tensor] = file.values(tensor).reshape(-1)
        session.weights = {**kept, **own}
        try:
            return canonical(session.compute(self.step, cut, self.t)[0][0])[elements]
        finally:
            session.weights = kept

    def _product(self, file: GGUFFile, elements: np.ndarray, x: np.ndarray) -> np.ndarray:
        """x [T, K] times some rows of the step's matrix, by the reference."""
        from pnrt import reference

        tensor = self.step.weights[0]
        rows = file.rows(tensor)[elements]
        return canonical(
            reference.matmul(file.tensors[tensor].format.name, rows, x, self.activations)
        )

    def _weights(self, files: Sequence[GGUFFile | None]) -> dict[str, Any] | None:
        """The first block that two files have differently, as the piece; None without one."""
        from pnrt.debug.pieces import weight_difference

        a, b = files
        if a is None or b is None or a.path == b.path:
            return None
        row = self.n if self.step.op == "matmul" else 0
        if self.step.op == "embed":
            row = int(self.tokens[self.t])
        for tensor in (w for w in self.step.weights if w in a.tensors):
            if piece := weight_difference(a, b, tensor, row):
                self.out["piece"] = piece
                return piece
        return None

    def _split(self, inputs: dict[str, np.ndarray]) -> None:
        """The smallest piece that a wrong side, which can run, gets wrong."""
        from pnrt.debug.pieces import split_product

        wrong = [
            side
            for side, name in enumerate(self.names)
            if not self.out["judge"][name]["right"]
            and self.out["again"][name] == "the same bits"
            and self.sides[side].file
        ]
        if not wrong:
            return
        side = wrong[0]
        if self.step.op != "matmul":
            self.out["piece"] = self._element(side, inputs)
            return
        source = self.step.inputs[0]
        start, stop = self._range(side)
        given = self._cut(inputs, start, stop)
        row = self.out["judge"][self.names[side]]["wrong"][0]

        def found(x: np.ndarray) -> np.float32:
            changed = given[source].copy()
            changed[self.t - start] = x
            y = self.sides[side].redo(self.step.name, {source: changed}, start)
            return canonical(y[self.t - start])[row]

        with open_gguf(self.sides[side].file) as file:

            def expected(x: np.ndarray) -> np.ndarray:
                return self._product(file, np.array([row]), x)[:, 0]

            piece = split_product(
                file, self.step.weights[0], row, given[source][self.t - start], found, expected,
                self.activations,
            )  # fmt: skip
        self.out["piece"] = {"side": self.names[side], **piece}

    def _element(self, side: int, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
        """One element of an op that is no product, with what it was made of."""
        name, cut = self.names[side], self._cut(inputs, self.t, self.t + 1)
        n = self.out["judge"][name]["wrong"][0]
        width = self.entries[side]["shape"][1]
        piece = {"kind": "element", "side": name, "element": n, **_place(self.step, n, width)}
        piece["found"] = float(self.recorded[side][n])
        same = self.step.op in ELEMENTWISE
        piece["inputs"] = {slot: float(x[0, n]) for slot, x in cut.items()} if same else {}
        return piece

    def _verdict(self) -> str:
        right = [self.out["judge"][name]["right"] for name in self.names]
        changed = [n for n in self.names if self.out["again"][n].startswith("other bits")]
        if changed:
            return (
                f"{' and '.join(changed)} gives other bits when the step is run again from the "
                "same inputs: its result depends on more than them (a race, stale or unwritten "
                "memory, a state, an activation kept from an earlier step)"
            )
        if all(right):
            return "each side computes what its own file says: the weights are different"
        if not any(right):
            return "neither side has the reference's bits"
        return (
            f"{self.names[right.index(False)]} is wrong: the reference has the bits of "
            + (self.names[right.index(True)])
        )


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.flatnonzero(x.view(np.uint32) != y.view(np.uint32))


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return not _apart(x, y).size


def _place(step: Step, n: int, width: int) -> dict[str, Any]:
    """Where element n of a step's output lies, in the step's own words."""
    if step.op == "store_kv":
        half = width // 2
        return {"of": "key" if n < half else "value", "column": n % half}
    heads = step.numbers.get("heads", 1)
    if heads > 1:
        return {"head": n // (width // heads), "component": n % (width // heads)}
    return {}
