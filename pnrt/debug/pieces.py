"""The smallest piece of a weight that is wrong: a block that differs, a unit, a segment, a code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pnrt import reference
from pnrt.container.gguf import GGUFFile
from pnrt.formats.base import Format


def weight_difference(a: GGUFFile, b: GGUFFile, tensor: str, row: int) -> dict[str, Any] | None:
    """The first block of a tensor that two files have differently.

    Args:
        row: looked at first; the rest of the tensor follows.
    Returns: kind ("weight", "scale", "type"), tensor, row, block, byte (in each file), bytes, bits
        that differ, word, and the first weight that reads differently; None where all is the same.
    """
    ours, theirs = a.tensors.get(tensor), b.tensors.get(tensor)
    if ours is None or theirs is None or ours.format is not theirs.format:
        types = [info.type_name if info else "none" for info in (ours, theirs)]
        return {"kind": "type", "tensor": tensor, "A": types[0], "B": types[1]}
    x, y = a.rows(tensor), b.rows(tensor)
    apart = np.flatnonzero((x != y).any(axis=1)) if not (x[row] != y[row]).any() else [row]
    if not len(apart):
        return None
    row, form = int(apart[0]), ours.format
    byte = int(np.flatnonzero(x[row] != y[row])[0])
    block = byte // form.nbytes
    cut = slice(block * form.nbytes, (block + 1) * form.nbytes)
    blocks = [np.array(rows[row, cut]) for rows in (x, y)]
    piece = {
        "kind": "weight", "tensor": tensor, "format": form.name, "row": row, "block": block,
        "byte": [info.offset + row * x.shape[1] + byte for info in (ours, theirs)],
        "bytes": [raw.tobytes().hex() for raw in blocks],
        "bits": [
            [int(at), bit]
            for at in np.flatnonzero(blocks[0] != blocks[1])
            for bit in range(8)
            if int(blocks[0][at] ^ blocks[1][at]) >> bit & 1
        ],
    }  # fmt: skip
    values = [form.decode(raw[None])[0] for raw in blocks]
    changed = np.flatnonzero(values[0].view(np.uint32) != values[1].view(np.uint32))
    if changed.size:
        k = int(changed[0])
        piece |= {"column": block * form.block + k, "weights": int(changed.size)}
        piece |= {f"{s}": reading(form, raw, k) for s, raw in zip("AB", blocks, strict=True)}
        piece["places"] = code_places(form, blocks[0], k)
        if byte % form.nbytes not in {at for at, _ in piece["places"]}:
            # the byte holds no code: a scale, an offset, a minimum
            piece |= {"kind": "scale", "places": []}
        piece["word"] = word_of(form, piece["places"])
    return piece


def reading(form: Format, block: np.ndarray, k: int) -> dict[str, Any]:
    """Code, scale, offset and value of weight k of a block [S] uint8."""
    value = float(form.decode(block[None])[0, k])
    if form.group == 0:
        return {"value": value}
    codes, scale, offset = form.parts(block[None])
    out = {"code": int(codes[0, k]), "scale": float(scale[0, k // form.group])}
    if offset is not None:
        out["offset"] = float(offset[0, k // form.group])
    return {**out, "value": value}


def code_places(form: Format, block: np.ndarray, k: int) -> list[list[int]]:
    """[byte, bit] of the block whose flips change weight k and no other."""
    flips = np.repeat(block[None], 8 * len(block), axis=0)
    every = np.arange(8 * len(block))
    flips[every, every // 8] ^= (1 << every % 8).astype(np.uint8)
    base = form.decode(block[None])[0].view(np.uint32)
    changed = form.decode(flips).view(np.uint32) != base
    mine = np.flatnonzero(changed[:, k] & (changed.sum(axis=1) == 1))
    return [[int(i) // 8, int(i) % 8] for i in mine]


def word_of(form: Format, places: list[list[int]]) -> int | None:
    """The 32-bit word of a PN block that a code lies in; None for formats without words."""
    if form.name not in ("pn3t", "pn4t") or not places:
        return None
    return (places[0][0] - 2) // 4


def split_product(
    file: GGUFFile,
    tensor: str,
    row: int,
    x: np.ndarray,
    found: Callable[[np.ndarray], np.float32],
    expected: Callable[[np.ndarray], np.ndarray],
    activations: str,
) -> dict[str, Any]:
    """Narrow a wrong product down: to a unit, to a segment of it, to one weight.

    Args:
        x: [K] – the activations it was seen with.
        found: x -> the side's value; expected: [T, K] -> [T] the reference's.
    Returns: kind "weight", "scale" (all weights of a segment are off by one factor), "segment" or
        "unit" (each weight alone is right), "sum" (each unit alone is right), and its place.
    """
    info = file.tensors[tensor]
    form, K = info.format, info.columns
    place = {"tensor": tensor, "format": form.name, "row": row}
    starts = range(0, K, form.unit)
    for u, start in enumerate(starts):
        stop = min(K, start + form.unit)
        if part := _wrong(x, start, stop, found, expected):
            place |= {"unit": u, "lane": u % 32, "columns": [start, stop], **part}
            break
    else:
        return {"kind": "sum", **place, **_prefix(x, starts, form.unit, found, expected)}
    kind = "unit"
    for low, high in reference.segments(form.unit, form.group or form.unit):
        low, high = start + low, min(K, start + high)
        if low < high and (part := _wrong(x, low, high, found, expected)):
            kind, place = "segment", {**place, "columns": [low, high], **part}
            break
    first, last = place["columns"]
    quantized = activations == "q8_0" and form.group
    # a code of 127 with a scale of exactly 1
    one = np.float32(127 if quantized else 1)
    readings = {}
    for k in range(first, last):
        basis = np.zeros(K, np.float32)
        basis[k] = one
        readings[k] = found(basis), expected(basis[None])[0]
    bad = [k for k, (got, right) in readings.items() if _bits(got) != _bits(right)]
    if not bad:
        return {"kind": kind, **place}
    weight = _weight(file, info, row, bad[0], *readings[bad[0]], one)
    factor = _factor([pair for pair in readings.values() if pair[1]])
    if factor and weight["file"].get("scale"):
        read = {"scale": weight["file"]["scale"] * factor, "value": weight["read"]["value"]}
        return {"kind": "scale", **place, **weight, "read": read}
    return {"kind": "weight", **place, **weight}


def _bits(x: np.float32) -> int:
    return int(x.view(np.uint32))


def _factor(pairs: list[tuple[np.float32, np.float32]]) -> float | None:
    """The one factor other than 1 by which all readings are off, None if there is no such."""
    with np.errstate(all="ignore"):
        factors = np.array([np.float64(got) / right for got, right in pairs])
    if len(factors) < 2 or not np.allclose(factors, factors[0], rtol=1e-5, atol=0):
        return None
    return None if abs(factors[0] - 1) < 1e-5 else float(factors[0])


def _wrong(x, start, stop, found, expected) -> dict[str, float] | None:
    """Both readings of the product of x[start:stop] alone, if they differ."""
    part = np.zeros_like(x)
    part[start:stop] = x[start:stop]
    got, right = found(part), expected(part[None])[0]
    if _bits(got) == _bits(right):
        return None
    return {"found": float(got), "reference": float(right)}


def _prefix(x, starts, unit, found, expected) -> dict[str, Any]:
    """The first unit with which the sum of it and those before goes wrong."""
    for u, start in enumerate(starts):
        if part := _wrong(x, 0, start + unit, found, expected):
            return {"unit": u, "lane": u % 32, "columns": [0, start + unit], **part}
    return {}


def _weight(file, info, row, k, got, right, one) -> dict[str, Any]:
    """One weight: where its code lies, what the file says, what the side must have read."""
    form, rows = info.format, file.rows(info.name)
    block, j = divmod(k, form.block)
    raw = np.array(rows[row, block * form.nbytes : (block + 1) * form.nbytes])
    said = reading(form, raw, j)
    places = code_places(form, raw, j)
    seen: dict[str, Any] = {"value": float(got / one)}
    if "code" in said and said["scale"]:
        seen["code"] = round((seen["value"] - said.get("offset", 0.0)) / said["scale"])
    return {
        "column": k, "block": block, "word": word_of(form, places), "places": places,
        "byte": info.offset + row * rows.shape[1] + block * form.nbytes
        + (places[0][0] if places else 0),
        "bytes": raw.tobytes().hex(), "file": said, "read": seen,
        "found": float(got), "reference": float(right), "activation": float(one),
    }  # fmt: skip
