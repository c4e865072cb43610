"""Calls through addresses and atomic counters, for kernels and for the region that runs them."""

from __future__ import annotations

import os

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WORD = ir.IntType(64)


@intrinsic
def call(typingctx, function, arguments, thread, threads):
    """Call the kernel at an address."""

    def emit(context, b, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [WORD] * 3)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def fetch_add(typingctx, counter):
    """Add 1 to the int64 at an address; what was there before."""

    def emit(context, b, signature, args):
        p = b.inttoptr(args[0], WORD.as_pointer())
        return b.atomic_rmw("add", p, ir.Constant(WORD, 1), "acq_rel")

    return types.int64(types.int64), emit


@intrinsic
def read_now(typingctx, counter):
    """The int64 at an address, and everything written before it."""

    def emit(context, b, signature, args):
        return b.load_atomic(b.inttoptr(args[0], WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def write_now(typingctx, counter, value):
    """Write the int64 at an address after everything before it."""

    def emit(context, b, signature, args):
        b.store_atomic(args[1], b.inttoptr(args[0], WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def pause(typingctx, spins):
    """Every 4096th turn of a spin loop, give the core to someone else.

    No pause instruction: many of them in a row trap into the hypervisor of a virtual machine,
    which halved the speed of a token.
    """

    def emit(context, b, signature, args):
        if os.name == "posix":
            tired = b.icmp_signed(
                "==", b.and_(args[0], ir.Constant(WORD, 4095)), ir.Constant(WORD, 4095)
            )
            with b.if_then(tired, likely=False):
                kind = ir.FunctionType(ir.IntType(32), [])
                b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(types.int64), emit
