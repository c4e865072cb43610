"""What every open model file can do, whatever its container: find tensors, hand out their bytes."""

import mmap
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from pnrt.container.layout import REFETCH, TensorInfo, readings
from pnrt.container.values import Problem
from pnrt.errors import FileError, FormatError
from pnrt.formats import FORMATS, STOCK


class MappedFile:
    """An open, mapped file; a context manager.

    metadata: key -> value. tensors: name -> TensorInfo, in file order. notes: harmless oddities
    (gaps, trailing bytes). container: "gguf" or "cyb".
    """

    container = ""

    def __init__(self, path: Path, mapped: mmap.mmap):
        self.path, self.size = path, len(mapped)
        self.version = 0
        self.alignment = 1
        self.data_start = 0
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[Problem] = []
        self._map: mmap.mmap | None = mapped

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Give the map back; views handed out earlier stay valid and keep it alive."""
        self._map = None

    def metadata_type(self, key: str) -> str:
        """The stored type of a key; KeyError if absent."""
        raise NotImplementedError

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of that name; FileError with near names if there is none."""
        if name in self.tensors:
            return self.tensors[name]
        near = get_close_matches(name, self.tensors, 3, 0.4)
        raise FileError(
            f"{self.path}: no tensor {name!r}; the file has {len(self.tensors)} tensors"
            + (f", near ones are {', '.join(near)}" if near else "")
            + f". `pnrt inspect {self.path}` lists them."
        )

    def data(self, name: str) -> np.ndarray:
        """[nbytes] uint8 view of a tensor's bytes, whatever its type."""
        info = self.tensor(name)
        return np.frombuffer(self.mapped(), np.uint8, info.nbytes, info.offset)

    def rows(self, name: str) -> np.ndarray:
        """[N, row_bytes] uint8 view of a tensor; FormatError for an unknown type."""
        info = self.tensor(name)
        if info.format is None:
            raise FormatError(
                f"{self.path}: {name}: type {info.type_name} is not known to pnrt; known are "
                f"{', '.join(f.name for f in FORMATS.values() if f.weight)}. {self.advice(info)}"
            )
        return self.data(name).reshape(info.rows, info.format.row_bytes(info.columns))

    def values(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """[stop - start, K] float32: some rows of a tensor, decoded and scaled."""
        rows = self.rows(name)[start:stop]
        return self.scaled(name, self.tensor(name).format.decode(rows), start)

    def scaled(self, name: str, values: np.ndarray, start: int) -> np.ndarray:
        """[n, K] float32 decoded values of the rows from `start` on, times the tensor's scale."""
        return values

    def drop_pages(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Tell the system that the pages of a tensor, or of rows of it, are no longer needed.

        They are read again from the file if they are looked at again.
        """
        self._advise("MADV_DONTNEED", name, first, last)

    def fetch_pages(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Tell the system that the pages of a tensor, or of rows of it, will be needed soon."""
        self._advise("MADV_WILLNEED", name, first, last)

    def _advise(self, advice: str, name: str, first: int, last: int | None) -> None:
        info = self.tensor(name)
        row = info.nbytes // info.rows
        start, stop = first * row, info.nbytes if last is None else last * row
        start = -(-(info.offset + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (info.offset + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, advice):
            self.mapped().madvise(getattr(mmap, advice), start, stop - start)

    def mapped(self) -> mmap.mmap:
        """The map; FileError after `close`."""
        if self._map is None:
            raise FileError(f"{self.path}: is closed; reading needs it open. Open it again.")
        return self._map

    def advice(self, info: TensorInfo) -> str:
        """What to do about a tensor whose type pnrt does not decode."""
        fits = readings(info, self.alignment)
        if not fits or info.type_id is None:
            return "Another program wrote it; convert the tensor with that program."
        taken = ""
        if info.type_id in STOCK and not info.stock:
            name, block, size = STOCK[info.type_id]
            need = info.elements * size / block
            taken = f"Released ggml means {name} by this id, which takes {need:g} bytes here. "
        return (
            f"{taken}Its {info.extent} bytes would fit {', '.join(fits)}: if you know it is one of "
            f'these, open with extra_types={{{info.type_id}: "{fits[0]}"}}'
            + (f" (--e4m3-id {info.type_id})." if "e4m3" in fits else ".")
        )


def map_file(path: Path, kind: str) -> mmap.mmap:
    """Map a file for reading. Args: kind – what was hoped for, as in "a GGUF file"."""
    try:
        with open(path, "rb") as stream:
            if stream.seek(0, 2) == 0:
                raise Problem(str(path), "", "is empty", f"{kind} is needed", REFETCH).error()
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except IsADirectoryError:
        raise FileError(
            f"{path}: is a directory; a model is one file. Name the file inside it."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(
            f"{path}: cannot be opened ({reason}); a readable file is needed. "
            "Check the path and its permissions."
        ) from None
