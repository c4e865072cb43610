"""Embedding: the table stays on the host, which decodes the rows of the tokens; rows of logits."""

from __future__ import annotations

import numpy as np

from pnrt.cuda.control import index, start, tokens
from pnrt.cuda.kernel import Kernel, kernel
from pnrt.cuda.lanes import at, block_y, load_u32, store_u32, u32, u64
from pnrt.formats import FORMATS


def lookup(name: str, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Decode the rows of tokens on the host: a row a token is not worth a table on the device.

    Args:
        name: format; rows: [V, row_bytes] uint8; tokens: [T] ids.
    Returns: [T, K] float32.
    """
    return np.ascontiguousarray(FORMATS[name].decode(rows[tokens]), np.float32)


@kernel(name="take")
def take_kernel(x: u64, x_width: u32, out: u64, out_width: u32, n: u32, control: u64):
    """Twin of pnrt.cpu.embed.take_kernel; grid: n threads, a y block per row."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        value = load_u32(at(x, (start(control) + t) * x_width + i, 4))
        store_u32(at(out, t * out_width + i, 4), value)


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [take_kernel]
