"""What every weight format shares: shapes, chunks, threads, checks and errors.

A format describes one block: how its bytes turn into codes, scales and offsets, how a block of
weights turns into bytes, and which bytes are invalid. This module turns rows into blocks and back.
Index letters: N rows, K weights per row, n blocks, S bytes per block, B weights per block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from pnrt.errors import FormatError
from pnrt.machine import default_threads

# weights handled at once: temporaries stay in the cache and memory stays flat for any tensor
CHUNK = 1 << 17
BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))


class Parts(NamedTuple):
    """A tensor taken apart as the arithmetic contract wants it.

    codes: [N, K] int32 – code minus zero point (codebook values for codebook formats).
    scale: [N, K / group] float32 – factor of a group of codes.
    offset: [N, K / group] float32 or None – what is added to scale * code.
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None


class Finding(NamedTuple):
    """One broken rule: where (row, block, byte offset inside the row), what, what is allowed."""

    row: int
    block: int
    byte: int
    found: str
    allowed: str


class Format:
    """One weight format; subclasses describe a block, a table row gives its sizes.

    Args:
        name: lower-case name, as the command line spells it.
        type_id: GGUF tensor type, None where the format has none of its own.
        block, nbytes: weights and bytes per block.
        group: weights per scale; 0 where weights have no scale.
        align: what the start of a block may be relied on to be aligned to.
        title: one line for tables.
    """

    # offsets and names of the fp16 fields of a block, which must be finite
    halves: tuple[tuple[int, str], ...] = ((0, "d"),)
    # False for formats that only activations use
    weight = True

    def __init__(
        self,
        name: str,
        type_id: int | None,
        block: int,
        nbytes: int,
        group: int,
        align: int,
        title: str,
    ):
        self.name, self.type_id, self.title = name, type_id, title
        self.block, self.nbytes, self.group, self.align = block, nbytes, group, align

    def __repr__(self) -> str:
        return f"<Format {self.name}: {self.block} weights in {self.nbytes} bytes>"

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.block

    @property
    def unit(self) -> int:
        """Weights a lane of the contract takes at a time (NUMERICS 1)."""
        return 160 if self.group == 80 else 32

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of K weights. Raises FormatError where K does not divide."""
        if columns <= 0 or columns % self.block:
            raise FormatError(
                f"{self.name}: a row of {columns} weights; it takes a positive multiple of "
                f"{self.block}. Choose a format whose block divides {columns}."
            )
        return columns // self.block * self.nbytes

    def columns(self, row_bytes: int) -> int:
        """Weights in a row of so many bytes. Raises FormatError where the bytes do not divide."""
        if row_bytes <= 0 or row_bytes % self.nbytes:
            raise FormatError(
                f"{self.name}: a row of {row_bytes} bytes; it takes a positive multiple of "
                f"{self.nbytes}. Check the tensor's type and shape."
            )
        return row_bytes // self.nbytes * self.block

    def parts(self, rows: np.ndarray) -> Parts:
        """Take rows apart: [N, row_bytes] uint8 -> Parts."""
        blocks = self._blocks(rows)
        with np.errstate(all="ignore"):
            codes, scale, offset = self.block_parts(blocks)
        k = self.columns(rows.shape[1])
        shape = (len(rows), k // self.group)
        offset = None if offset is None else offset.reshape(shape)
        return Parts(codes.reshape(len(rows), k), scale.reshape(shape), offset)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Dequantize: [N, row_bytes] uint8 -> [N, K] float32, to the bit as FORMATS says."""
        rows = self._rows(rows)
        out = np.empty((len(rows), self.columns(rows.shape[1])), np.float32)

        def work(part: slice) -> None:
            with np.errstate(all="ignore"):
                decoded = self.decode_blocks(self._blocks(rows[part]))
            out[part] = decoded.reshape(-1, out.shape[1])

        for part in chunks(*out.shape):
            work(part)
        return out

    def quantize(self, x: np.ndarray, threads: int | None = None) -> np.ndarray:
        """Quantize: [N, K] float32 -> [N, row_bytes] uint8; the same bytes for any thread count.

        Raises FormatError for a NaN or infinity in x (row and element named), for a K that does
        not divide, and for values whose scale the format cannot hold.
        """
        x = self._weights(x)
        out = np.empty((len(x), self.row_bytes(x.shape[1])), np.uint8)

        def work(part: slice) -> None:
            self._refuse_nonfinite(x[part], part.start)
            with np.errstate(all="ignore"):
                blocks = self.encode_blocks(x[part].reshape(-1, self.block))
            out[part] = blocks.reshape(-1, out.shape[1])
            for bad in self._findings(out[part]):
                raise FormatError(
                    f"{self.name}: row {part.start + bad.row} block {bad.block}: {bad.found}; "
                    f"{bad.allowed}. The weights are too large for this format: use another."
                )

        parallel(work, chunks(*x.shape), threads)
        return out

    def findings(self, rows: np.ndarray) -> list[Finding]:
        """Every broken rule in rows [N, row_bytes] uint8, in file order."""
        rows = self._rows(rows)
        return [
            bad._replace(row=part.start + bad.row)
            for part in chunks(len(rows), self.columns(rows.shape[1]))
            for bad in sorted(self._findings(rows[part]))
        ]

    def first_finding(self, rows: np.ndarray, lost: bool = False) -> Finding | None:
        """The first broken rule in rows [N, row_bytes] uint8, None if there is none.

        lost: only look for what integer products would not show (see `block_lost`).
        """
        rows = self._rows(rows)
        for part in chunks(len(rows), self.columns(rows.shape[1])):
            bad = min(self._findings(rows[part], lost), default=None)
            if bad:
                return bad._replace(row=part.start + bad.row)
        return None

    # what a format describes: blocks [n, S] uint8, weights [n, B] float32

    def block_parts(self, blocks: np.ndarray) -> Parts:
        """blocks [n, S] -> codes [n, B], scale and offset [n, B / group]."""
        raise NotImplementedError

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """blocks [n, S] -> [n, B] float32: scale * code (+ offset), each rounded once."""
        codes, scale, offset = self.block_parts(blocks)
        out = codes.astype(np.float32).reshape(len(blocks), -1, self.group)
        out *= scale[:, :, None]
        if offset is not None:
            out += offset[:, :, None]
        return out.reshape(len(blocks), -1)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        """x [n, B] float32, finite -> blocks [n, S] uint8."""
        raise NotImplementedError

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        """(block, byte inside it, found, allowed) for each broken rule of blocks [n, S]."""
        for offset, label in self.halves:
            bits = field(blocks, offset, 1, np.uint16)[:, 0]
            for i in np.flatnonzero(bits & 0x7C00 == 0x7C00):
                value = bits[i : i + 1].view("<f2")[0]
                yield int(i), offset, f"scale {label} is {value}", "it must be finite"

    def block_lost(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        """Those of `block_findings` that make no NaN in an integer product: NaN codes."""
        return ()

    # rows and errors

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.dtype != np.uint8 or rows.ndim != 2:
            raise FormatError(
                f"{self.name}: rows are {rows.dtype} of shape {list(rows.shape)}; "
                f"they are uint8 [rows, bytes per row]. Reshape the tensor's bytes first."
            )
        self.columns(rows.shape[1])
        return rows

    def _blocks(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self._rows(rows)).reshape(-1, self.nbytes)

    def _weights(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if x.dtype != np.float32 or x.ndim != 2:
            raise FormatError(
                f"{self.name}: weights are {x.dtype} of shape {list(x.shape)}; "
                f"they are float32 [rows, weights per row]. Convert them first."
            )
        self.row_bytes(x.shape[1])
        return np.ascontiguousarray(x)

    def _refuse_nonfinite(self, x: np.ndarray, first_row: int = 0) -> None:
        finite = np.isfinite(x)
        if not finite.all():
            row, element = np.argwhere(~finite)[0]
            raise FormatError(
                f"{self.name}: row {first_row + row} element {element} is {x[row, element]}; "
                f"weights must be finite. Repair the tensor before quantizing it."
            )

    def _findings(self, rows: np.ndarray, lost: bool = False) -> Iterator[Finding]:
        per_row = rows.shape[1] // self.nbytes
        find = self.block_lost if lost else self.block_findings
        for i, byte, found, allowed in find(self._blocks(rows)):
            row, block = divmod(i, per_row)
            yield Finding(row, block, block * self.nbytes + byte, found, allowed)


class Searched(Format):
    """A format whose quantizer searches for its scales.

    plain: search with fit.py's slow functions instead of the compiled ones; the bytes are equal.
    """

    plain = False

    @property
    def fit(self):
        """The module of the searches; compiled code is loaded when it is first needed."""
        if self.plain:
            from pnrt.formats import fit

            return fit
        from pnrt.formats import fit_search

        return fit_search

    def quantize_reference(self, x: np.ndarray) -> np.ndarray:
        """`quantize` by the plain searches, the judges of the compiled ones."""
        judge = copy.copy(self)
        judge.plain = True
        return judge.quantize(x, threads=1)


def chunks(rows: int, columns: int) -> list[slice]:
    """Row ranges of about CHUNK weights each."""
    step = max(1, CHUNK // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def parallel(work: Callable, items: list, threads: int | None = None) -> None:
    """Run work(item) for each item; the first item (in order) that raises decides the error."""
    threads = min(threads or default_threads()[0], len(items))
    if threads <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The fp16 field at a byte offset of each block: [n, S] uint8 -> [n] float32."""
    return field(blocks, offset, 1, np.float16)[:, 0].astype(np.float32)


def field(blocks: np.ndarray, offset: int, count: int, dtype: type) -> np.ndarray:
    """Little-endian numbers at a byte offset of each block: [n, S] uint8 -> [n, count] dtype."""
    size = np.dtype(dtype).itemsize
    raw = np.ascontiguousarray(blocks[:, offset : offset + count * size])
    return raw.view(np.dtype(dtype).newbyteorder("<"))


def join(*fields: np.ndarray) -> np.ndarray:
    """Lay fields side by side as bytes: arrays [n] or [n, m] of any dtype -> [n, S] uint8."""
    raw = []
    for each in fields:
        each = each[:, None] if each.ndim == 1 else each
        little = np.ascontiguousarray(each, each.dtype.newbyteorder("<"))
        raw.append(little.view(np.uint8))
    return np.concatenate(raw, axis=1)


def round_away(x: np.ndarray) -> np.ndarray:
    """Round float32 to nearest, halves away from zero, as C's roundf."""
    # the float32 below one half: with it a half rounds up to the next integer, and no less does
    out = np.copysign(BELOW_HALF, x)
    out += x
    return np.trunc(out, out=out)


def most(x: np.ndarray) -> np.ndarray:
    """The largest element of each row: [n, B] -> [n], B a power of two."""
    # halving as a whole: NumPy is slow along short rows
    out = x.reshape(-1)
    while out.size > len(x):
        out = np.maximum(out[::2], out[1::2])
    return out


def whole_codes(codes: np.ndarray, factor: np.ndarray, low: int, high: int) -> np.ndarray:
    """Codes [n, B] float32 within low..high; NaN, from zeros times an infinite factor [n], is 0."""
    if np.isinf(factor).any():
        codes = np.nan_to_num(codes)
    return np.clip(codes, low, high, out=codes)


def inverse(d: np.ndarray) -> np.ndarray:
    """1 / d in float32, 0 where d is 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def largest(x: np.ndarray) -> np.ndarray:
    """The element of largest magnitude of each row, the first of equals: [n, B] -> [n]."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)[:, 0]
