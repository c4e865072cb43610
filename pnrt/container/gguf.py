"""GGUF files: a strict mapped reader, and the door to the writer.

Reading order: `open_gguf`, the header, the metadata, the tensor list, then the layout (layout.py:
extents, overlaps, truncation, ids that must prove themselves). Tensor bytes are views of the map.
"""

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from pnrt.container.layout import REWRITE, TensorInfo, padded, place
from pnrt.container.mapped import MappedFile, map_file
from pnrt.container.values import (
    ARRAY,
    MAX_KEY,
    SCALARS,
    STRING,
    TYPE_NAMES,
    ArrayValue,
    Cursor,
    Problem,
)
from pnrt.container.writer import TensorPlan, write_gguf
from pnrt.formats import by_id, get

__all__ = ["GGUFFile", "TensorInfo", "TensorPlan", "open_gguf", "write_gguf"]

MAX_NAME = 63
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
VERSIONS = (2, 3)


class GGUFFile(MappedFile):
    """An open GGUF file; made by `open_gguf`. Values are int, float, bool, str or ArrayValue.

    extra_types: type ids mapped by hand.
    """

    container = "gguf"

    def __init__(self, path: Path, mapped: mmap.mmap):
        super().__init__(path, mapped)
        self.alignment = DEFAULT_ALIGNMENT
        self.extra_types: dict[int, str] = {}
        self._kinds: dict[str, str] = {}
        self._spans: dict[str, range] = {}

    def metadata_type(self, key: str) -> str:
        """The stored type of a key: "uint32", "string", "array[float32]"; KeyError if absent."""
        return self._kinds[key]

    def raw_metadata(self) -> list[tuple[str, str, bytes]]:
        """Every entry as (key, "raw", bytes), ready for `write_gguf`."""
        memory = memoryview(self.mapped())
        return [(k, "raw", bytes(memory[s.start : s.stop])) for k, s in self._spans.items()]


def open_gguf(
    path: str | Path,
    *,
    extra_types: Mapping[int, str] | None = None,
    problems: list[Problem] | None = None,
) -> GGUFFile:
    """Open and check a GGUF file (versions 2 and 3, little endian).

    Args:
        extra_types: type ids mapped by hand to format names, for ids with no agreed meaning.
        problems: if given, whatever does not stop the reading is appended here, not raised.
    Raises: FileError; FormatError for an unknown format name in `extra_types`.
    """
    path = Path(path)
    for name in (extra_types or {}).values():
        get(name)
    file = GGUFFile(path, map_file(path, "a GGUF file"))
    file.extra_types = dict(extra_types or {})
    cursor = Cursor(memoryview(file.mapped()), str(path))
    n_tensors, n_keys = _header(file, cursor)

    def report(problem: Problem) -> None:
        if problems is None:
            raise problem.error()
        problems.append(problem)

    for _ in range(n_keys):
        _read_key(file, cursor, report)
    _read_alignment(file, cursor, report)
    infos = [_read_tensor(cursor, extra_types, report) for _ in range(n_tensors)]
    file.data_start = padded(cursor.position, file.alignment)
    place(file, [info for info in infos if info], report)
    return file


def _foreign(head: bytes, size: int) -> tuple[str, str]:
    """What a file without the GGUF magic looks like, and what to do."""
    if head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < size:
        return "is a safetensors file", "Convert it with llama.cpp's convert_hf_to_gguf.py."
    if head.startswith(b"[cyb]"):
        return "is a .model file of cyb", "Convert it: `pnrt convert FILE OUT.gguf`."
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer", "Run `git lfs pull`, or download the file itself."
    if head.startswith(b"PK"):
        return "is a zip or PyTorch file", "Convert it with llama.cpp's convert_hf_to_gguf.py."
    if head[:4] in (b"tjgg", b"fmgg", b"lmgg"):
        return "is a ggml file from before GGUF", "Fetch or convert the model as GGUF."
    return f"starts with {head[:4]!r}", "Check that the path names a GGUF file, or fetch it again."


def _header(file: GGUFFile, cursor: Cursor) -> tuple[int, int]:
    """Read magic, version and counts; returns (tensors, keys)."""
    head = bytes(cursor.memory[:32])
    if head[:4] != b"GGUF":
        found, todo = _foreign(head, file.size)
        raise Problem(str(file.path), "", found, "a GGUF file starts with b'GGUF'", todo, 0).error()
    cursor.take(4, "magic")
    file.version = cursor.number("<I", "version")
    if file.version not in VERSIONS:
        swapped = int.from_bytes(file.version.to_bytes(4, "little"), "big")
        if swapped in (1, *VERSIONS):
            raise Problem(
                str(file.path),
                "",
                f"is a big-endian GGUF file (version {swapped})",
                "pnrt reads little endian",
                "Convert it with `gguf-convert-endian FILE little` of the gguf package.",
                4,
            ).error()
        cursor.fail(
            "version",
            f"is {file.version}",
            "pnrt reads 2 and 3",
            "Convert the model again with a current tool."
            if file.version < 2
            else "The file is damaged, or newer than this pnrt: look for an update.",
            byte=4,
        )
    # the smallest tensor entry: name of one byte, one dimension; the smallest key: one byte, uint8
    return (
        cursor.count("<Q", 8 + 1 + 4 + 4 + 8, "number of tensors"),
        cursor.count("<Q", 8 + 1 + 4 + 1, "number of keys"),
    )


