"""Correctly rounded fma, the elementary functions on arrays, and sums over 32 lanes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pnrt import scalars

LANES = 32

f32 = np.float32
# overflow to infinity and NaN are results here, not accidents
quiet = np.errstate(all="ignore")


@quiet
def fma(a, b, c) -> np.ndarray:
    """a * b + c with one rounding.

    Args:
        a, b, c: float32 – broadcast against each other.
    Returns:
        float32 – the correctly rounded result, subnormals and infinities included.
    """
    c = np.asarray(c, np.float64)
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact: 48 bits
    total = np.asarray(product + c)
    # rounding twice is wrong only where the first one landed halfway between two float32: there,
    # and below the normal range where the halves lie elsewhere, round the first time to odd
    risky = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    risky |= np.abs(total) < 2.0**-126
    if risky.any():
        product, c = (np.broadcast_to(v, total.shape)[risky] for v in (product, c))
        total[risky] = _round_to_odd(total[risky], product, c)
    return total.astype(f32)


def _round_to_odd(total: np.ndarray, p: np.ndarray, c: np.ndarray) -> np.ndarray:
    """p + c, given total = p + c rounded to nearest; if inexact, the neighbour with an odd bit."""
    t = total - p
    error = (p - (total - t)) + (c - t)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, towards), total)


def _compile(function):
    def elementwise(x):
        return function(np.asarray(x, f32))

    elementwise.__doc__ = function.__doc__
    return quiet(elementwise)


exp, log1p, sigmoid, silu, softplus = scalars.build(
    SimpleNamespace(
        add=np.add,
        sub=np.subtract,
        mul=np.multiply,
        div=np.divide,
        fma=fma,
        f32=np.float32,
        i32=np.int32,
        float_to_bits=lambda x: x.view(np.int32),
        bits_to_float=lambda x: x.view(np.float32),
        select=np.where,
        compile=_compile,
    )
)


def butterfly(lanes: np.ndarray) -> np.ndarray:
    """lanes [32, ...] -> [...]: the sum a warp's xor butterfly leaves in lane 0."""
    for s in (16, 8, 4, 2, 1):
        lanes = lanes[:s] + lanes[s : 2 * s]
    return lanes[0]


@quiet
def lane_sum(x, squares: bool = False) -> np.ndarray:
    """Sum over the last axis: lane l takes l, l+32, ... ascending, then the butterfly.

    Args:
        x: [..., D] – what to sum.
        squares: sum x * x instead, each by fma.
    Returns:
        [...] – the sums.
    """
    x = np.moveaxis(np.asarray(x, f32), -1, 0)
    lanes = np.zeros((LANES, *x.shape[1:]), f32)
    for first in range(0, len(x), LANES):
        part = x[first : first + LANES]
        mine = lanes[: len(part)]
        mine[:] = fma(part, part, mine) if squares else mine + part
    return butterfly(lanes)
