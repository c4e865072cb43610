"""Make failing inputs small: fewer rows, tokens and columns, then simpler values; keep them.

A saved case is an .npz that NumPy alone reads: the inputs under their names, and `case`, `backend`,
`found`, `pnrt` as text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pnrt import __version__
from pnrt.container.writer import atomic
from pnrt.debug.npz import read_npz
from pnrt.debug.selftest_base import Arrays, Op, Parameters
from pnrt.errors import FileError

if TYPE_CHECKING:
    from pnrt.backend import Backend
    from pnrt.debug.selftest import Case

# runs of a failing case spent on making it smaller
TRIES = 400
TEXTS = ("case", "backend", "found", "pnrt")


def smallest(
    op: Op, p: Parameters, arrays: Arrays, fails: Callable[[Arrays], bool], tries: int = TRIES
) -> Arrays:
    """The smallest inputs found for which fails() still holds.

    Args:
        op, p: what the arrays are inputs of.
        fails: runs inputs; must hold for `arrays`.
        tries: how often it may be called.
    """
    left = [tries]

    def still(a: Arrays) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(a)

    again = True
    while again and left[0] > 0:
        again = False
        for axis in dict.fromkeys(axis for entry in op.axes for axis in entry.split()[1:]):
            cut = functools.partial(_cut, op, p, arrays, axis)
            count = op.pieces(axis, p, arrays)
            keep = _fewest(count, lambda keep, cut=cut: still(cut(keep)))
            if len(keep) < count:
                arrays, again = cut(keep), True
    for name in op.simple:
        arrays = _simpler(arrays, name, still)
    return arrays


def _fewest(count: int, fails: Callable[[np.ndarray], bool]) -> np.ndarray:
    """Indices out of range(count) that suffice to fail, by leaving out ever smaller pieces."""
    keep = np.arange(count)
    size = count // 2
    while size:
        start = 0
        while start < len(keep) and len(keep) > 1:
            rest = np.delete(keep, slice(start, start + size))
            if len(rest) and fails(rest):
                keep = rest
            else:
                start += size
        size //= 2
    return keep


def _cut(op: Op, p: Parameters, arrays: Arrays, axis: str, keep: np.ndarray) -> Arrays:
    count, out = op.pieces(axis, p, arrays), dict(arrays)
    for entry in op.axes:
        name, *names = entry.split()
        if axis in names:
            i, a = names.index(axis), arrays[name]
            split = a.reshape(*a.shape[:i], count, -1, *a.shape[i + 1 :])
            part = np.take(split, keep, axis=i)
            out[name] = part.reshape(*a.shape[:i], -1, *a.shape[i + 1 :])
    return out


def _simpler(arrays: Arrays, name: str, fails: Callable[[Arrays], bool]) -> Arrays:
    """As many zeros in an array as possible; then ones instead of what is left."""
    flat = arrays[name].reshape(-1)
    shape = arrays[name].shape

    def only(keep: np.ndarray) -> Arrays:
        part = np.zeros_like(flat)
        part[keep] = flat[keep]
        return {**arrays, name: part.reshape(shape)}

    nonzero = np.flatnonzero(flat)
    keep = nonzero[_fewest(len(nonzero), lambda keep: fails(only(nonzero[keep])))]
    if len(keep) == 1 and fails(only(keep[:0])):
        keep = keep[:0]
    arrays = only(keep)
    for value in _candidates(arrays[name]):
        if fails({**arrays, name: value}):
            return {**arrays, name: value}
    return arrays


def _candidates(x: np.ndarray) -> Iterator[np.ndarray]:
    yield (x != 0).astype(x.dtype)
    yield np.sign(x)
    yield np.rint(x)


def save(path: Path, engine: Backend, case: Case, arrays: Arrays, found: str) -> None:
    """Write a case with its inputs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {"case": str(case), "backend": engine.name, "found": found, "pnrt": __version__}
    with atomic(path) as stream:
        np.savez(stream, **arrays, **{name: np.array(text) for name, text in texts.items()})


def load(path: Path) -> tuple[Case, Arrays]:
    """A saved case. Raises FileError for anything else."""
    from pnrt.debug.selftest import OPS, parse_case

    held = read_npz(path, "a case saved by `pnrt selftest --save` is needed. Check the path.")
    if "case" not in held:
        raise FileError(
            f"{path}: holds {', '.join(held) or 'nothing'}, no `case`; a case saved by "
            "`pnrt selftest --save` is needed. Check the path."
        )
    case = parse_case(str(held["case"]))
    arrays = {name: a for name, a in held.items() if name not in TEXTS}
    expected = case.make()
    if {n: (a.dtype, a.ndim) for n, a in arrays.items()} != {
        n: (a.dtype, a.ndim) for n, a in expected.items()
    }:
        raise FileError(
            f"{path}: its arrays are {_kinds(arrays)}; {OPS[case.op].name} takes "
            f"{_kinds(expected)}. Save the case again."
        )
    return case, arrays


def _kinds(arrays: Arrays) -> str:
    return ", ".join(f"{n} {a.dtype} of {a.ndim} axes" for n, a in arrays.items()) or "missing"
