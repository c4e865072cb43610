"""GGUF files built byte by byte, well-formed or not, without the code under test."""

import struct
from pathlib import Path

import numpy as np

_SCALARS = {
    "uint8": (0, "<B"),
    "int8": (1, "<b"),
    "uint16": (2, "<H"),
    "int16": (3, "<h"),
    "uint32": (4, "<I"),
    "int32": (5, "<i"),
    "float32": (6, "<f"),
    "bool": (7, "<?"),
    "uint64": (10, "<Q"),
    "int64": (11, "<q"),
    "float64": (12, "<d"),
}


def string(text: str | bytes) -> bytes:
    """A length-prefixed string."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _payload(kind: str, value) -> bytes:
    return string(value) if kind == "string" else struct.pack(_SCALARS[kind][1], value)


def value(kind: str, value) -> bytes:
    """Type number and bytes of a metadata value; kind as in "uint32" or "array[string]"."""
    if not kind.startswith("array["):
        return struct.pack("<I", 8 if kind == "string" else _SCALARS[kind][0]) + _payload(
            kind, value
        )
    inner = kind[6:-1]
    number = 8 if inner == "string" else _SCALARS[inner][0]
    head = struct.pack("<IIQ", 9, number, len(value))
    return head + b"".join(_payload(inner, item) for item in value)


def entry(key: str, kind: str, item) -> bytes:
    """One metadata entry."""
    return string(key) + value(kind, item)


def info(name: str, shape: tuple[int, ...], type_id: int, offset: int, n_dims=None) -> bytes:
    """One entry of the tensor list; shape row-major, offset relative to the data."""
    dims = shape[::-1]
    n_dims = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, type_id, offset)


def gguf(
    entries: list[bytes] = (),
    infos: list[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """A whole file; the counts and the rest can be told to lie."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if n_tensors is None else n_tensors,
        len(entries) if n_keys is None else n_keys,
    )
    head += b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def tiny(
    path: Path, entries: list[bytes], tensors: dict[str, tuple[int, tuple[int, ...], np.ndarray]]
) -> Path:
    """Write a well-formed file to `path`; tensors: name -> (type id, shape, uint8 bytes)."""
    infos, data = [], b""
    for name, (type_id, shape, raw) in tensors.items():
        infos.append(info(name, shape, type_id, len(data)))
        data += np.ascontiguousarray(raw).tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(gguf(entries, infos, data))
    return path
