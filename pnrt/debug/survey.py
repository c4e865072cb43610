"""The table of weight formats, and what each of them costs on the tensors of a real model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pnrt import backend
from pnrt.backend import ACTIVATIONS
from pnrt.container.kinds import open_any
from pnrt.container.mapped import MappedFile
from pnrt.errors import DeviceError, FormatError, ModelError, PnrtError
from pnrt.formats import FORMATS, Format

Progress = Callable[[str, int, int], None]

# rows taken from each tensor, spread evenly: enough for three digits of the error
ROWS = 64


def format_rows() -> list[dict[str, Any]]:
    """One row per format, ready for JSON.

    Beside the sizes: activations, what a product may take on its other side, and backends, those
    of this machine that have a product for it.
    """
    served = _served()
    return [
        {
            "name": f.name,
            "id": f.type_id,
            "bits_per_weight": f.bits_per_weight,
            "block": f.block,
            "bytes": f.nbytes,
            "group": f.group,
            "align": f.align,
            "weights": f.weight,
            "activations": _activations(f),
            "backends": [name for name, formats in served.items() if f.name in formats],
            "title": f.title,
        }
        for f in FORMATS.values()
    ]


def _activations(f: Format) -> list[str]:
    if not f.weight:
        return []
    # weights without a scale take the order of float32 whatever is asked for
    return list(ACTIVATIONS) if f.group else ["f32"]


def _served() -> dict[str, set[str]]:
    """Backend -> the formats it has a product for; backends this machine cannot run are left out.

    The reference, the judge of the others, is no backend to run models on and not listed.
    """
    found = {}
    for name in backend.BACKENDS:
        if name == "reference":
            continue
        with contextlib.suppress(DeviceError):
            table = backend.open(name).table()
            found[name] = {form for op, form, _ in table if op == "matmul"}
    return found


def format_errors(
    path: Path,
    progress: Progress | None = None,
    **opening: Any,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Relative RMS error of each format over the weight matrices of a model.

    Args:
        path: a model file; up to ROWS rows of each matrix are decoded and quantized again. Start
            from a file in f16 or better: what its own format lost does not count again.
        opening: what else `open_any` takes.
    Returns:
        format name -> relative_rms, sqrt(sum (y - x)^2 / sum x^2) over the matrices whose rows it
        can hold, or None; matrices, how many those are; of, how many there are.
        The formats of the model's matrices.
    Raises:
        ModelError: the file has no weight matrix pnrt can decode.
    """
    formats = [f for f in FORMATS.values() if f.weight]
    error = dict.fromkeys((f.name for f in formats), 0.0)
    energy, held = dict(error), dict.fromkeys(error, 0)
    with open_any(path, **opening) as file:
        names = [
            t.name for t in file.tensors.values() if len(t.shape) == 2 and t.format is not None
        ]
        if not names:
            raise ModelError(
                f"{path}: no weight matrix; one is needed to measure formats on. Use a whole model."
            )
        for done, name in enumerate(names):
            x = _sample(file, name)
            for f in formats:
                if progress:
                    progress(f"{f.name} on {name}", done, len(names))
                y = _round_trip(f, x)
                if y is not None:
                    error[f.name] += float(((y - x).astype(np.float64) ** 2).sum())
                    energy[f.name] += float((x.astype(np.float64) ** 2).sum())
                    held[f.name] += 1
        sources = sorted({file.tensors[name].format.name for name in names})
    relative = {name: (error[name] / e) ** 0.5 if e else None for name, e in energy.items()}
    return {
        name: {"relative_rms": relative[name], "matrices": held[name], "of": len(names)}
        for name in error
    }, sources


def _sample(file: MappedFile, name: str) -> np.ndarray:
    """Up to ROWS rows of a tensor, spread evenly: [n, K] float32."""
    info = file.tensors[name]
    picked = np.unique(np.linspace(0, info.rows - 1, ROWS).astype(int))
    x = np.concatenate([file.values(name, i, i + 1) for i in picked])
    if not np.isfinite(x).all():
        raise FormatError(f"{file.path}: {name} holds weights that are not finite. Run pnrt check.")
    return x


def _round_trip(f: Any, x: np.ndarray) -> np.ndarray | None:
    """x [n, K] through a format and back; None where it cannot hold the rows."""
    if x.shape[1] % f.block:
        return None
    try:
        return f.decode(f.quantize(x))
    except (PnrtError, NotImplementedError):
        # a format without a quantizer, or weights too large for it: it gets no number
        return None
