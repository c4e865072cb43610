"""Write GGUF files: streamed, aligned, and atomic.

The bytes go to a temporary name in the target's directory; only a complete, synced file gets the
real name, and a failure removes the temporary one.
"""

import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from pnrt.container.values import encode
from pnrt.errors import FileError

VERSION = 3


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written.

    shape: row-major. data: called once, yields bytes-like pieces of `nbytes` bytes in all.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    nbytes: int
    data: Callable[[], Iterable]


def write_gguf(
    path: str | Path,
    metadata: list[tuple[str, str, object]],
    tensors: list[TensorPlan],
    alignment: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GGUF file (version 3, little endian) in one pass.

    Args:
        metadata: (key, type name, value) in file order; type "raw" passes stored bytes through.
        alignment: of the tensor data; written as `general.alignment` when it is not 32.
        progress: called with (bytes done, bytes in all) after each piece.
    Raises: FileError; the target is then untouched and no temporary file is left.
    """
    path = Path(path)
    head, offsets, total = _head(path, metadata, tensors, alignment)
    with atomic(path, total) as stream:
        stream.write(head)
        for plan, offset in zip(tensors, offsets, strict=True):
            stream.write(bytes(offset - stream.tell()))
            for piece in pieces(path, plan):
                stream.write(piece)
                if progress:
                    progress(stream.tell(), total)
        stream.write(bytes(total - stream.tell()))
        if progress:
            progress(total, total)


def check_target(path: Path, *sources: Path) -> None:
    """Refuse an output that is a directory, a device, in no folder, or what it is made from.

    Raises: FileError.
    """
    if path.is_dir():
        raise FileError(f"{path}: is a directory; the output is a file. Add a file name.")
    if not path.parent.is_dir():
        raise FileError(
            f"{path}: cannot be written (No such file or directory); the folder {path.parent} is "
            "needed and does not exist. Make it first."
        )
    if not path.exists():
        return
    if not path.is_file():
        raise FileError(f"{path}: is a device or a pipe; the output is a file. Name a file.")
    if any(source.exists() and os.path.samefile(path, source) for source in sources):
        raise FileError(f"{path}: is the source itself; choose another name for the result.")


@contextmanager
def atomic(path: Path, total: int = 0) -> Iterator[BinaryIO]:
    """A stream that becomes `path` when the block ends well, and vanishes when it does not.

    Args: total – bytes about to be written; refused early when the disk has less.
    Raises: FileError for whatever the file system objects to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    made = False
    try:
        check_target(path)
        free = shutil.disk_usage(path.parent).free
        if total > free:
            raise FileError(
                f"{path}: needs {total} bytes; {free} are free on that disk. "
                "Free some space, or write elsewhere."
            )
        with open(temporary, "xb") as stream:
            made = True
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        made = False
        _sync_directory(path.parent)
    except OSError as error:
        room = f" with {total} free bytes" if total else ""
        raise FileError(
            f"{path}: cannot be written ({error.strerror}); a writable directory{room} is needed. "
            "Check the path, its permissions and the disk."
        ) from error
    finally:
        if made:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def _sync_directory(directory: Path) -> None:
    # the new name itself must survive a power cut; not every system lets a directory be opened
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _head(path, metadata, tensors, alignment) -> tuple[bytes, list[int], int]:
    """Header bytes, absolute tensor offsets and the size of the file."""
    if alignment < 1 or alignment & (alignment - 1):
        raise FileError(
            f"{path}: alignment is {alignment}; a power of two is needed. 32 suits every reader."
        )
    entries = {}
    for key, kind, value in metadata:
        if key in entries or not 1 <= len(key.encode()) <= 65535:
            raise FileError(
                f"{path}: key {key!r} is empty, too long or given twice; keys are unique and "
                "have 1 to 65535 bytes. Correct the metadata."
            )
        entries[key] = encode(kind, value)
    stated = encode("uint32", alignment)
    if entries.get("general.alignment", encode("uint32", 32)) != stated:
        if "general.alignment" in entries:
            raise FileError(
                f"{path}: key general.alignment differs from the alignment {alignment} asked for; "
                "they must agree. Drop the key or pass its value."
            )
        entries["general.alignment"] = stated
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(entries))
    head += b"".join(_string(key) + value for key, value in entries.items())
    relative, infos, names = 0, [], set()
    starts = []
    for plan in tensors:
        _check(path, plan, names)
        names.add(plan.name)
        dims = plan.shape[::-1]
        infos.append(_string(plan.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        infos.append(struct.pack("<IQ", plan.type_id, relative))
        starts.append(relative)
        relative = _padded(relative + plan.nbytes, alignment)
    head += b"".join(infos)
    base = _padded(len(head), alignment)
    return head, [base + start for start in starts], base + relative


def _check(path: Path, plan: TensorPlan, names: set[str]) -> None:
    where = f"{path}: tensor {plan.name}"
    if plan.name in names or not 1 <= len(plan.name.encode()) <= 63:
        raise FileError(
            f"{where}: its name is empty, longer than 63 bytes or given twice; names are unique "
            "and have 1 to 63 bytes. Rename it."
        )
    if len(plan.shape) > 4 or prod(plan.shape) < 1 or min(plan.shape, default=1) < 1:
        raise FileError(
            f"{where}: shape {list(plan.shape)}; at most 4 dimensions of at least 1 are allowed. "
            "Correct the shape."
        )


def pieces(path: Path, plan: TensorPlan) -> Iterator[memoryview]:
    """The tensor's pieces as bytes; FileError unless they add up to nbytes."""
    done = 0
    for piece in plan.data():
        piece = memoryview(piece).cast("B")
        done += piece.nbytes
        if done > plan.nbytes:
            break
        yield piece
    if done != plan.nbytes:
        raise FileError(
            f"{path}: tensor {plan.name}: its data has {'more than ' * (done > plan.nbytes)}"
            f"{min(done, plan.nbytes)} bytes; its type and shape take {plan.nbytes}. "
            "Report this: the plan and the data must agree."
        )


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
