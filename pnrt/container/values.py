"""GGUF value types and a reader that never steps outside the file.

Nothing here believes a number it read: each length and count is compared with the bytes that
are left, in Python integers, before it is used.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pnrt.errors import FileError

# name and little-endian struct code of each scalar type, by its number in the file
SCALARS = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<B"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
STRING, ARRAY = 8, 9
TYPE_NAMES = {number: name for number, (name, _) in SCALARS.items()} | {STRING: "string"}
TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
CODES = dict(SCALARS.values())
MAX_KEY = 65535

_length = struct.Struct("<Q")
_HOP = 4096


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a file, in the four parts of every message.

    about: what inside the file ("key k", "tensor t"), empty for the whole of it. byte: absolute
    offset, None when no single byte is to blame.
    """

    path: str
    about: str
    found: str
    allowed: str
    todo: str
    byte: int | None = None

    def __str__(self) -> str:
        where = f"{self.path}: {self.about}" if self.about else self.path
        where += "" if self.byte is None else f" (byte {self.byte:#x})"
        return f"{where}: {self.found}; {self.allowed}. {self.todo}"

    def error(self) -> FileError:
        """The exception that says this; it carries the parts as `problem`."""
        error = FileError(str(self))
        error.problem = self
        return error


class ArrayValue(Sequence):
    """A GGUF array that stays in the mapped file until someone asks for an element.

    Indexing gives Python values, `tolist()` all of them, `numpy()` a numeric array.
    Raises: FileError on text that is not UTF-8.
    """

    def __init__(self, cursor: "Cursor", kind: str, starts: Sequence[int] | None, span: range):
        self.kind, self._cursor, self._starts, self._span = kind, cursor, starts, span
        # a view made once: the map stays alive as long as the array does
        self._numbers = None
        if kind != "string":
            raw = np.frombuffer(cursor.memory, np.uint8, len(span), span.start)
            self._numbers = raw.view(np.bool_ if kind == "bool" else CODES[kind])

    def __len__(self) -> int:
        return len(self._starts) if self._numbers is None else len(self._numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._numbers is not None:
            return self._numbers[index].item()
        start = self._starts[index]
        return self._cursor.decode(start, self._cursor.length_at(start), "array string")

    def __iter__(self) -> Iterator:
        return iter(self.tolist())

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and self.tolist() == list(other)

    __hash__ = None

    def __repr__(self) -> str:
        return f"<{len(self)} x {self.kind}>"

    def tolist(self) -> list:
        """Every element as a Python value."""
        if self._numbers is not None:
            return self._numbers.tolist()
        return self._cursor.decode_all(self._starts)

    def problems(self) -> list[Problem]:
        """The elements that are not UTF-8 text (numbers have no such problems)."""
        found = []
        for start in self._starts or ():
            try:
                self._cursor.decode(start, self._cursor.length_at(start), "array string")
            except FileError as error:
                found.append(error.problem)
        return found

    def numpy(self) -> np.ndarray:
        """[n] array of the stored type (a view of the file); FileError for strings."""
        if self._numbers is None:
            raise FileError(
                f"{self._cursor.path}: array at byte {self._span.start:#x}: "
                "its elements are strings; numbers are needed here. Correct the key's type."
            )
        return self._numbers


class Cursor:
    """A position in a mapped file; each step is checked against the end."""

    def __init__(self, memory: memoryview, path: str):
        self.memory, self.path, self.position, self.size = memory, path, 0, len(memory)

    @property
    def left(self) -> int:
        """Bytes between the position and the end of the file."""
        return self.size - self.position

    def problem(self, what: str, found: str, allowed: str, todo: str, byte=None) -> Problem:
        """A Problem at `byte` (default: here)."""
        byte = self.position if byte is None else byte
        return Problem(self.path, what, found, allowed, todo, byte)

    def fail(self, *parts, byte=None):
        """Raise the FileError of `problem`."""
        raise self.problem(*parts, byte=byte).error()

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they start."""
        if count > self.left:
            self.fail(
                what,
                f"needs {count} bytes",
                f"{self.left} are left before the end of the file at {self.size:#x}",
                "The file is truncated or damaged: fetch it again.",
            )
        start = self.position
        self.position += count
        return start

    def number(self, code: str, what: str):
        """One little-endian scalar by its struct code."""
        return struct.unpack_from(code, self.memory, self.take(struct.calcsize(code), what))[0]

    def count(self, code: str, least: int, what: str) -> int:
        """A count of things that take at least `least` bytes each."""
        at = self.position
        n = self.number(code, what)
        if n > self.left // least:
            self.fail(
                what,
                f"is {n}",
                f"the {self.left} bytes left hold at most {self.left // least}",
                "The file is truncated or damaged: fetch it again.",
                byte=at,
            )
        return n

    def text(self, what: str, limit: int | None = None) -> str:
        """A length-prefixed UTF-8 string of at most `limit` bytes."""
        at = self.position
        n = self.number("<Q", f"length of {what}")
        most = self.left if limit is None else min(limit, self.left)
        if n > most:
            self.fail(
                f"length of {what}",
                f"is {n}",
                f"at most {most} fit" + ("" if limit is None else f" (the limit is {limit})"),
                "The file is damaged or was written by a broken tool: fetch or convert it again.",
                byte=at,
            )
        return self.decode(self.take(n, what) - 8, n, what)

    def length_at(self, start: int) -> int:
        """The length prefix at `start` (already known to lie in the file)."""
        return _length.unpack_from(self.memory, start)[0]

    def decode(self, start: int, n: int, what: str) -> str:
        """The `n` text bytes behind the length prefix at `start`."""
        try:
            return str(self.memory[start + 8 : start + 8 + n], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(
                what,
                f"byte {error.start} of it is {error.object[error.start]:#04x}",
                "strings are UTF-8",
                "The file is damaged or was written by a broken tool: fetch or convert it again.",
                byte=start + 8 + error.start,
            )

    def decode_all(self, starts: Sequence[int]) -> list[str]:
        """The texts behind neighbouring length prefixes, in one pass over one copy."""
        if not starts:
            return []
        first, last = starts[0], starts[-1]
        raw = bytes(self.memory[first : last + 8 + self.length_at(last)])
        ends = [start - first for start in starts[1:]] + [len(raw)]
        try:
            return [
                raw[start - first + 8 : end].decode()
                for start, end in zip(starts, ends, strict=True)
            ]
        except UnicodeDecodeError:
            # slower, but its message names the byte
            return [self.decode(start, self.length_at(start), "array string") for start in starts]

    def strings(self, what: str) -> array:
        """Step over a string array; returns the position of each length prefix.

        Hops with single-byte lengths and checks a whole chunk of the real 8-byte lengths at once
        (numpy), because 250,000 struct calls cost more than the rest of opening a file.
        """
        n = self.count("<Q", 8, f"number of elements of {what}")
        starts = array("q")
        while len(starts) < n:
            starts.extend(self._hop(min(_HOP, n - len(starts)), what))
        return starts

    def _hop(self, n: int, what: str) -> list[int]:
        memory, begin, starts = self.memory, self.position, []
        try:
            position = begin
            for _ in range(n):
                starts.append(position)
                position += memory[position] + 8
            raw = np.frombuffer(memory, np.uint8)
            lengths = raw[np.array(starts)[:, None] + np.arange(8)].view("<u8")[:, 0]
            steps = np.diff(np.array([*starts, position], np.int64)).astype(np.uint64) - np.uint64(
                8
            )
            if position <= self.size and np.array_equal(lengths, steps):
                self.position = position
                return starts
        except IndexError:
            # ran off the end: the careful walk below finds the element and says it
            pass
        starts = []
        for _ in range(n):
            starts.append(self.position)
            self.take(self.number("<Q", f"length of an element of {what}"), f"element of {what}")
        return starts


def encode(kind: str, value) -> bytes:
    """Type number and value bytes of a metadata entry.

    Args: kind – "uint32", "string", "array[float32]", ...; or "raw": `value` is returned as is.
    Raises: FileError for an unknown kind or a value that does not fit it.
    """
    if kind == "raw":
        return bytes(value)
    inner = kind[6:-1] if kind.startswith("array[") and kind.endswith("]") else None
    if (kind if inner is None else inner) not in TYPE_NUMBERS:
        raise FileError(
            f"metadata value: type {kind!r}; GGUF has {', '.join(TYPE_NUMBERS)} and array[...] "
            "of them. Use one of these names."
        )
    try:
        if inner is None:
            return struct.pack("<I", TYPE_NUMBERS[kind]) + _payload(kind, value)
        head = struct.pack("<IIQ", ARRAY, TYPE_NUMBERS[inner], len(value))
        return head + b"".join(_payload(inner, item) for item in value)
    except (struct.error, TypeError, AttributeError, OverflowError) as error:
        raise FileError(
            f"metadata value: {str(value)[:40]!r} does not fit: {error}; it must be a {kind}. "
            "Correct the value or its type."
        ) from None


def _payload(kind: str, value) -> bytes:
    if kind == "string":
        data = value.encode()
        return struct.pack("<Q", len(data)) + data
    return struct.pack("<?" if kind == "bool" else CODES[kind], value)
