"""Try every op of a backend on a grid of formats, shapes and data, before two judges.

The first judge is the reference: the bits must be its bits. The second is the exact value: the
result must lie within the bound derived from the op's own roundings, which also tries the reference
itself. A case is a string that names it and runs it again:

    matmul(format=pn4t,N=33,K=2112,T=8,activations=q8_0,data=bytes,seed=0)

A failing case is cut down to the smallest inputs that still fail and can be kept as an .npz file.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pnrt import backend as backends
from pnrt.backend import Backend
from pnrt.debug import shrink
from pnrt.debug.selftest_base import Arrays, Op
from pnrt.debug.selftest_ops import OPS
from pnrt.errors import DeviceError, FormatError, ModelError
from pnrt.formats import get

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Case:
    """One point of the grid.

    op: its name in OPS; parameters: sizes and choices, all that decides the inputs, seed included.
    """

    op: str
    parameters: dict[str, Any]

    def __str__(self) -> str:
        inside = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.op}({inside})"

    def make(self) -> Arrays:
        """The inputs: the same for the same string."""
        words = zlib.crc32(str(self).encode())
        return OPS[self.op].make(self.parameters, np.random.default_rng(words))


@dataclass
class Failure:
    """A case that did not pass.

    Attributes:
        kind: "bits" (not the reference's), "bound" (too far from the exact value), "refused" (a
            kernel of the table that would not run) or "crashed".
        text: what was found, with the first and the worst element.
        smallest: sizes and text of the smallest inputs that fail in the same way.
        file: where they were saved; command: what runs them again.
    """

    case: str
    kind: str
    text: str
    smallest: str = ""
    file: str = ""
    command: str = ""


@dataclass
class Report:
    """What a selftest did.

    Attributes:
        backend, seed: what ran; executed: cases per op; judged: results per judge, "exactly" being
            the results that had to equal the exact value.
        skipped: reason -> cases; failures: every failing case; seconds: in all.
        untested: what the backend's table has and no case of the whole grid tries.
    """

    backend: str
    seed: int
    executed: dict[str, int] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        return not self.failures and sum(self.executed.values()) > 0


def parse_case(text: str) -> Case:
    """The case a string names. Raises FormatError that says what a case looks like."""
    match = re.fullmatch(r"\s*(\w+)\((.*)\)\s*", text)
    if not match or match[1] not in OPS:
        raise FormatError(
            f"case {text!r}: not a case; it is written OP(name=value,...) as in "
            f"'{next(cases(['matmul']))}', with an OP of {', '.join(OPS)}. Copy one from a report."
        )
    given = {}
    for part in filter(None, map(str.strip, match[2].split(","))):
        name, _, value = part.partition("=")
        given[name.strip()] = _value(value.strip())
    op = OPS[match[1]]
    example = next(op.grid()) | {"seed": 0}
    if set(given) != set(example):
        raise FormatError(
            f"case {text!r}: its names are {', '.join(given) or 'missing'}; {op.name} takes "
            f"{', '.join(example)}, all of them. An example: {Case(op.name, example)}"
        )
    _check_values(text, op, given, example)
    return Case(op.name, {name: given[name] for name in example})


def _check_values(text: str, op: Op, given: dict, example: dict) -> None:
    for name, value in given.items():
        if isinstance(example[name], str) and value not in _allowed(op.name, name):
            allowed = ", ".join(sorted(_allowed(op.name, name)))
            raise FormatError(f"case {text!r}: {name} is {value!r}; it is one of {allowed}.")
        low = 0 if name in ("seed", "start", "skipped") else 1
        if isinstance(example[name], int) and not (isinstance(value, int) and value >= low):
            raise FormatError(
                f"case {text!r}: {name} is {value!r}; a whole number from {low} is needed."
            )
    if "format" in given and "K" in given:
        get(given["format"]).row_bytes(given["K"])


@functools.cache
def _allowed(op: str, name: str) -> frozenset[str]:
    return frozenset(p[name] for p in OPS[op].grid())


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def cases(
    ops: list[str] | None = None, formats: list[str] | None = None, seed: int = 0
) -> Iterator[Case]:
    """The grid.

    Args:
        ops: names or patterns as of fnmatch.
        formats: names; ops that read no weights of a format are left out then.
    """
    for op in OPS.values():
        if ops is not None and not any(fnmatch.fnmatchcase(op.name, o) for o in ops):
            continue
        for p in op.grid(seed):
            if formats is None or p.get("format") in formats:
                yield Case(op.name, {**p, "seed": seed})


def judge(engine: Backend, op: Op, p: dict[str, Any], a: Arrays) -> tuple[str, str, Counter]:
    """Run inputs and hold the result against both judges.

    Returns:
        kind of failure ("" if none), text, and how many results each judge decided.
    """
    with np.errstate(all="ignore"):
        expected = op.expected(p, a)
        truth, bound = op.truth(p, a)
    count = Counter(bits=expected.size, bound=int(np.isfinite(bound).sum()))
    count["exactly"] = int((np.isfinite(bound) & (bound == 0)).sum())
    try:
        got = op.run(engine, p, {name: array.copy() for name, array in a.items()})
    except DeviceError as error:
        return "refused", str(error), Counter()
    except Exception as error:
        # whatever a kernel throws is a finding about that kernel, and the grid goes on
        return "crashed", f"{type(error).__name__}: {error}", Counter()
    if got.shape != expected.shape:
        return "bits", f"shape {list(got.shape)}; needed {list(expected.shape)}", count
    same = got.view(np.uint32) == expected.view(np.uint32)
    wrong = ~(same | (np.isnan(got) & np.isnan(expected)))
    if wrong.any():
        return "bits", _difference(got, expected, wrong), count
    with np.errstate(invalid="ignore"):
        near = (got == truth) | (np.abs(got - truth) <= bound)
    far = np.isfinite(bound) & ~near
    if far.any():
        where = tuple(int(i) for i in np.argwhere(far)[0])
        return (
            "bound",
            f"{int(far.sum())} of {far.size} results are farther from the exact value than their "
            f"roundings allow, the reference's too: at {list(where)} found {got[where]!r}, exact "
            f"{truth[where]!r}, allowed distance {np.broadcast_to(bound, far.shape)[where]:.3g}",
            count,
        )
    return "", "", count


def _difference(got: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> str:
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got.astype(np.float64) - expected)
    error = np.where(wrong, np.nan_to_num(error, nan=np.inf), -1)

    def show(where: tuple[int, ...]) -> str:
        at = [int(i) for i in where]
        g, e = got[where], expected[where]
        return (
            f"at {at} found {g!r} ({g.view(np.uint32):#010x}), "
            f"needed {e!r} ({e.view(np.uint32):#010x})"
        )

    first = tuple(np.argwhere(wrong)[0])
    worst = np.unravel_index(int(error.argmax()), error.shape)
    text = f"{int(wrong.sum())} of {wrong.size} results differ: {show(first)}"
    return text if tuple(worst) == first else f"{text}; worst {show(worst)}"


def selftest(
    backend: str | Backend = "cpu",
    *,
    ops: list[str] | None = None,
    formats: list[str] | None = None,
    seed: int = 0,
    case: str | None = None,
    save: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run the grid, or one case.

    Args:
        backend: a name, or an open backend.
        ops, formats, seed: which part of the grid, as of `cases`.
        case: a case's string, or the path of a saved one, instead of the grid.
        save: folder for the smallest failing inputs of each op and kind, as .npz.
        progress: told (case, done, total).
    Raises:
        FormatError: an unknown format or malformed case; DeviceError: an unknown backend.
    """
    for name in formats or ():
        get(name)
    start = time.perf_counter()
    engine = backends.open(backend, threads) if isinstance(backend, str) else backend
    report = Report(engine.name, seed, untested=untested(engine))
    if case is None:
        todo = [(c, None) for c in cases(ops, formats, seed)]
    else:
        todo = [shrink.load(Path(case)) if case.endswith(".npz") else (parse_case(case), None)]
    table = {(op, form) for op, form, _ in engine.table()}
    executed, skipped, judged = Counter(), Counter(), Counter()
    for done, (each, arrays) in enumerate(todo):
        if progress:
            progress(str(each), done, len(todo))
        op = OPS[each.op]
        missing = [need for need in op.needs(each.parameters) if need not in table]
        if missing:
            skipped[_reason(engine.name, *missing[0])] += 1
            continue
        arrays = each.make() if arrays is None else arrays
        kind, text, counts = judge(engine, op, each.parameters, arrays)
        executed[each.op] += 1
        judged += counts
        if kind:
            failure = Failure(str(each), kind, text, command=_command(engine.name, str(each)))
            report.failures.append(failure)
            # the first of each kind is cut down: the others are most likely its relatives
            relatives = [f for f in report.failures if _family(f) == _family(failure)]
            if len(relatives) == 1:
                _cut_down(engine, each, arrays, failure, save)
    report.executed, report.skipped, report.judged = map(dict, (executed, skipped, judged))
    report.seconds = time.perf_counter() - start
    return report