def _read_key(file: GGUFFile, cursor: Cursor, report) -> None:
    at = cursor.position
    key = cursor.text("key", MAX_KEY)
    start = cursor.position
    kind, value = _read_value(cursor, key, report)
    if not key:
        report(cursor.problem("key", "is empty", "keys have 1 to 65535 bytes", REWRITE, byte=at))
    elif key in file.metadata:
        report(cursor.problem(f"key {key}", "occurs twice", "keys are unique", REWRITE, byte=at))
    else:
        file.metadata[key], file._kinds[key] = value, kind
        file._spans[key] = range(start, cursor.position)


def _read_value(cursor: Cursor, key: str, report) -> tuple[str, object]:
    """The value at the cursor; returns (type name, value)."""
    number = _read_type(cursor, f"type of key {key}", (*TYPE_NAMES, ARRAY))
    if number == STRING:
        return "string", cursor.text(f"value of key {key}")
    if number != ARRAY:
        name, code = SCALARS[number]
        value = cursor.number(code, f"value of key {key}")
        return name, _bool(cursor, key, value, report) if name == "bool" else value
    element = _read_type(cursor, f"element type of key {key}", (*TYPE_NAMES, ARRAY))
    if element == ARRAY:
        cursor.fail(
            f"element type of key {key}",
            "is array",
            "arrays hold scalars or strings, not arrays",
            "Rewrite the key as a flat array.",
            byte=cursor.position - 4,
        )
    return f"array[{TYPE_NAMES[element]}]", _read_array(cursor, key, element, report)


def _read_array(cursor: Cursor, key: str, element: int, report) -> ArrayValue:
    name = TYPE_NAMES[element]
    if element == STRING:
        starts = cursor.strings(f"key {key}")
        return ArrayValue(cursor, name, starts, range(0))
    size = struct.calcsize(SCALARS[element][1])
    n = cursor.count("<Q", size, f"number of elements of key {key}")
    start = cursor.take(n * size, f"elements of key {key}")
    if name == "bool":
        raw = np.frombuffer(cursor.memory, np.uint8, n, start)
        for i in np.flatnonzero(raw > 1)[:1]:
            _bool(cursor, key, int(raw[i]), report, start + int(i))
    return ArrayValue(cursor, name, None, range(start, cursor.position))


def _read_type(cursor: Cursor, what: str, known: tuple[int, ...]) -> int:
    at = cursor.position
    number = cursor.number("<I", what)
    if number not in known:
        # its length is unknown, so nothing behind it can be read
        cursor.fail(what, f"is {number}", f"GGUF has 0 to {max(known)}", REWRITE, byte=at)
    return number


def _bool(cursor: Cursor, key: str, value: int, report, byte: int | None = None) -> bool:
    if value > 1:
        byte = cursor.position - 1 if byte is None else byte
        what = f"bool value of key {key}"
        report(cursor.problem(what, f"is {value}", "0 and 1 are allowed", REWRITE, byte=byte))
    return bool(value)


def _read_alignment(file: GGUFFile, cursor: Cursor, report) -> None:
    key = "general.alignment"
    value, kind = file.metadata.get(key, DEFAULT_ALIGNMENT), file._kinds.get(key, "uint32")
    byte = file._spans.get(key, range(0)).start
    if kind != "uint32":
        found = f"has type {kind}"
        report(cursor.problem(f"key {key}", found, "it must be uint32", REWRITE, byte=byte))
    elif value < 1 or value & (value - 1):
        found = f"is {value}"
        report(cursor.problem(f"key {key}", found, "it must be a power of two", REWRITE, byte=byte))
    else:
        file.alignment = value


def _read_tensor(cursor: Cursor, extra: Mapping[int, str] | None, report) -> TensorInfo | None:
    """One entry of the tensor list, offset still relative; None if it cannot be used."""
    at = cursor.position
    name = cursor.text("tensor name")
    what = f"tensor {name or '(no name)'}"
    n_dims = cursor.number("<I", f"dimensions of {what}")
    if n_dims > MAX_DIMS:
        # the dimensions follow, so a wrong count loses the place: nothing behind it can be read
        allowed = f"at most {MAX_DIMS} are allowed"
        cursor.fail(what, f"has {n_dims} dimensions", allowed, REWRITE, byte=cursor.position - 4)
    shape = tuple(cursor.number("<Q", f"shape of {what}") for _ in range(n_dims))[::-1]
    type_id = cursor.number("<I", f"type of {what}")
    offset = cursor.number("<Q", f"offset of {what}")

    wrong = None
    size = len(name.encode())
    if not 1 <= size <= MAX_NAME:
        wrong = f"name has {size} bytes", f"1 to {MAX_NAME} are allowed"
    elif 0 in shape:
        wrong = f"shape {list(shape)} has a zero", "each dimension is at least 1"
    elif prod(shape) >= 1 << 63:
        wrong = f"shape {list(shape)} has {prod(shape)} elements", "fewer than 2^63 are allowed"
    if wrong:
        report(cursor.problem(what, *wrong, REWRITE, byte=at))
        return None
    return TensorInfo(name, shape, type_id, by_id(type_id, extra), offset, 0, 0)
