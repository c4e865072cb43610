"""Assertions for differential tests: equality is of bits, and a difference names its place."""

from __future__ import annotations

import numpy as np


def assert_bits_equal(name: str, expected: np.ndarray, got: np.ndarray) -> None:
    """Raise AssertionError unless two float32 arrays have the same bits.

    Args:
        name: what is compared; the message starts with it.
        expected, got: float32 of one shape; any NaN equals any NaN.
    """
    expected, got = np.asarray(expected, np.float32), np.asarray(got, np.float32)
    if expected.shape != got.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {expected.shape}")
    a, b = expected.reshape(-1).view(np.uint32), got.reshape(-1).view(np.uint32)
    both_nan = np.isnan(expected.reshape(-1)) & np.isnan(got.reshape(-1))
    bad = np.flatnonzero((a != b) & ~both_nan)
    if not bad.size:
        return
    with np.errstate(invalid="ignore"):
        error = np.abs(expected.reshape(-1)[bad].astype(np.float64) - got.reshape(-1)[bad])
    # a difference with a NaN on one side is the worst there is
    worst = bad[np.argmax(np.nan_to_num(error, nan=np.inf))]

    def show(i: int) -> str:
        place = tuple(int(j) for j in np.unravel_index(i, expected.shape))
        return (
            f"{place}: {expected.reshape(-1)[i]!r} (0x{a[i]:08x}) expected, "
            f"{got.reshape(-1)[i]!r} (0x{b[i]:08x}) found"
        )

    raise AssertionError(
        f"{name}: {bad.size} of {a.size} differ; first at {show(bad[0])}; worst at {show(worst)}"
    )
