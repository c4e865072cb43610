"""What kernels are made of and declared with; lowering.py makes them, build.py compiles them.

A kernel is a plain Python function over words (lanes.py) whose parameters are annotated u64, u32,
i32 or f32.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

TYPES = {"u64": np.uint64, "u32": np.uint32, "i32": np.int32, "f32": np.float32}


class KernelError(Exception):
    """A kernel's source says something the small language does not have: a fault of ours."""


class Op:
    """A word of the language; its meanings are in standin.py and intrinsics.py."""

    def __init__(self, name: str, doc: str):
        self.name, self.__doc__ = name, doc

    def __call__(self, *args):
        raise KernelError(f"{self.name}: only usable inside a kernel")

    def __repr__(self) -> str:
        return f"<Op {self.name}>"


class Device:
    """A function that kernels call: its body is put in their place."""

    def __init__(self, function: Callable):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args):
        raise KernelError(f"{self.function.__name__}: only usable inside a kernel")


def device(function: Callable) -> Device:
    """Declare a function of words; it has one return, at its end, or none."""
    return Device(function)


def registers():
    """`x = registers()` makes x an array: x[0], x[1], .. are variables of their own."""
    raise KernelError("registers: only usable inside a kernel")


def unroll(items):
    """`for i in unroll(5)` or `unroll(iterable)`: repeat the body for each item."""
    return range(items) if isinstance(items, int) else items


class Lowered(NamedTuple):
    """A kernel in the small language.

    body: statements; words: every name they use that is not a variable -> Op or NumPy number.
    """

    name: str
    params: tuple[tuple[str, str], ...]
    body: list[ast.stmt]
    words: dict[str, Any]

    @property
    def source(self) -> str:
        """The lowered function as Python text."""
        names = [ast.arg(name) for name, _ in self.params]
        args = ast.arguments([], names, None, [], [], None, [])
        tree = ast.FunctionDef(self.name, args, self.body or [ast.Pass()], [], type_params=[])
        return ast.unparse(ast.fix_missing_locations(tree))


class Kernel:
    """A kernel `f(..)` without a result; lowered when first asked for.

    threads: threads per block it is launched with; registers: the most a thread may use.
    """

    def __init__(self, function: Callable, name: str, threads: int, registers: int):
        self.function, self.name = function, name
        self.threads, self.registers = threads, registers
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

    @functools.cached_property
    def lowered(self) -> Lowered:
        from pnrt.cuda.lowering import lower

        return lower(self.name, self.function)


class Call(NamedTuple):
    """A launch: the kernel, its grid (blocks in x and y), its arguments in order."""

    kernel: Kernel
    grid: tuple[int, int]
    args: tuple


class Sequence(NamedTuple):
    """Prepared launches: run() starts them in order.

    launches: per run; nodes: kernels in the captured graph, 0 without one.
    """

    run: Callable[[], None]
    launches: int
    nodes: int


def kernel(function: Callable | None = None, *, name="", threads=128, registers=64):
    """Declare a kernel; nothing is lowered or compiled until it is used.

    Args:
        name: unique; module.function by default.
        threads: per block, a multiple of 32. registers: the most a thread may use.
    """
    if function is None:
        return functools.partial(kernel, name=name, threads=threads, registers=registers)
    own = f"{function.__module__.removeprefix('pnrt.cuda.')}.{function.__name__}"
    return Kernel(function, name or own, threads, registers)
