"""What stands before products, in one kernel: norm, gate, order of heads, rotation, activations.

A block takes the numbers that are rotated together (`wide` of them), so nothing goes through memory
between: a thread has a number, a warp the 32 that are coded together. A norm's factor is found by
every block anew.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from pnrt.cuda.activations import VIEWS, code_block, note
from pnrt.cuda.elementary import sigmoid, silu
from pnrt.cuda.kernel import Call, Kernel, device, kernel, unroll
from pnrt.cuda.lanes import (
    at,
    block,
    block_y,
    f32,
    fetch_f32,
    i32,
    lane,
    load_f32,
    shared,
    shared_load_f32,
    shared_store_f32,
    sqrt,
    syncthreads,
    thread,
    u32,
    u64,
    warp,
)
from pnrt.cuda.norm import squares
from pnrt.cuda.rotate import add_and_subtract, in_warp, scale_of

THREADS = 256
# views of a chain at most, and what the kernel gets of each: its address and that of its flag
MOST = 3
TARGETS = ((u64, u64),) * MOST
# loads of a lane that are under way together, at most
AHEAD = 32


class Norm(NamedTuple):
    """RMS norm of `heads` runs of n numbers, `stride` apart in the source."""

    n: int
    heads: int
    stride: int
    eps: float


class Gate(NamedTuple):
    """a * sigmoid(gate): the gate's `heads` runs of n begin at `first` and are `stride` apart."""

    n: int
    heads: int
    stride: int
    first: int


class Regroup(NamedTuple):
    """Heads of n numbers in the order of regroup_kernel."""

    n: int
    heads: int
    groups: int


class Chain(NamedTuple):
    """A kernel: its parts in this order, those that are None, '' or 0 left out.

    width: numbers of a row; norm: of x; join: 'swiglu' of x and y or of y and x ('swiglu of y'), or
    'sigmoid_gate' of x by y; rotate: the size of what is transformed together, after the signs if
    there are any; views: (whether rotated, its name).
    """

    width: int
    norm: Norm | None
    join: str
    gate: Gate | None
    regroup: Regroup | None
    rotate: int
    signs: bool
    views: tuple[tuple[bool, str], ...]

    @property
    def wide(self) -> int:
        """Numbers that a block of threads takes."""
        return max(self.rotate, THREADS)

    @property
    def blocks(self) -> int:
        """Blocks of 32 numbers that are coded, those behind the last column too."""
        return max(VIEWS[view].units(self.width) * VIEWS[view].blocks for _, view in self.views)

    @property
    def name(self) -> str:
        """Says all that decides what the kernel does."""
        norm = f"norm_{self.norm.n}_{self.norm.stride}_{self.norm.eps:g}" if self.norm else ""
        gate = f"{self.gate.n}_{self.gate.stride}_{self.gate.first}" if self.gate else ""
        order = "regroup_{}_{}_{}".format(*self.regroup) if self.regroup else ""
        turned = f"rot_{self.rotate}{'_signs' if self.signs else ''}" if self.rotate else ""
        views = [view + "_rot" * rotated for rotated, view in self.views]
        parts = [norm, self.join.replace(" ", "_"), gate, order, turned, str(self.width), *views]
        return "_".join(filter(None, parts))


