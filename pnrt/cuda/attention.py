"""Attention over the cache, in the contract's order (NUMERICS.md 3), as four launches.

A row is a pair of token and head, and block_y. Scores: a thread is a position. Weights: one block
makes exp(score - max) of a row and their lane-32 sum. Mix: a block sums 256 positions, a thread is
an element. Join: those parts ascending, then one division.
"""

from __future__ import annotations

from pnrt.cuda.control import index, start, tokens
from pnrt.cuda.elementary import exp
from pnrt.cuda.kernel import Call, Kernel, device, kernel, registers, unroll
from pnrt.cuda.lanes import (
    at,
    block,
    block_y,
    blocks,
    butterfly,
    f32,
    fetch_f32,
    fetch_half,
    fma,
    lane,
    load_f32,
    shared,
    shared_load_f32,
    shared_store_f32,
    shuffle_xor,
    store_f32,
    syncthreads,
    thread,
    threads,
    u32,
    u64,
    warp,
)

# positions whose weighted values are summed before they join the total
POSITIONS = 256
# loads of a thread that are under way together
AHEAD = 8
# blocks in x of a launch: those behind the last position have nothing to do
MOST_BLOCKS = 64


def _scores_kernel(half: bool) -> Kernel:
    load, size = (fetch_half, 2) if half else (fetch_f32, 4)

    @kernel(name=f"attention_scores_{'f16' if half else 'f32'}", registers=96)
    def scores_kernel(q: u64, q_width: u32, keys: u64, heads: u32, groups: u32, dim: u32,
                      capacity: u32, scale: f32, control: u64, scores: u64):  # fmt: skip
        """scores [rows, capacity] = (q . k) * scale: an fma chain over the head's elements."""
        row = block_y()
        k = registers()
        t, h = row // heads, row % heads
        if t < tokens(control):
            source = at(q, t * q_width + h * dim, 4)
            whole = dim // AHEAD * AHEAD
            for p in range(index(), start(control) + t + 1, blocks() * threads()):
                line = h // (heads // groups) * capacity + p // 16 * 16
                key, s = at(keys, line * dim + p % 16, size), f32(0.0)
                for d in range(u32(0), whole, AHEAD):
                    # one address for all of them: what is added is part of the instruction
                    some, part = at(key, d * 16, size), at(source, d, 4)
                    for j in unroll(AHEAD):
                        k[j] = load(some + j * 16 * size)
                    for j in unroll(AHEAD):
                        s = fma(fetch_f32(part + 4 * j), k[j], s)
                for d in range(whole, dim):
                    s = fma(fetch_f32(at(source, d, 4)), load(at(key, d * 16, size)), s)
                store_f32(at(scores, row * capacity + p, 4), s * scale)

    return scores_kernel


