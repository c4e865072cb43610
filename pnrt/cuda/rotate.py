"""The Sylvester-Hadamard transform of blocks of a vector, and the order of heads."""

from __future__ import annotations

import numpy as np

from pnrt.cuda.control import index, tokens
from pnrt.cuda.kernel import Kernel, device, kernel, unroll
from pnrt.cuda.lanes import (
    at,
    block,
    block_y,
    f32,
    fetch_f32,
    lane,
    load_f32,
    load_u32,
    shared,
    shared_load_f32,
    shared_store_f32,
    shuffle_xor,
    store_f32,
    store_u32,
    syncthreads,
    thread,
    threads,
    u32,
    u64,
)

# numbers transformed together that fit the kernel's shared memory
LARGEST = 8192


@device
def in_warp(v, size):
    """Steps h = 1 .. 16 of runs of 32 numbers or more, fewer for smaller ones."""
    for h in unroll((1, 2, 4, 8, 16)):
        other = shuffle_xor(v, h)
        new = other - v if (lane() & h) != 0 else v + other
        v = new if size > h else v
    return v


@device
def add_and_subtract(base, p, h):
    """Pair p of the step h, in shared memory."""
    i = base + (p // h * (2 * h) + p % h) * 4
    a, b = shared_load_f32(i), shared_load_f32(i + h * 4)
    shared_store_f32(i, a + b)
    shared_store_f32(i + h * 4, a - b)


def scale_of(size: int) -> float:
    """What the sums of a transform are multiplied by."""
    return 1 / float(np.sqrt(float(size)))


@kernel(name="hadamard")
def hadamard_kernel(x: u64, x_width: u32, signs: u64, out: u64, out_width: u32, n: u32, size: u32,
                    inverse: u32, scale: f32, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.rotate.hadamard_kernel; a y block per token.

    A block of threads takes max(size, 32) numbers of a row; signs is 0 where there are none. Steps
    inside 32 numbers are shuffles, the others go through shared memory.
    """
    t, wide = block_y(), max(size, 32)
    base = shared(4 * LARGEST)
    if t < tokens(control):
        first = block() * wide
        for i in range(thread(), wide, threads()):
            v = f32(0.0)
            if first + i < n:
                v = load_f32(at(x, t * x_width + first + i, 4))
                if signs != 0 and inverse == 0:
                    v = v * fetch_f32(at(signs, first + i, 4))
            shared_store_f32(base + i * 4, in_warp(v, size))
        h = u32(32)
        while h < wide:
            syncthreads()
            for p in range(thread(), wide // 2, threads()):
                add_and_subtract(base, p, h)
            h = h * 2
        syncthreads()
        for i in range(thread(), wide, threads()):
            if first + i < n:
                v = shared_load_f32(base + i * 4) * scale
                if signs != 0 and inverse != 0:
                    v = v * fetch_f32(at(signs, first + i, 4))
                store_f32(at(out, t * out_width + first + i, 4), v)


@kernel(name="regroup")
def regroup_kernel(x: u64, x_width: u32, out: u64, out_width: u32, n: u32, heads: u32, groups: u32,
                   control: u64):  # fmt: skip
    """Twin of pnrt.cpu.rotate.regroup_kernel; grid: n * heads threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n * heads:
        h = i // n
        to = h % groups * (heads // groups) + h // groups
        value = load_u32(at(x, t * x_width + i, 4))
        store_u32(at(out, t * out_width + to * n + i % n, 4), value)


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [hadamard_kernel, regroup_kernel]