def _reason(backend: str, op: str, form: str) -> str:
    return f"backend {backend} has no {op}" + ("" if form == "-" else f" for {form}")


def _command(backend: str, case: str) -> str:
    return f"pnrt selftest --backend {backend} --case '{case}'"


def _family(failure: Failure) -> tuple[str, str, str]:
    form = re.search(r"format=(\w+)", failure.case)
    return failure.case.split("(")[0], failure.kind, form[1] if form else ""


def _cut_down(
    engine: Backend, case: Case, arrays: Arrays, failure: Failure, save: Path | None
) -> None:
    """Find the smallest inputs that fail in the same way; keep them if asked to."""
    op, p = OPS[case.op], case.parameters

    def fails(a: Arrays) -> bool:
        try:
            return judge(engine, op, p, a)[0] == failure.kind
        except (ValueError, IndexError, ZeroDivisionError, FormatError, ModelError):
            # the judges cannot take these shapes: not a smaller form of the case
            return False

    small = shrink.smallest(op, p, arrays, fails)
    _, text, _ = judge(engine, op, p, small)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in small.items())
    failure.smallest = f"{shapes}: {text}"
    if save is not None:
        form = f"-{p['format']}" if "format" in p else ""
        path = save / f"{case.op}{form}-{failure.kind}-{zlib.crc32(str(case).encode()):08x}.npz"
        shrink.save(path, engine, case, small, text)
        failure.file, failure.command = str(path), _command(engine.name, str(path))


def untested(backend: Backend) -> list[str]:
    """Entries of a backend's table that no case of the grid needs: "op" or "op format"."""
    needed = {need for case in cases() for need in OPS[case.op].needs(case.parameters)}
    left = {(op, form) for op, form, _ in backend.table()} - needed
    return sorted(op if form == "-" else f"{op} {form}" for op, form in left)
