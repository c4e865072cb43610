"""Several matrices in one launch of a one-token product: blocks are shared out, a block has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pnrt.cuda.kernel import device, unroll
from pnrt.cuda.lanes import at, block, f32, lane, load_f32, store_f32, u32, u64
from pnrt.cuda.pack import Weight
from pnrt.cuda.reduce import reduce

# matrices of a launch at most
MOST = 4
# what a kernel gets of each: three planes, the output, what is added to it (u64 addresses), rows,
# the block behind its last
PARTS = ((u64, u64, u64, u64, u64, u32, u32),) * MOST
OUT, ADD, ROWS, END = 3, 4, 5, 6


class Part(NamedTuple):
    """A matrix of a launch.

    address: where its planes lie; out: [N] f32; add: [N] f32 added to the products, 0 for nothing
    (out itself may be added).
    """

    weight: Weight
    address: int
    out: int
    add: int = 0


def arguments(parts: Sequence[Part], rows: int, most: int | None = None) -> tuple[int, tuple]:
    """Blocks in x and the numbers of PARTS for a kernel whose block takes `rows` rows at a time.

    most: blocks the device holds at once, for kernels whose blocks stay for many rows.
    """
    ends, at, flat = [], 0, []
    for share in shares([-(-part.weight.N // rows) for part in parts], most):
        at += share
        ends.append(at)
    # what is not used begins behind the last block
    unused = [None] * (MOST - len(parts))
    for part, end in zip([*parts, *unused], [*ends, *([at] * len(unused))], strict=True):
        if part is None:
            flat += [0, 0, 0, 0, 0, 0, end]
        else:
            planes = (*(part.address + offset for offset in part.weight.offsets), 0, 0)[:3]
            flat += [*planes, part.out, part.add, part.weight.N, end]
    return at, tuple(flat)


def shares(needed: list[int], most: int | None) -> list[int]:
    """Blocks of each part: as many as it needs or, if that is too many, in proportion."""
    total = sum(needed)
    if most is None or total <= most:
        return needed
    found = [max(1, n * most // total) for n in needed]
    while sum(found) > most:
        found[found.index(max(found))] -= 1
    while sum(found) < most:
        longest = max(range(len(found)), key=lambda i: needed[i] / found[i])
        found[longest] += 1
    return found


@device
def choose(parts, mine):
    """Fill registers `mine` with this block's numbers of PARTS; its first block stands behind."""
    for f in unroll(7):
        mine[f] = parts[0][f]
    mine[7] = u32(0)
    for i in unroll(range(1, MOST)):
        here = block() >= parts[i - 1][END]
        for f in unroll(7):
            mine[f] = parts[i][f] if here else mine[f]
        mine[7] = parts[i - 1][END] if here else mine[7]


@device
def place(mine):
    """The block's number among those of its matrix."""
    return block() - mine[7]


@device
def count(mine):
    """Blocks of the matrix."""
    return mine[END] - mine[7]


@device
def addend(mine, row):
    """What is added to this lane's row; read early, long before it is needed."""
    value = f32(0.0)
    if row < mine[ROWS]:
        value = load_f32(at(mine[ADD], row, 4))
    return value


@device
def row_of(first, rows):
    """The row whose sum store_rows leaves in this lane: `first` and on, rows a power of two."""
    return first + lane() // (32 // rows)


@device
def store_rows(v, rows, mine, row, adds, plus):
    """Sum v[0 .. rows - 1] over the warp and store them as `row` and on; adds: with plus added."""
    total = reduce(v, rows)
    if lane() % (32 // rows) == 0 and row < mine[ROWS]:
        store_f32(mine[OUT] + u64(row) * 4, total + plus if adds else total)
