"""Look into a model file: the whole, one tensor, one block.

Everything here returns plain dictionaries that `json.dumps` takes; printing is the command line's.
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np

from pnrt import __version__
from pnrt.container.layout import TensorInfo
from pnrt.container.mapped import MappedFile
from pnrt.container.values import ArrayValue
from pnrt.errors import FileError, FormatError

# array elements shown of a metadata array
SHOWN = 8
# bytes shown of a tensor that pnrt does not decode
FIRST = 64
# bytes looked at in one step
STEP = 16 << 20


def file_view(
    file: MappedFile, *, hashes: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict:
    """The file as a dictionary: header, metadata, tensors, summary per type.

    Args:
        hashes: add the sha256 of each tensor's bytes (reads the whole file).
        progress: called with (bytes hashed, bytes in all).
    """
    infos = list(file.tensors.values())
    tensors = [tensor_row(info) for info in infos]
    if hashes:
        done, total = 0, sum(info.nbytes for info in infos)
        for info, row in zip(infos, tensors, strict=True):
            digest = hashlib.sha256()
            for piece in _pieces(file, info):
                digest.update(piece)
                done += len(piece)
                if progress:
                    progress(done, total)
            row["sha256"] = digest.hexdigest()
    elements, nbytes = sum(i.elements for i in infos), sum(i.nbytes for i in infos)
    return {
        "path": str(file.path),
        "pnrt": __version__,
        "container": file.container,
        "version": file.version,
        "size": file.size,
        "alignment": file.alignment,
        "data_start": file.data_start,
        "metadata": [
            {"key": key, "type": file.metadata_type(key)} | _value(value)
            for key, value in file.metadata.items()
        ],
        "tensors": tensors,
        "types": type_rows(infos),
        "elements": elements,
        "bytes": nbytes,
        "bits_per_weight": _bits(nbytes, elements),
        "notes": [str(note) for note in file.notes],
    }


def tensor_row(info: TensorInfo) -> dict:
    """One line of the tensor list."""
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type_name,
        "type_id": info.type_id,
        "known": info.format is not None,
        "offset": info.offset,
        "bytes": info.nbytes,
        "extent": info.extent,
        "bits_per_weight": _bits(info.nbytes, info.elements),
    }


def type_rows(infos: list[TensorInfo]) -> list[dict]:
    """Per type: tensors, weights, bytes, bits per weight; the largest share first."""
    types: dict[str, dict] = {}
    for info in infos:
        row = types.setdefault(
            info.type_name, {"type": info.type_name, "tensors": 0, "elements": 0, "bytes": 0}
        )
        row["tensors"] += 1
        row["elements"] += info.elements
        row["bytes"] += info.nbytes
    for row in types.values():
        row["bits_per_weight"] = _bits(row["bytes"], row["elements"])
    return sorted(types.values(), key=lambda row: -row["bytes"])


def tensor_view(file: MappedFile, name: str) -> dict:
    """One tensor: its line, the statistics of its values and, where it has codes, their counts.

    Adds: min, max, mean, rms, zeros, nonfinite; for formats with scales zero_scales (groups that
    decode to nothing) and codes, a list of [code, count]. Of a type pnrt does not decode instead
    hex, its first bytes, and advice.
    """
    info = file.tensor(name)
    if info.format is None:
        raw = file.data(name)[:FIRST].tobytes()
        return tensor_row(info) | {"hex": raw.hex(), "advice": file.advice(info)}
    rows = file.rows(name)
    low, high, total, squares, zeros, bad = math.inf, -math.inf, 0.0, 0.0, 0, 0
    codes: dict[int, int] = {}
    empty = 0
    step = max(1, STEP // (8 * info.columns))
    for start in range(0, info.rows, step):
        part = rows[start : start + step]
        values = file.values(name, start, start + step)
        finite = values[np.isfinite(values)].astype(np.float64)
        bad += values.size - finite.size
        zeros += int(np.count_nonzero(finite == 0))
        if finite.size:
            low, high = min(low, finite.min()), max(high, finite.max())
            total, squares = total + finite.sum(), squares + np.square(finite).sum()
        if info.format.group:
            parts = info.format.parts(part)
            empty += int(np.count_nonzero(parts.scale == 0))
            for code, count in zip(*np.unique(parts.codes, return_counts=True), strict=True):
                codes[int(code)] = codes.get(int(code), 0) + int(count)
    file.drop_pages(name)
    count = info.elements - bad
    view = tensor_row(info) | {
        "min": float(low) if count else None,
        "max": float(high) if count else None,
        "mean": float(total / count) if count else None,
        "rms": math.sqrt(squares / count) if count else None,
        "zeros": zeros,
        "nonfinite": bad,
    }
    if info.format.group:
        view |= {"zero_scales": empty, "codes": [[code, codes[code]] for code in sorted(codes)]}
    return view


def block_view(file: MappedFile, name: str, row: int, block: int) -> dict:
    """One block of a tensor: its bytes, scales, codes and values.

    Returns: row, block, offset (absolute byte), hex, bits_per_weight, first (index of the first
    weight in its row), scales, offsets (added to scale times code; None if the format has none),
    group (weights per scale), codes (centred), values, findings. Plain floats have no scales and
    no codes (None).
    Raises: FormatError for a type pnrt does not decode or a block outside the tensor.
    """
    info = file.tensor(name)
    rows = file.rows(name)
    kind = info.format
    blocks = info.columns // kind.block
    for what, index, count in (("row", row, info.rows), ("block", block, blocks)):
        if not 0 <= index < count:
            raise FormatError(
                f"{file.path}: {name}: {what} {index} was asked for; the tensor has {count} "
                f"({info.rows} rows of {blocks} blocks, counted from 0). Choose one of these."
            )
    return _block(file, info, rows, row, block) | {"tensor": name, "type": info.type_name}


def _block(file: MappedFile, info: TensorInfo, rows: np.ndarray, row: int, block: int) -> dict:
    kind = info.format
    raw = rows[row : row + 1, block * kind.nbytes : (block + 1) * kind.nbytes]
    parts = kind.parts(raw) if kind.group else None
    return {
        "row": row,
        "block": block,
        "first": block * kind.block,
        "offset": info.offset + row * rows.shape[1] + block * kind.nbytes,
        "hex": raw.tobytes().hex(),
        "bits_per_weight": kind.bits_per_weight,
        "group": kind.group,
        "scales": None if parts is None else _numbers(parts.scale),
        "offsets": None if parts is None or parts.offset is None else _numbers(parts.offset),
        "codes": None if parts is None else parts.codes[0].tolist(),
        "values": _numbers(file.scaled(info.name, kind.decode(raw), row)),
        "findings": [
            {"byte": bad.byte, "found": bad.found, "allowed": bad.allowed}
            for bad in kind.findings(raw)
        ],
    }


def parse_block(text: str) -> tuple[int, int]:
    """ROW,BLOCK of the command line as two numbers; FormatError otherwise."""
    row, comma, block = text.partition(",")
    if not (comma and row.strip().isdecimal() and block.strip().isdecimal()):
        raise FormatError(f"--block: {text!r} was given; it takes ROW,BLOCK. For example 12,5.")
    return int(row), int(block)


def _pieces(file: MappedFile, info: TensorInfo) -> Iterator[np.ndarray]:
    data = file.data(info.name)
    for start in range(0, len(data), STEP):
        yield data[start : start + STEP]
    file.drop_pages(info.name)


def _value(value) -> dict:
    """A metadata value for JSON: arrays are cut, non-finite floats become text.

    Texts of an array that are not UTF-8 become a problem, told instead of them.
    """
    if isinstance(value, ArrayValue | list):
        try:
            return {"value": [_plain(v) for v in value[:SHOWN]], "length": len(value)}
        except FileError as error:
            return {"value": [], "length": len(value), "problem": str(error)}
    return {"value": _plain(value)}


def _numbers(array: np.ndarray) -> list:
    return [_plain(v) for v in array.reshape(-1).tolist()]


def _plain(value):
    # JSON has no NaN and no infinity, and TOML has dates
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _bits(nbytes: int, elements: int) -> float | None:
    return 8 * nbytes / elements if elements else None
