"""The quantized product in the contract's order (NUMERICS.md 1), for one token or a tile of them.

A SIMD lane is an output row, so nothing is reduced across lanes of a vector. The 32 contract lanes
are walked in bit-reversed order and combined with a binary counter: that is the butterfly, with at
most five partial sums alive.

One token reads the packed codes once, so each format has its own kernel that multiplies them as
they are unpacked. For tiles of tokens a panel is unpacked first (unpack.py), and one kernel per
kind of record serves every format. Threads draw panels from a counter: one that is held up does
not hold up the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from pnrt.cpu import dots
from pnrt.cpu.activations import SUMS, TILE, Activations
from pnrt.cpu.codec import FLOATS, ROWS
from pnrt.cpu.matvec import one_kernel
from pnrt.cpu.pack import Weight, aligned
from pnrt.cpu.tiles import tiles
from pnrt.cpu.unpack import Record, panel_bytes, record_of, unpack_kernel
from pnrt.cpu.walk import LANES, draw, make_finish, order_of, walk
from pnrt.formats import FORMATS
from pnrt.jit import Call, Kernel, inline, kernel, words
from pnrt.native import call
from pnrt.simd import (
    add,
    add_i,
    fma,
    load_bf16,
    load_f32,
    load_half,
    load_i32,
    prefetch,
    read_i64,
    shift_left,
)

# bytes per thread: partial sums, six tiles of vectors; and the products of tile registers
PARTIAL = 6 * TILE * 64
PRODUCTS = 12 * 1024
# units at most whose products are asked for before they are read
EARLY = 2
# unpacked panels of one thread: they and a tile of activations stay in the second-level cache,
# and the more they are the fewer times the activations come from behind it
UNPACKED = 1 << 20
_left7, _left14 = shift_left(7), shift_left(14)


def _tile_dot(tile, tier: str, memory: bool):
    """dot(w, x, s, product, which): int32 sums of a tile: of 16 codes (0, 1) or all 32 (2).

    product: where the tile registers' products lie, see _ahead.
    """
    splat, izeros = tile.splat_i32, tile.izeros
    if tier == "amx":
        load = dots.load_products(tile.count)
        if memory:
            return inline(lambda w, x, s, product, which: product)
        return inline(lambda w, x, s, product, which: load(product))
    byte_dot = {"vnni": dots.dot4, "avx2": dots.dot4_signed, "plain": dots.dot4_signed}[tier]
    biased = tier == "vnni"

    @inline
    def dot(w, x, s, product, which):
        acc = splat(s + 4 * which, 4 * SUMS) if biased else izeros()
        for g in range(4 if which == 1 else 0, 4 if which == 0 else 8):
            acc = byte_dot(acc, load_i32(w + 64 * g), splat(x + 4 * g, 32))
        return acc

    return dot


class Ahead(NamedTuple):
    """How tile registers multiply: some units before the products are read.

    A vector read of what a tile register just wrote would wait for the store buffer to drain.
    ask(w, u, then, x, out, before): ask for the products of unit u, which come to `out` by the next
    call, whose `before` that is; fetch the activations of unit `then` into the cache.
    units: how many units early, a power of two; nbytes: of a unit's products.
    """

    ask: Callable
    units: int
    nbytes: int


def _ahead(record: Record, count: int) -> Ahead:
    blocks, size = record.blocks, count * 32
    pieces = []
    for block in range(blocks):
        x, w = block * size, block * record.nbytes
        if record.split == 16 or (record.split == 80 and block == 2):
            pieces += [(x, w, 16), (x + 16, w + 256, 16)]
        else:
            pieces += [(x, w + 512 * plane, 32) for plane in range(record.planes)]
    products = dots.amx_products(pieces)

    @inline
    def ask(w, u, then, x, out, before):
        for line in range(0, blocks * size, 64):
            prefetch(x + then * (blocks * size) + line)
        products(x + u * (blocks * size), w, out, before)

    return Ahead(ask, 1 if blocks == 5 else EARLY, len(pieces) * 1024)


def _tile_unit(record: Record, tile, tier: str):
    """unit(acc, w, u, x, d, s, f, products): one unit of a tile of tokens from its records."""
    T, planes, nbytes = tile.count, record.planes, record.nbytes
    wide, split, blocks = planes > 1, record.split, record.blocks
    memory = tier == "amx" and not wide
    dot = _tile_dot(tile, tier, memory)
    one, two = (tile.accumulate(n, record.offset, memory) for n in (1, 2))

    @inline
    def total(w, x, s, product, which):
        if wide:
            low = dot(w, x, s, product, which)
            middle = dot(w + 512, x, s, product + 1024, which)
            high = dot(w + 1024, x, s, product + 2048, which)
            return add_i(low, add_i(_left7(middle), _left14(high)))
        return dot(w, x, s, product, which)

    @inline
    def unit(acc, w, u, x, d, s, f, products):
        for block in range(blocks):
            b, scales = (u * blocks + block) * T, w + 512 * planes
            xb, db, sb, fb = x + b * 32, d + b * 4, s + b * 12, f + b * 12
            if split == 16 or (split == 80 and block == 2):
                low = dot(w, xb, sb, products, 0)
                high = dot(w, xb, sb, products + 1024, 1)
                acc = two(acc, low, high, scales, db, fb)
                products += 2048
            else:
                both = total(w, xb, sb, products, 2)
                acc = one(acc, both, both, scales, db, fb)
                products += 1024
            w += nbytes
        return acc

    return unit


def _float_unit(name: str, tile):
    """unit(acc, w, u, x, d, s, f, products): fma over k ascending, float weights as packed."""
    T, splat, size = tile.count, tile.splat_f32, FLOATS[name]
    load = {"f16": load_half, "bf16": load_bf16}.get(name, load_f32)

    @inline
    def unit(acc, w, u, x, d, s, f, products):
        x += 32 * u * T * 4
        for k in range(32):
            acc = fma(load(w + k * ROWS * size), splat(x + k * T * 4, 4), acc)
        return acc

    return unit


def _long_unit(unit, nbytes: int, blocks: int):
    """A unit of several blocks made of one-block units."""

    @inline
    def long(acc, w, u, x, d, s, f, products):
        for block in range(blocks):
            acc = unit(acc, w + block * nbytes, u * blocks + block, x, d, s, f, products)
        return acc

    return long


def _tile_kernel(
    kind: str, unit: Callable, nbytes: int, count: int, x_block: int, ahead: Ahead | None = None
) -> Kernel:
    """The product of tiles of tokens: unpack some panels, then pass all tokens over them.

    nbytes: of a unit as unpacked; x_block: activation bytes per block and token; ahead: where
    there are tile registers.
    """
    tile = tiles(count)
    zeros, load, store = tile.zeros, tile.load, tile.store
    finish = make_finish(count, load, store)
    if ahead:
        tiles_on, tiles_off, (ask, early, slot) = dots.tiles_on, dots.tiles_off, ahead
    else:
        tiles_on, tiles_off = inline(lambda config: None), inline(lambda: None)
        ask, early, slot = inline(lambda w, u, then, x, out, before: None), 0, 0
    ring = max(0, 2 * early - 1)

    def matmul(a, thread, threads):
        data, stride, panels = read_i64(a), read_i64(a + 8), read_i64(a + 16)
        units, steps, lanes = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40)
        codes, scales, sums, totals = (
            read_i64(a + 80), read_i64(a + 88), read_i64(a + 96), read_i64(a + 104),
        )  # fmt: skip
        x_blocks, y, width = read_i64(a + 112), read_i64(a + 120), read_i64(a + 128)
        tokens, ticket, each = read_i64(read_i64(a + 136)), read_i64(a + 144), read_i64(a + 152)
        unpacked = read_i64(a + 160)
        bottom = read_i64(a + 168) + thread * read_i64(a + 176)
        unpack, unpack_arguments = read_i64(a + 184), read_i64(a + 192)
        products, panel_size = bottom + PARTIAL, units * nbytes
        first = products + PRODUCTS
        items = (panels + each - 1) // each
        x_tile = x_blocks * count
        tiles_on(read_i64(a + 200))
        order = read_i64(a + 208)
        item = draw(ticket, items, threads)
        while item < items:
            stop = min(panels, (item + 1) * each)
            if unpacked:
                for panel in range(item * each, stop):
                    call(unpack, unpack_arguments, panel, first + panel % each * panel_size)
            for t in range((tokens + count - 1) // count):
                x, d = codes + t * x_tile * x_block, scales + t * x_tile * 4
                s, f = sums + t * x_tile * 12, totals + t * x_tile * 12
                for n in range(early):
                    u1, u2 = read_i64(order + 8 * n), read_i64(order + 8 * (n + early))
                    before = products + (n - 1 & ring) * slot
                    ask(first + n * nbytes, u1, u2, x, products + n * slot, before)
                n = early
                for panel in range(item * each, stop):
                    w = first + panel % each * panel_size if unpacked else data + panel * stride
                    stack, next = bottom, order + 8 * early
                    for i in range(lanes):
                        acc = zeros()
                        for u in range(read_i64(steps + 16 * i), units, LANES):
                            u1, u2 = read_i64(next), read_i64(next + 8 * early)
                            before = products + (n - 1 & ring) * slot
                            ask(w + early * nbytes, u1, u2, x, products + (n & ring) * slot, before)
                            acc = unit(acc, w, u, x, d, s, f, products + (n - early & ring) * slot)
                            n, w, next = n + 1, w + nbytes, next + 8
                        stack = finish(acc, read_i64(steps + 16 * i + 8), stack)
                    total = load(bottom, 64)
                    if units < LANES:
                        # the lanes left out are +0.0
                        total = add(total, zeros())
                    store(y + t * count * width * 4 + panel * 64, width * 4, total)
            item = draw(ticket, items, threads)
        tiles_off()

    return kernel(matmul, name=f"matmul_{kind}_{count}")


_kernels: dict[tuple, Kernel] = {}


def matmul_kernel(name: str, activations: str, count: int) -> Kernel:
    """The kernel of a product: count is 1 or TILE tokens at a time."""
    quantized = activations == "q8_0" and name not in FLOATS
    if quantized and count == 1:
        key = (name,)
    elif quantized:
        key = (record_of(name), count)
    else:
        kind = name if name in ("f16", "bf16") else "f32"
        blocks = FORMATS[name].unit // 32
        key = (kind, count, blocks)
    if key not in _kernels:
        _kernels[key] = _make_kernel(*key)
    return _kernels[key]


def _make_kernel(which: str | Record, count: int = 1, blocks: int = 0) -> Kernel:
    tile, tier = tiles(count), dots.dot_tier()
    if isinstance(which, Record):
        unit = _tile_unit(which, tile, tier)
        nbytes = which.blocks * which.nbytes
        ahead = _ahead(which, count) if tier == "amx" else None
        return _tile_kernel(f"{which.name}_{tier}", unit, nbytes, count, 32, ahead)
    if not blocks:
        return one_kernel(which)
    nbytes = 32 * ROWS * FLOATS[which]
    unit = _float_unit(which, tile)
    if blocks > 1:
        unit = _long_unit(unit, nbytes, blocks)
    return _tile_kernel(f"{which}x{blocks}", unit, nbytes * blocks, count, 128)


def scratch(threads: int, weights: Iterable[Weight], activations: str) -> np.ndarray:
    """Memory to multiply by any of these matrices: uint8 [threads, bytes]."""
    most = late = 0
    for weight in weights:
        if weight.format not in FLOATS:
            size = panel_bytes(weight.format, weight.units, activations)
            most = max(most, size * max(1, UNPACKED // size))
            late = max(late, panel_bytes(weight.format, EARLY, activations))
    size = PARTIAL + PRODUCTS + most + late
    return aligned(threads * size).reshape(threads, size)


def matmul(
    weight: Weight, x: Activations, out: np.ndarray, control: np.ndarray, scratch: np.ndarray
) -> Call:
    """The call that multiplies: out [T rounded up to whole tiles, width] float32, width >= N.

    Args:
        scratch: what scratch() gives.
    Exact: the bits of reference.matmul, for any instruction set, thread count and tile.
    """
    mode = "f32" if weight.format in FLOATS else x.mode
    threads = len(scratch)
    planes = weight.four_planes
    steps, ticket = walk(weight.units), np.zeros(8, np.int64)
    config = np.frombuffer(dots.tile_config(), np.uint8)
    # the units in the contract's order, and what is asked for early behind the last of a panel
    order = np.resize(order_of(weight.units), weight.units + 2 * EARLY)
    unpacked = weight.format not in FLOATS and (x.count > 1 or mode == "f32")
    each, calls, unpack_words = max(1, weight.panels // (16 * threads)), (), np.zeros(1, np.int64)
    if unpacked:
        size = panel_bytes(weight.format, weight.units, mode)
        each = max(1, min(UNPACKED // size, weight.panels // (4 * threads)))
        unpack_words = words(weight.data, weight.stride, weight.units, steps, len(steps), *planes)
        calls = ((23, unpack_kernel(weight.format, mode)),)
    arguments = words(
        weight.data, weight.stride, weight.panels, weight.units, steps, len(steps), *planes,
        x.codes, x.scales, x.sums, x.totals, x.blocks, out, out.shape[1], control, ticket, each,
        unpacked, scratch, scratch.shape[1], 0, unpack_words, config, order,
    )  # fmt: skip
    which = matmul_kernel(weight.format, mode, x.count)
    keep = (weight, x, out, control, scratch, steps, ticket, config, unpack_words, order)
    return Call(which, arguments, keep, calls=calls)
