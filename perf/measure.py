"""Clocks: medians with their spread, the machine's read bandwidth, what the machine is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import get_num_threads, njit, prange, set_num_threads

from pnrt import bench, jit

# far beyond any last-level cache
READ_BYTES = 1 << 30


def seconds(job: Callable[[], Any], budget: float = 1.0, least: int = 3, most: int = 200) -> list:
    """Seconds of each run of a job: one warm-up, then `least` runs or as many as fit the budget."""
    job()
    taken: list[float] = []
    while len(taken) < least or (sum(taken) < budget and len(taken) < most):
        start = time.perf_counter()
        job()
        taken.append(time.perf_counter() - start)
    return taken


def summary(values: list[float]) -> dict[str, float]:
    """Median, smallest, largest, and (largest - smallest) / median."""
    middle = statistics.median(values)
    low, high = min(values), max(values)
    return {"median": middle, "min": low, "max": high, "spread": (high - low) / middle}


@njit(parallel=True)
def _sum(x, parts):
    totals = np.zeros(parts, np.int64)
    for part in prange(parts):
        share = x[len(x) * part // parts : len(x) * (part + 1) // parts]
        total = np.int64(0)
        for i in range(share.size):
            total += share[i]
        totals[part] = total
    return totals.sum()


def read_bandwidth(threads: int, nbytes: int = READ_BYTES) -> float:
    """Bytes per second of a sum over int64 memory on `threads` threads; the best run.

    Integers, because LLVM may add them in any order: the loop waits for memory only. Memory
    that fits the last-level cache is read from there.
    """
    jit.threading_layer()
    x = np.ones(nbytes // 8, np.int64)
    before = get_num_threads()
    set_num_threads(threads)
    try:
        taken = seconds(lambda: _sum(x, threads), budget=0.3, least=5)
    finally:
        set_num_threads(before)
    return x.nbytes / min(taken)


def machine(threads: int, load: float) -> dict[str, Any]:
    """Machine, versions, threads, load before the run: a number means nothing without them."""
    return {**bench.machine(), "threads": threads, "layer": jit.threading_layer(), "load": load}
