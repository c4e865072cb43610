"""What the threads of a region do: call kernels by address, count atomically, wait."""

from __future__ import annotations

import os
import platform
import sys

from llvmlite import ir
from numba.types import int64, void

from pnrt.emit import I32, I64, call_named, operation, pointer

# the number of Linux's futex call; elsewhere a waiting thread only lets others go first
_MACHINES = {"x86_64": 202, "aarch64": 98}
FUTEX = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
WAIT, WAKE, EVERYBODY = 128, 129, 2**31 - 1


@operation(void, int64, int64, int64, int64)
def call(b, function, arguments, thread, threads):
    """Call the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
    b.call(pointer(b, function, kind), [arguments, thread, threads])


def _add(b, address, n):
    return b.atomic_rmw("add", pointer(b, address, I64), I64(n), "acq_rel")


@operation(int64, int64)
def fetch_add(b, counter):
    """Add 1 to the int64 at an address; what was there before."""
    return _add(b, counter, 1)


@operation(int64, int64)
def read_now(b, counter):
    """The int64 at an address, and everything written before it."""
    return b.load_atomic(pointer(b, counter, I64), "acquire", 8)


@operation(void, int64, int64)
def write_now(b, counter, value):
    """Write the int64 at an address after everything before it."""
    b.store_atomic(value, pointer(b, counter, I64), "release", 8)


def _futex(b, address, *arguments):
    values = [I64(FUTEX), address, *arguments, I64(0), I64(0), I64(0)]
    call_named(b, "syscall", I64, values, var_arg=True)


@operation(void, int64, int64)
def sleep(b, counter, seen):
    """Give the core away until `wake`; not at all once the counter's low half is not `seen`.

    The counter's high half counts those who sleep, or are about to.
    """
    if FUTEX:
        _add(b, counter, 1 << 32)
        # the kernel compares again
        _futex(b, counter, I64(WAIT), seen)
        _add(b, counter, -1 << 32)
    elif os.name == "posix":
        call_named(b, "sched_yield", I32, [])


@operation(void, int64)
def wake(b, counter):
    """Wake all who sleep at a counter."""
    if FUTEX:
        _futex(b, counter, I64(WAKE), I64(EVERYBODY))
