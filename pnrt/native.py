"""Operations of kernels made of LLVM code: calls through addresses, atomic counters."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.types import int64, void

WORD = ir.IntType(64)


def operation(result: types.Type, *arguments: types.Type):
    """Make `emit(b, *values)`, which emits LLVM code, an operation on these numba types.

    Kernels may give it whatever numba casts to them.
    """
    return lambda emit: typed(emit, lambda given: (result(*arguments), emit))


def typed(emit: Callable, choose: Callable):
    """The same where `choose(types of the arguments)` gives the signature and the code to emit."""

    def op(typingctx, *given):
        signature, code = choose(given)

        def generate(context, b, signature, values):
            value = code(b, *values)
            return context.get_dummy_value() if value is None else value

        return signature, generate

    # numba asks how many arguments there are; those with a default are the emitter's own
    parameters = inspect.signature(emit).parameters.values()
    op.__signature__ = inspect.Signature([p for p in parameters if p.default is p.empty])
    op.__name__, op.__doc__ = emit.__name__, emit.__doc__
    return intrinsic(op)


@operation(void, int64, int64, int64, int64)
def call(b, function, arguments, thread, threads):
    """Call the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [WORD] * 3)
    b.call(b.inttoptr(function, kind.as_pointer()), [arguments, thread, threads])


def _counter(b, address):
    return b.inttoptr(address, WORD.as_pointer())


@operation(int64, int64)
def fetch_add(b, counter):
    """Add 1 to the int64 at an address; what was there before."""
    return b.atomic_rmw("add", _counter(b, counter), ir.Constant(WORD, 1), "acq_rel")


@operation(int64, int64)
def read_now(b, counter):
    """The int64 at an address, and everything written before it."""
    return b.load_atomic(_counter(b, counter), "acquire", 8)


@operation(void, int64, int64)
def write_now(b, counter, value):
    """Write the int64 at an address after everything before it."""
    b.store_atomic(value, _counter(b, counter), "release", 8)


@operation(void, int64)
def pause(b, spins):
    """Every 4096th turn of a spin loop, give the core to someone else.

    No pause instruction: many of them in a row trap into the hypervisor of a virtual machine,
    which halved the speed of a token.
    """
    if os.name == "posix":
        turns = ir.Constant(WORD, 4095)
        with b.if_then(b.icmp_signed("==", b.and_(spins, turns), turns), likely=False):
            kind = ir.FunctionType(ir.IntType(32), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])
