"""Two files side by side: metadata, tensors, types, and how far the weights are apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pnrt.container.gguf import GGUFFile, TensorInfo, open_gguf

Progress = Callable[[str, int, int], None]

CHUNK = 1 << 22


@dataclass
class TensorDifference:
    """One tensor of both files, or of one.

    Attributes:
        kind: "same" (bytes), "equal" (values, other bytes), "differs", "shape", "only in A",
            "only in B" or "unknown type".
        relative_rms: sqrt(sum (b - a)^2 / sum a^2); max_error: largest |b - a|.
        ulp: largest distance in float32 steps.
        first: (row, block) of the first difference, in blocks of A's format; None without one.
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""
    relative_rms: float = 0.0
    max_error: float = 0.0
    ulp: int = 0
    first: tuple[int, int] | None = None


def compare_files(
    a: str | os.PathLike[str], b: str | os.PathLike[str], progress: Progress | None = None
) -> dict[str, Any]:
    """Compare two GGUF files.

    Args:
        progress: called with (tensor name, tensors done, tensors in all).
    Returns:
        a dict ready for JSON: metadata, a list of {"key", "a", "b"} that differ (None: missing),
        tensors, a list of TensorDifference in A's order, and equal: whether nothing differs.
    """
    with open_gguf(a) as left, open_gguf(b) as right:
        metadata = _metadata(left, right)
        names = list(dict.fromkeys([*left.tensors, *right.tensors]))
        tensors = []
        for done, name in enumerate(names):
            if progress:
                progress(name, done, len(names))
            tensors.append(_tensor(left, right, name))
    same = not metadata and all(t.kind == "same" for t in tensors)
    return {"metadata": metadata, "tensors": tensors, "equal": same}


def _metadata(left: GGUFFile, right: GGUFFile) -> list[dict[str, Any]]:
    ours = {key: raw for key, _, raw in left.raw_metadata()}
    theirs = {key: raw for key, _, raw in right.raw_metadata()}
    return [
        {"key": key, "a": _shown(left, key), "b": _shown(right, key)}
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    ]


def _shown(file: GGUFFile, key: str) -> str | None:
    if key not in file.metadata:
        return None
    value = file.metadata[key]
    if not isinstance(value, str | int | float | bool):
        return f"{len(value)} values"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensor(left: GGUFFile, right: GGUFFile, name: str) -> TensorDifference:
    a, b = left.tensors.get(name), right.tensors.get(name)
    if a is None or b is None:
        return TensorDifference(name, f"only in {'B' if a is None else 'A'}", _type(a), _type(b))
    out = TensorDifference(name, "same", _type(a), _type(b))
    if a.shape != b.shape:
        out.kind, out.a, out.b = "shape", f"{a.shape}", f"{b.shape}"
    elif a.type_id == b.type_id and np.array_equal(left.data(name), right.data(name)):
        return out
    elif a.format is None or b.format is None:
        out.kind = "unknown type"
    else:
        _values(left, right, out, a, b)
    return out


def _type(info: TensorInfo | None) -> str:
    return info.type_name if info else ""


def _values(
    left: GGUFFile, right: GGUFFile, out: TensorDifference, a: TensorInfo, b: TensorInfo
) -> None:
    """Fill in the distance of two tensors of one shape, row chunk by row chunk."""
    step = max(1, CHUNK // a.columns)
    error = energy = 0.0
    ours, theirs = left.rows(a.name), right.rows(a.name)
    for start in range(0, a.rows, step):
        x = a.format.decode(np.ascontiguousarray(ours[start : start + step]))
        y = b.format.decode(np.ascontiguousarray(theirs[start : start + step]))
        with np.errstate(invalid="ignore", over="ignore"):
            difference = y.astype(np.float64) - x
        error += float(np.square(difference).sum())
        energy += float(np.square(x.astype(np.float64)).sum())
        # a NaN on either side must show as NaN, not vanish in a maximum
        out.max_error = float(np.maximum(out.max_error, np.abs(difference).max()))
        out.ulp = max(out.ulp, int(np.abs(_ordered(y) - _ordered(x)).max()))
        if out.first is None and (x != y).any():
            row, column = np.argwhere(x != y)[0]
            out.first = (start + int(row), int(column) // a.format.block)
    out.relative_rms = (error / energy) ** 0.5 if energy else float(error > 0)
    out.kind = "equal" if out.first is None else "differs"


def _ordered(x: np.ndarray) -> np.ndarray:
    """float32 -> int64 that counts representable numbers from zero, sign included."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
