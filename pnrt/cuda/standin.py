"""A machine without a GPU: kernels' own source, every thread an element of NumPy vectors.

All threads of the grid go through the lowered source together, under a mask where they part. What a
GPU would leave undefined is an error here: an address outside every allocation or not aligned, a
shuffle or barrier that not all its threads reach, two types in one operator, a variable without a
value, and a word of shared memory that two threads touch with no barrier between them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable

import numpy as np

from pnrt.cuda.kernel import TYPES, Call, Kernel, KernelError, Op, Sequence
from pnrt.cuda.shared import SharedMemory, number
from pnrt.cuda.vectors import WORDS

ALIGNMENT = 256
# reserved address space; pages are touched as they are allocated
ARENA = 1 << 30


class StandIn:
    """Memory and launches of a pretended device; the methods of launch.Device."""

    name = "stand-in"
    # wide launches cost NumPy little more than narrow ones
    processors = 8

    def __init__(self, nbytes: int = ARENA):
        self._nbytes = nbytes
        self._map()
        self.launches: list[str] = []

    def _map(self) -> None:
        nbytes = self._nbytes
        self._memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        skip = -self._memory.ctypes.data % ALIGNMENT
        self._memory = self._memory[skip : skip + nbytes]
        self._owned = np.zeros(nbytes, bool)
        # low addresses stay unmapped, so that a forgotten base is caught
        self._base, self._used = 1 << 32, 0

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        return len(self._memory) - self._used, len(self._memory)

    def reserve(self, nbytes: int) -> None:
        """A GPU takes its arena here; this one has it, and after close maps another."""
        if not len(self._memory):
            self._map()

    def allocate(self, nbytes: int) -> int:
        """Address of nbytes of memory filled with 0xFF (NaN), aligned to 256."""
        at = self._used
        # a gap behind each allocation catches what runs over
        self._used = -(-(at + nbytes + 1) // ALIGNMENT) * ALIGNMENT
        if self._used > len(self._memory):
            raise MemoryError(f"stand-in: {self._used} bytes of {len(self._memory)}")
        self._memory[at : at + nbytes] = 0xFF
        self._owned[at : at + nbytes] = True
        return self._base + at

    def mark(self) -> int:
        """Where free memory begins, for release."""
        return self._used

    def release(self, mark: int) -> None:
        """Give back what was allocated after a mark."""
        self._owned[mark : self._used] = False
        self._used = mark

    def write(self, address: int, values: np.ndarray) -> None:
        """Copy an array to an address."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._memory[self._range(address, len(raw))] = raw

    def read(self, address: int, shape, dtype=np.float32) -> np.ndarray:
        """Copy an array from an address."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._memory[self._range(address, nbytes)].copy().view(dtype).reshape(shape)

    def _range(self, address: int, nbytes: int) -> slice:
        at = address - self._base
        if nbytes and not (
            at >= 0 and at + nbytes <= self._used and self._owned[at : at + nbytes].all()
        ):
            raise KernelError(f"copy of {nbytes} bytes at {address:#x}: outside every allocation")
        return slice(at, at + nbytes)

    def upload(self, values: np.ndarray) -> int:
        """Allocate, copy, and return the address."""
        address = self.allocate(values.nbytes)
        self.write(address, values)
        return address

    def launch(self, kernel: Kernel, grid: int | tuple[int, int], *args) -> None:
        """Run a kernel on a grid of blocks (x, or x and y); args in the order of its parameters."""
        grid = (grid, 1) if isinstance(grid, int) else grid
        self.launches.append(kernel.name)
        _Run(self, kernel, grid).run(args)

    def sequence(self, calls: Iterable[Call], graph: bool = False) -> Sequence:
        """Launches to be run again and again."""
        calls = list(calls)
        return Sequence(lambda: self.run(calls), *((1, len(calls)) if graph else (len(calls), 0)))

    def run(self, calls: Iterable[Call]) -> None:
        """Launch calls in order."""
        for call in calls:
            self.launch(call.kernel, call.grid, *call.args)

    def synchronize(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Give the memory back."""
        self._memory = self._owned = np.empty(0, np.uint8)
        self._used = 0


def _meaning(name: str) -> Callable:
    if name not in WORDS:
        raise KernelError(f"the stand-in has no word {name}")
    return WORDS[name]


@functools.cache
def _compiled(node: ast.expr):
    return compile(ast.fix_missing_locations(ast.Expression(node)), "<kernel>", "eval")


