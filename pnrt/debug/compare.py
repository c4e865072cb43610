"""Two files side by side: metadata, tensors, types, and how far the weights are apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pnrt.container.gguf import GGUFFile
from pnrt.container.kinds import open_any
from pnrt.container.layout import TensorInfo
from pnrt.container.mapped import MappedFile

Progress = Callable[[str, int, int], None]

CHUNK = 1 << 22


@dataclass
class TensorDifference:
    """One tensor of both files, or of one.

    Attributes:
        kind: "same" (bytes), "equal" (values, other bytes), "differs", "shape", "only in A",
            "only in B" or "unknown type" (bytes differ, and nobody can decode them).
        relative_rms: sqrt(sum (b - a)^2 / sum a^2); max_error: largest |b - a|.
            Places that are NaN on both sides count as equal.
        ulp: largest distance in float32 steps.
        first: (row, block) of the first difference, in blocks of A's format; None without one.
        blocks: how many blocks of A's format differ.
        a_hex, b_hex: the bytes of the first block that differs (B's: the block at its weight).
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""
    relative_rms: float = 0.0
    max_error: float = 0.0
    ulp: int = 0
    first: tuple[int, int] | None = None
    blocks: int = 0
    a_hex: str = ""
    b_hex: str = ""


def compare_files(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    progress: Progress | None = None,
    **opening: Any,
) -> dict[str, Any]:
    """Compare two files of any containers.

    Args:
        progress: called with (tensor name, tensors done, tensors in all).
        opening: what else `open_any` takes, for both files.
    Returns:
        a dict ready for JSON: metadata, a list of {"key", "a", "b"} that differ (None: missing),
        tensors, a list of TensorDifference in A's order, notes on a type nobody can decode, and
        equal: whether nothing differs.
    """
    with open_any(a, **opening) as left, open_any(b, **opening) as right:
        metadata = _metadata(left, right)
        names = list(dict.fromkeys([*left.tensors, *right.tensors]))
        tensors = []
        for done, name in enumerate(names):
            if progress:
                progress(name, done, len(names))
            tensors.append(_tensor(left, right, name))
        strange = next((t.name for t in tensors if t.kind == "unknown type"), None)
        notes = [f"{strange}: {_advice(left, right, strange)}"] if strange else []
    same = not metadata and all(t.kind == "same" for t in tensors)
    return {"metadata": metadata, "tensors": tensors, "notes": notes, "equal": same}


def _metadata(left: MappedFile, right: MappedFile) -> list[dict[str, Any]]:
    if isinstance(left, GGUFFile) and isinstance(right, GGUFFile):
        # the stored bytes: types count, and no array has to be decoded
        ours, theirs = ({k: raw for k, _, raw in f.raw_metadata()} for f in (left, right))
    else:
        ours, theirs = left.metadata, right.metadata
    return [
        {"key": key, "a": _shown(left, key), "b": _shown(right, key)}
        for key in dict.fromkeys([*ours, *theirs])
        if key not in ours or key not in theirs or ours[key] != theirs[key]
    ]


def _shown(file: MappedFile, key: str) -> str | None:
    if key not in file.metadata:
        return None
    value = file.metadata[key]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} values"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensor(left: MappedFile, right: MappedFile, name: str) -> TensorDifference:
    a, b = left.tensors.get(name), right.tensors.get(name)
    if a is None or b is None:
        return TensorDifference(name, f"only in {'B' if a is None else 'A'}", _type(a), _type(b))
    out = TensorDifference(name, "same", _type(a), _type(b))
    if a.shape != b.shape:
        out.kind, out.a, out.b = "shape", f"{a.shape}", f"{b.shape}"
    elif _same_bytes(left, right, a, b):
        return out
    elif a.format is None or b.format is None:
        out.kind = "unknown type"
    else:
        _values(left, right, out, a, b)
    left.drop_pages(name)
    right.drop_pages(name)
    return out


def _advice(left: MappedFile, right: MappedFile, name: str) -> str:
    file = left if left.tensors[name].format is None else right
    return file.advice(file.tensors[name])


def _type(info: TensorInfo | None) -> str:
    return info.type_name if info else ""


def _same_bytes(left: MappedFile, right: MappedFile, a: TensorInfo, b: TensorInfo) -> bool:
    """Equal types and bytes, and (for a ternary tensor) equal scales."""
    if (a.format, a.type_name, a.nbytes) != (b.format, b.type_name, b.nbytes):
        return False
    ours, theirs = left.data(a.name), right.data(b.name)
    if _factor(left, a) != _factor(right, b):
        return False
    return all(
        np.array_equal(ours[start : start + CHUNK], theirs[start : start + CHUNK])
        for start in range(0, a.nbytes, CHUNK)
    )


def _factor(file: MappedFile, info: TensorInfo) -> bytes:
    """The bytes of the tensor that scales this one, if there is one."""
    sibling = getattr(file, "scales", {}).get(info.name)
    return file.data(sibling).tobytes() if sibling else b""


def _values(
    left: MappedFile, right: MappedFile, out: TensorDifference, a: TensorInfo, b: TensorInfo
) -> None:
    """Fill in the distance of two tensors of one shape, row chunk by row chunk."""
    step = max(1, CHUNK // a.columns)
    error = energy = 0.0
    for start in range(0, a.rows, step):
        x = left.values(a.name, start, start + step)
        y = right.values(b.name, start, start + step)
        # NaN at the same place of both sides is no difference, nor is the same infinity
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0, y.astype(np.float64) - x)
        error += float(np.square(difference).sum())
        energy += float(np.square(np.where(np.isfinite(x), x, 0).astype(np.float64)).sum())
        # a NaN on either side must show as NaN, not vanish in a maximum
        out.max_error = float(np.maximum(out.max_error, np.abs(difference).max()))
        steps = np.where(same, 0, ordered(y) - ordered(x))
        out.ulp = max(out.ulp, int(np.abs(steps).max()))
        apart = ~same.reshape(len(x), -1, a.format.block).all(axis=2)
        out.blocks += int(np.count_nonzero(apart))
        if out.first is None and apart.any():
            row, block = (int(i) for i in np.argwhere(apart)[0])
            out.first = (start + row, block)
    # beside a tensor of zeros any error is infinitely large; NaN stays NaN
    out.relative_rms = (error / energy) ** 0.5 if energy else error and error * np.inf
    out.kind = "equal" if out.first is None else "differs"
    if out.first:
        row, block = out.first
        out.a_hex = _hex(left, a, row, block * a.format.block)
        out.b_hex = _hex(right, b, row, block * a.format.block)


def _hex(file: MappedFile, info: TensorInfo, row: int, column: int) -> str:
    """The bytes of the block that holds a weight."""
    size = info.format.nbytes
    start = column // info.format.block * size
    return file.rows(info.name)[row, start : start + size].tobytes().hex()


def ordered(x: np.ndarray) -> np.ndarray:
    """float32 -> int64 that counts representable numbers from zero, sign included."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