@device
def block_maximum(v):
    """The largest v of the block's threads, in every thread."""
    for s in unroll((16, 8, 4, 2, 1)):
        v = max(v, shuffle_xor(v, s))
    base = shared(128)
    if lane() == 0:
        shared_store_f32(base + warp() * 4, v)
    syncthreads()
    top = shared_load_f32(base)
    for i in range(u32(1), threads() // 32):
        top = max(top, shared_load_f32(base + i * 4))
    return top


@device
def lane_sum(x, n):
    """Lane-32 sum of n f32 at x, in every lane; the warp works together."""
    total = f32(0.0)
    v = registers()
    whole = n // (32 * AHEAD) * (32 * AHEAD)
    for i in range(lane(), whole, 32 * AHEAD):
        for j in unroll(AHEAD):
            v[j] = load_f32(at(x, i + 32 * j, 4))
        for j in unroll(AHEAD):
            total = total + v[j]
    for i in range(whole + lane(), n, 32):
        total = total + load_f32(at(x, i, 4))
    return butterfly(total)


@kernel(name="attention_weights", threads=256)
def weights_kernel(heads: u32, capacity: u32, control: u64, scores: u64, sums: u64):
    """scores [rows, capacity] become exp(score - max); sums [rows] their lane-32 sums."""
    row = block_y()
    t = row // heads
    if t < tokens(control):
        line, positions = at(scores, row * capacity, 4), start(control) + t + 1
        top = load_f32(line)
        for p in range(thread(), positions, threads()):
            top = max(top, load_f32(at(line, p, 4)))
        top = block_maximum(top)
        for p in range(thread(), positions, threads()):
            store_f32(at(line, p, 4), exp(load_f32(at(line, p, 4)) - top))
        syncthreads()
        if warp() == 0:
            total = lane_sum(line, positions)
            if lane() == 0:
                store_f32(at(sums, row, 4), total)


def _mix_kernel(half: bool) -> Kernel:
    load, size = (fetch_half, 2) if half else (fetch_f32, 4)

    @kernel(name=f"attention_mix_{'f16' if half else 'f32'}", registers=96)
    def mix_kernel(values: u64, heads: u32, groups: u32, dim: u32, capacity: u32, control: u64,
                   scores: u64, parts: u64):  # fmt: skip
        """parts [rows, blocks of 256 positions, dim]: weighted sums of values."""
        row = block_y()
        v = registers()
        t, h = row // heads, row % heads
        if t < tokens(control):
            positions = start(control) + t + 1
            line = at(scores, row * capacity, 4)
            most = (capacity + POSITIONS - 1) // POSITIONS
            for b in range(block(), (positions + POSITIONS - 1) // POSITIONS, blocks()):
                first = b * POSITIONS
                count = min(positions - first, POSITIONS)
                whole = count // AHEAD * AHEAD
                group = h // (heads // groups) * capacity + first
                for d in range(thread(), dim, threads()):
                    value, weight = at(values, group * dim + d, size), at(line, first, 4)
                    part = f32(0.0)
                    for _ in range(u32(0), whole, AHEAD):
                        for j in unroll(AHEAD):
                            v[j] = load(value)
                            value = value + dim * size
                        for j in unroll(AHEAD):
                            part = fma(fetch_f32(weight + 4 * j), v[j], part)
                        weight = weight + 4 * AHEAD
                    for _ in range(whole, count):
                        part = fma(fetch_f32(weight), load(value), part)
                        value, weight = value + dim * size, weight + 4
                    store_f32(at(parts, (row * most + b) * dim + d, 4), part)

    return mix_kernel


@kernel(name="attention_join")
def join_kernel(out: u64, out_width: u32, heads: u32, dim: u32, capacity: u32, control: u64,
                sums: u64, parts: u64):  # fmt: skip
    """out = the parts added ascending, divided by the sum of the weights; grid: dim threads."""
    row, d = block_y(), index()
    t, h = row // heads, row % heads
    if t < tokens(control) and d < dim:
        most = (capacity + POSITIONS - 1) // POSITIONS
        line = at(parts, row * most * dim + d, 4)
        total = load_f32(line)
        for b in range(u32(1), (start(control) + t + POSITIONS) // POSITIONS):
            total = total + load_f32(at(line, b * dim, 4))
        store_f32(at(out, t * out_width + h * dim + d, 4), total / load_f32(at(sums, row, 4)))


# in the order they are launched
attention_kernels = {
    kv: (_scores_kernel(kv == "f16"), weights_kernel, _mix_kernel(kv == "f16"), join_kernel)
    for kv in ("f16", "f32")
}


def scratch_bytes(heads: int, dim: int, capacity: int) -> int:
    """Bytes of scratch a token's rows need."""
    return heads * 4 * (capacity + 1 + -(-capacity // POSITIONS) * dim)


def attend(
    kv: str, rows: int, q: int, q_width: int, keys: int, values: int, out: int, out_width: int,
    heads: int, groups: int, dim: int, capacity: int, scale: float, control: int, scratch: int,
) -> list[Call]:  # fmt: skip
    """The launches for at most `rows` tokens.

    Args:
        kv: 'f16' or 'f32'; then as pnrt.cpu.attention, addresses and sizes.
        scratch: rows * scratch_bytes(..) long.
    """
    score, weigh, mix, join = attention_kernels[kv]
    y = rows * heads
    sums = scratch + y * capacity * 4
    parts = sums + y * 4
    wide = min(-(-capacity // score.threads), MOST_BLOCKS)
    deep = min(-(-capacity // POSITIONS), MOST_BLOCKS)
    return [
        Call(score, (wide, y), (q, q_width, keys, heads, groups, dim, capacity, scale, control,
                                scratch)),
        Call(weigh, (1, y), (heads, capacity, control, scratch, sums)),
        Call(mix, (deep, y), (values, heads, groups, dim, capacity, control, scratch, parts)),
        Call(join, (-(-dim // join.threads), y), (out, out_width, heads, dim, capacity, control,
                                                  sums, parts)),
    ]  # fmt: skip


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [*attention_kernels["f16"], attention_kernels["f32"][0], attention_kernels["f32"][2]]