def _source(c: Chain):
    """@device: number i of a row as it is before the rotation."""

    @device
    def moved(i):
        """Where number i lies before heads are put in another order."""
        where = i
        if c.regroup:
            per = c.regroup.heads // c.regroup.groups
            to = i // c.regroup.n
            where = (to % per * c.regroup.groups + to // per) * c.regroup.n + i % c.regroup.n
        return where

    @device
    def factors(x, first, base):
        """Norm factors of the heads of a block's numbers, into shared memory."""
        n = c.norm.n
        end = min((first + (c.wide - 1)) // n + 1, u32(c.norm.heads))
        for h in range(first // n + warp(), end, THREADS // 32):
            mean = sum_of_squares(at(x, moved(h * n) // n * c.norm.stride, 4), u32(n)) / f32(n)
            r = 1.0 / sqrt(mean + c.norm.eps)
            if lane() == 0:
                shared_store_f32(base + (h - first // n) * 4, r)
        syncthreads()

    @device
    def source(x, y, weight, i, first, base):
        k = moved(i)
        if c.norm:
            n = c.norm.n
            r = shared_load_f32(base + (i // n - first // n) * 4)
            v = load_f32(at(x, k // n * c.norm.stride + k % n, 4)) * r
            a = v * fetch_f32(at(weight, k % n, 4))
        else:
            a = load_f32(at(x, k, 4))
        if c.join == "swiglu":
            a = silu(a) * load_f32(at(y, k, 4))
        if c.join == "swiglu of y":
            a = silu(load_f32(at(y, k, 4))) * a
        if c.join == "sigmoid_gate":
            g = c.gate
            gate = load_f32(at(y, k // g.n * g.stride + g.first + k % g.n, 4))
            a = a * sigmoid(gate)
        return a

    # as many loads at once as go into n without a rest
    ahead = max((k for k in range(1, AHEAD + 1) if c.norm and c.norm.n // 32 % k == 0), default=1)
    sum_of_squares = squares(ahead)
    return factors, source


@device
def signed(value, signs, i, width):
    """Number i of a row times its sign."""
    if i < width:
        value = value * fetch_f32(at(signs, i, 4))
    return value


def _writer(c: Chain, rotated: bool):
    """@device: code a warp's 32 numbers once and store them in every view of them."""
    mine = [(i, VIEWS[name]) for i, (turned, name) in enumerate(c.views) if turned == rotated]
    coded = [i for i, view in mine if view.coded]

    @device
    def write(value, b, token, targets):
        if b < c.blocks:
            code, dx = i32(0), f32(0)
            if coded:
                code, dx = code_block(value, targets[coded[0]][1])
            for i, view in unroll(mine):
                units = view.units(c.width)
                if b < units * view.blocks:
                    if not view.coded:
                        note(value, targets[i][1])
                    row = targets[i][0] + u64(token) * (units * view.nbytes)
                    view.put(row, units, b, value, code, dx)

    return write


@functools.cache
def chain_kernel(c: Chain) -> Kernel:
    """The kernel of a chain; grid: blocks of c.wide numbers, block_y the token."""
    factors, source = _source(c)
    plain, turned = _writer(c, False), _writer(c, True)
    # what is rotated, then the norm's factors
    kept = 4 * c.wide if c.rotate else 0
    more = 16 * ((c.wide // c.norm.n + 5) // 4) if c.norm else 0
    scale = scale_of(c.rotate) if c.rotate else 1.0
    steps = [1 << k for k in range(5, c.rotate.bit_length() - 1)]

    @kernel(name=c.name, threads=THREADS)
    def chain(x: u64, x_width: u32, y: u64, y_width: u32, weight: u64, signs: u64,
              targets: TARGETS):  # fmt: skip
        """x, y [T, width] f32 -> the views."""
        token, first = block_y(), block() * c.wide
        px = x + u64(token) * 4 * u64(x_width)
        py = y + u64(token) * 4 * u64(y_width)
        base = shared(kept + more) if kept + more else u32(0)
        if c.norm:
            factors(px, first, base + kept)
        for i in range(thread(), c.wide, THREADS):
            value, at_i = f32(0.0), first + i
            if at_i < c.width:
                value = source(px, py, weight, at_i, first, base + kept)
            plain(value, at_i // 32, token, targets)
            if c.rotate:
                if c.signs:
                    value = signed(value, signs, at_i, c.width)
                shared_store_f32(base + i * 4, in_warp(value, c.rotate))
        if c.rotate:
            for h in unroll(steps):
                syncthreads()
                for p in range(thread(), c.wide // 2, THREADS):
                    add_and_subtract(base, p, h)
            syncthreads()
            for i in range(thread(), c.wide, THREADS):
                turned(shared_load_f32(base + i * 4) * scale, (first + i) // 32, token, targets)

    return chain


def launch(c: Chain, operands: tuple[int, ...], views: list[int], T: int) -> Call:
    """The launch of a chain over T rows.

    Args:
        operands: addresses and widths of x and y, addresses of the norm's weight and the signs; 0
            for what the chain does not have.
        views: address and flag of each view.
    """
    unused = [0] * (2 * MOST - len(views))
    grid = (-(-c.blocks * 32 // c.wide), T)
    return Call(chain_kernel(c), grid, (*operands, *views, *unused))


def kernels() -> list[Kernel]:
    """Chains with every part and every view, one of each kind."""
    norm, views = Norm(5120, 1, 5120, 1e-6), ("nibble", "three", "byte", "q8_0", "f32")
    heads, order, gate = Norm(128, 48, 128, 1e-6), Regroup(128, 48, 16), Gate(256, 24, 512, 256)
    chains = [
        Chain(5120, norm, "", None, None, 1024, False, ((True, "pn3t"), (False, "byte"))),
        Chain(6144, heads, "swiglu of y", None, order, 1024, True, ((True, "nibble"),)),
        Chain(6144, None, "sigmoid_gate", gate, None, 64, False, ((True, "nibble"),)),
        *(Chain(576, None, "swiglu", None, None, 0, False, ((False, view),)) for view in views),
    ]
    return [chain_kernel(c) for c in chains]
