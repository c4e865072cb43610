"""The order in which the contract takes the units of a row, and how threads share the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pnrt.jit import inline
from pnrt.native import fetch_add, write_now
from pnrt.simd import add

LANES = 32


def walk(units: int) -> np.ndarray:
    """The contract's order: [lanes used, 2] int64 of a lane and the sums to add when it ends.

    Lanes come in bit-reversed order, and a lane's end completes that many nodes of the butterfly.
    Lanes without units are left out: they would add +0.0.
    """
    steps: list[list[int]] = []

    def node(first: int, stride: int) -> bool:
        if first >= units:
            return False
        if stride == LANES:
            steps.append([first, 0])
        else:
            node(first, 2 * stride)
            if node(first + stride, 2 * stride):
                steps[-1][1] += 1
        return True

    node(0, 1)
    return np.array(steps, np.int64)


def order_of(units: int) -> np.ndarray:
    """The units in the contract's order: int64 [units]."""
    return np.concatenate([np.arange(lane, units, LANES) for lane in walk(units)[:, 0]])


def places_of(units: int) -> np.ndarray:
    """Where each unit lies in the contract's order: int64 [units]."""
    return np.argsort(order_of(units))


def make_finish(count: int, load: Callable, store: Callable) -> Callable:
    """finish(acc, sums, stack): a lane's end, adding the partial sums it completes; the new stack.

    count: vectors in a sum. The last lane's sum ends on the bottom of the stack.
    """
    size = count * 64

    @inline
    def finish(acc, merges, stack):
        for _ in range(merges):
            stack -= size
            acc = add(load(stack, 64), acc)
        store(stack, 64, acc)
        return stack + size

    return finish


@inline
def draw(ticket, items, threads):
    """The next of `items`, handed out once; the last thread to come away empty starts anew."""
    item = fetch_add(ticket)
    if item == items + threads - 1:
        write_now(ticket, 0)
    return item
