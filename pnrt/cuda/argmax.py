"""The first largest of many numbers, for greedy sampling: numpy.argmax, NaN counting as largest."""

from __future__ import annotations

from pnrt.cuda.control import index
from pnrt.cuda.kernel import Call, Kernel, device, kernel, unroll
from pnrt.cuda.lanes import (
    at,
    block,
    blocks,
    i32,
    lane,
    load_f32,
    load_i32,
    shared,
    shared_load_f32,
    shared_load_u32,
    shared_store_f32,
    shared_store_u32,
    shuffle_xor,
    store_f32,
    store_i32,
    syncthreads,
    threads,
    u32,
    u64,
    warp,
)

# partial results of the first launch
BLOCKS = 64


@device
def after(v, i, w, j):
    """Whether (w, j) comes before (v, i): larger, or equal and earlier; NaN is largest."""
    earlier = j < i
    return (w != w and (v == v or earlier)) or (v == v and (w > v or (w == v and earlier)))


@kernel(name="argmax", threads=256)
def argmax_kernel(x: u64, places: u64, n: u32, values: u64, indices: u64):
    """Per block the largest of x [n] f32 and its place: i, or places[i] where that is not 0.

    Writes values [blocks] f32, indices [blocks] i32; n is at least the number of threads launched,
    or there is one block.
    """
    first = min(index(), n - 1)
    v, i = load_f32(at(x, first, 4)), i32(first)
    for k in range(index(), n, blocks() * threads()):
        w = load_f32(at(x, k, 4))
        better = after(v, i, w, i32(k))
        v, i = (w if better else v), (i32(k) if better else i)
    if places != 0:
        i = load_i32(at(places, u32(i), 4))
    base = shared(64)
    for s in unroll((16, 8, 4, 2, 1)):
        w, j = shuffle_xor(v, s), shuffle_xor(i, s)
        better = after(v, i, w, j)
        v, i = (w if better else v), (j if better else i)
    if lane() == 0:
        shared_store_f32(base + warp() * 8, v)
        shared_store_u32(base + warp() * 8 + 4, u32(i))
    syncthreads()
    if index() % threads() == 0:
        for k in range(u32(1), threads() // 32):
            w, j = shared_load_f32(base + k * 8), i32(shared_load_u32(base + k * 8 + 4))
            better = after(v, i, w, j)
            v, i = (w if better else v), (j if better else i)
        store_f32(at(values, block(), 4), v)
        store_i32(at(indices, block(), 4), i)


def largest(x: int, n: int, scratch: int) -> list[Call]:
    """The launches that find the largest of x [n] f32.

    Args:
        scratch: (BLOCKS + 1) * 8 bytes; it begins with the largest (f32) and its place (i32).
    """
    count = max(1, min(BLOCKS, n // argmax_kernel.threads))
    values, indices = scratch + 8, scratch + 8 + 4 * BLOCKS
    return [
        Call(argmax_kernel, (count, 1), (x, 0, n, values, indices)),
        Call(argmax_kernel, (1, 1), (values, indices, count, scratch, scratch + 4)),
    ]


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [argmax_kernel]
