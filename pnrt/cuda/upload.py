"""Matrices to the GPU: packed piece by piece on the host while earlier pieces are copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pnrt.cuda.pack import Weight
from pnrt.cuda.packers import pack_rows
from pnrt.machine import default_threads

# bytes of a file's rows packed at once
PIECE = 8 << 20


class Matrix(NamedTuple):
    """What to copy where: rows [n, row bytes] uint8 of the file, to a packed layout at address.

    start: the row of the matrix that rows begins with.
    """

    weight: Weight
    rows: np.ndarray
    address: int
    start: int = 0


def pieces(matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Row ranges of about PIECE bytes."""
    step = max(1, PIECE // matrix.rows.shape[1])
    for first in range(0, len(matrix.rows), step):
        yield first, min(first + step, len(matrix.rows))


def upload(
    device: Any,
    matrices: Iterable[Matrix],
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Pack and copy matrices, at most `threads` pieces ahead of the copy.

    Args:
        device: launch.Gpu or standin.StandIn.
        matrices: taken one by one, in order.
        threads: that pack; None for as many as this process may use.
        progress: told of the file's bytes after each piece.
    """

    def work(matrix: Matrix, first: int, last: int):
        return pack_rows(matrix.weight.format, matrix.rows[first:last], matrix.weight.K)

    def finish() -> None:
        matrix, first, last, packed = waiting.popleft()
        sizes, offsets = matrix.weight.row_bytes, matrix.weight.offsets
        for plane, size, offset in zip(packed.result(), sizes, offsets, strict=True):
            device.write(matrix.address + offset + (matrix.start + first) * size, plane)
        if progress:
            progress((last - first) * matrix.rows.shape[1])

    threads = threads or default_threads()[0]
    waiting: deque = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for matrix in matrices:
                for first, last in pieces(matrix):
                    waiting.append((matrix, first, last, pool.submit(work, matrix, first, last)))
                    if len(waiting) > threads:
                        finish()
            while waiting:
                finish()
        finally:
            pool.shutdown(cancel_futures=True)