class _Run:
    """One launch: the words' meanings, the mask, shared memory."""

    def __init__(self, device: StandIn, kernel: Kernel, grid: tuple[int, int]):
        self.device, self.kernel, self.grid = device, kernel, grid
        self.count = grid[0] * grid[1] * kernel.threads
        number = np.arange(self.count)
        self.tid = (number % kernel.threads).astype(np.uint32)
        self.block_of = number // kernel.threads
        self.warp_of = number // 32
        # None while every thread takes part
        self.mask: np.ndarray | None = None
        self.shared: SharedMemory | None = None
        self.vars: dict[str, object] = {}
        self.line = ""

    def run(self, args) -> None:
        lowered = self.kernel.lowered
        if len(args) != len(lowered.params):
            raise KernelError(f"{self.kernel.name}: {len(args)} arguments for {lowered.params}")
        for (name, kind), value in zip(lowered.params, args, strict=True):
            self.vars[name] = TYPES[kind](value)
        self.words = {
            name: functools.partial(_meaning(word.name), self) if isinstance(word, Op) else word
            for name, word in lowered.words.items()
        }
        self.words["__builtins__"] = {}
        with np.errstate(all="ignore"):
            try:
                self.block(lowered.body)
            except KernelError as error:
                raise KernelError(f"{self.kernel.name}: {error} in: {self.line}") from None

    def eval(self, node: ast.expr):
        try:
            return eval(_compiled(node), self.words, self.vars)
        except NameError as error:
            raise KernelError(f"no value: {error.name}") from None
        except KernelError:
            self.line = self.line or ast.unparse(node)
            raise

    def block(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Assign):
                self.assign(node.targets[0], self.eval(node.value))
            elif isinstance(node, ast.Expr):
                self.eval(node.value)
            elif isinstance(node, ast.If):
                self.branch(node)
            elif isinstance(node, ast.While):
                self.loop(node)

    def assign(self, target: ast.expr, value) -> None:
        if isinstance(target, ast.Tuple):
            for each, v in zip(target.elts, value, strict=True):
                self.assign(each, v)
            return
        old = self.vars.get(target.id)
        if old is not None and not isinstance(value, tuple):
            if old.dtype != value.dtype:
                self.line = target.id
                raise KernelError(f"{target.id} is {old.dtype} and becomes {value.dtype}")
            if self.mask is not None:
                value = np.where(self.mask, value, old)
        self.vars[target.id] = value

    def test(self, node: ast.expr) -> np.ndarray:
        value = self.eval(node)
        if getattr(value, "dtype", None) != np.dtype(bool):
            self.line = ast.unparse(node)
            raise KernelError("a condition must be bool")
        return value

    def branch(self, node: ast.If) -> None:
        outer, test = self.mask, self.test(node.test)
        active = np.ones(self.count, bool) if outer is None else outer
        for mask, body in ((active & test, node.body), (active & ~test, node.orelse)):
            if mask.any():
                self.mask = None if mask.all() else mask
                self.block(body)
        self.mask = outer

    def loop(self, node: ast.While) -> None:
        outer = self.mask
        live = np.ones(self.count, bool) if outer is None else outer
        while True:
            live = live & self.test(node.test)
            if not live.any():
                break
            self.mask = None if live.all() else live
            self.block(node.body)
        self.mask = outer

    # what words need

    def vector(self, value) -> np.ndarray:
        return value if np.shape(value) == (self.count,) else np.broadcast_to(value, self.count)

    def together(self, what: str, groups: np.ndarray) -> None:
        """Refuse a collective that only part of a group reaches."""
        if self.mask is None:
            return
        sizes = np.bincount(groups)
        reached = np.bincount(groups[self.mask], minlength=len(sizes))
        if ((reached != 0) & (reached != sizes)).any():
            raise KernelError(f"{what}: reached by some threads of a group only")

    def places(self, address, size: int) -> np.ndarray:
        """Checked offsets into the device's memory; those of masked threads are harmless."""
        address = number(address)
        if address.dtype != np.uint64:
            raise KernelError(f"an address is u64, not {address.dtype}")
        device = self.device
        at = self.vector(address).astype(np.int64) - device._base
        if self.mask is not None:
            at = np.where(self.mask, at, at[self.mask][0])
        good = (at >= 0) & (at + size <= device._used) & (at % size == 0)
        if good.all():
            good = device._owned[at] & device._owned[at + size - 1]
        if not good.all():
            i = int(np.flatnonzero(~good)[0])
            where = f"block {self.block_of[i]} thread {self.tid[i]}"
            raise KernelError(f"bad address {at[i] + device._base:#x} for {size} bytes, {where}")
        return at
