"""Read an .npz that anybody may have written."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from pnrt.errors import FileError


def read_npz(path: Path, needed: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz by name; nothing in it is executed.

    Args:
        needed: what the file should be, for the message, and what to do.
    Raises: FileError for anything but an .npz of plain arrays.
    """
    try:
        with open(path, "rb") as stream:
            found = "is no .npz"
            if not zipfile.is_zipfile(stream):
                raise ValueError
            found = "holds something else than plain arrays"
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
    except OSError as error:
        found = f"cannot be read ({error.strerror or error})"
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, NotImplementedError):
        pass
    raise FileError(f"{path}: {found}; {needed}")
