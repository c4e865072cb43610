"""Kernels that do not wait for each other in one launch: each has some of its blocks."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Sequence
from itertools import accumulate

from pnrt.cuda import delta, elementwise, norm
from pnrt.cuda.kernel import Call, Kernel, KernelError, Lowered, Op


class Together(Kernel):
    """Kernels of one block size; the block's number decides which it runs.

    Its parameters: for each kernel the block behind its last, then its own.
    """

    def __init__(self, kernels: tuple[Kernel, ...]):
        self.kernels = kernels
        self.name = "_and_".join(each.name for each in kernels)
        self.threads, self.registers = kernels[0].threads, max(k.registers for k in kernels)
        if any(each.threads != self.threads or _shared(each) for each in kernels):
            raise KernelError(f"{self.name}: blocks of one size and no shared memory are needed")

    @functools.cached_property
    def lowered(self) -> Lowered:
        params, words, body = [], {n: Op(n, "") for n in ("block", "lt", "sub")}, []
        for i, each in enumerate(self.kernels):
            params += [(f"end_{i}", "u32"), *((f"of_{i}_{n}", t) for n, t in each.lowered.params)]
            words |= each.lowered.words
        for i, each in reversed(list(enumerate(self.kernels))):
            mine = _Moving(i, each.lowered.words)
            here = [mine.visit(copy.deepcopy(node)) for node in each.lowered.body]
            test = _call("lt", _call("block"), ast.Name(f"end_{i}", ast.Load()))
            # the last kernel has every block that is left
            body = [ast.If(test, here, body)] if body else here
        return Lowered(self.name, tuple(params), body, words)


def _shared(kernel: Kernel) -> bool:
    return "shared" in kernel.lowered.words


def _call(word: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(word, ast.Load()), list(args), [])


class _Moving(ast.NodeTransformer):
    """A kernel's variables get names of their own, its blocks begin where the last one's end."""

    def __init__(self, number: int, words: dict[str, object]):
        self.number, self.words = number, words

    def visit_Name(self, node):
        return node if node.id in self.words else ast.Name(f"of_{self.number}_{node.id}", node.ctx)

    def visit_Call(self, node):
        self.generic_visit(node)
        before = ast.Name(f"end_{self.number - 1}", ast.Load())
        if node.func.id == "block":
            return _call("sub", node, before) if self.number else node
        if node.func.id == "blocks":
            end = ast.Name(f"end_{self.number}", ast.Load())
            return _call("sub", end, before) if self.number else end
        return node


@functools.cache
def _together(kernels: tuple[Kernel, ...]) -> Kernel:
    return Together(kernels)


def together(calls: Sequence[Call]) -> Call:
    """One launch of calls over as many rows in y that neither read nor write what others write."""
    if len(calls) == 1:
        return calls[0]
    args = []
    for call, end in zip(calls, accumulate(call.grid[0] for call in calls), strict=True):
        args += [end, *call.args]
    grid = (sum(call.grid[0] for call in calls), calls[0].grid[1])
    return Call(_together(tuple(call.kernel for call in calls)), grid, tuple(args))


def kernels() -> list[Kernel]:
    """One of three kernels."""
    found = (delta.conv_silu_kernel, elementwise.sigmoid_kernel, norm.l2_norm_kernel)
    return [_together(found)]
