"""Embedding: decode the rows of the tokens straight from the file's bytes."""

from __future__ import annotations

import functools

import numpy as np

from pnrt.cpu.codec import FLOATS, ROWS
from pnrt.cpu.elementwise import share
from pnrt.cpu.pack import aligned, layout, pack_kernel
from pnrt.cpu.unpack import unpack_kernel
from pnrt.cpu.walk import LANES, places_of, walk
from pnrt.formats import FORMATS
from pnrt.jit import Call, Kernel, inline, kernel, words
from pnrt.native import call
from pnrt.simd import (
    bits_float,
    f32_at,
    half_value,
    i32_at,
    i64_at,
    read_i64,
    u16_at,
)


@functools.cache
def _float_kernel(name: str) -> Kernel:
    value = {
        "f32": inline(lambda row, k: f32_at(row)[k]),
        "f16": inline(lambda row, k: half_value(u16_at(row)[k])),
        "bf16": inline(
            lambda row, k: bits_float(np.int32(np.uint32(u16_at(row)[k]) << np.uint32(16)))
        ),
        "cyb_u32": inline(lambda row, k: np.float32(i32_at(row)[k]) / np.float32(65536.0)),
        "cyb_u16": inline(lambda row, k: np.float32(np.int16(u16_at(row)[k])) / np.float32(256.0)),
    }[name]

    def embed(a, thread, threads):
        rows, row_bytes, K = read_i64(a), read_i64(a + 8), read_i64(a + 16)
        ids, out, width = i64_at(read_i64(a + 24)), read_i64(a + 32), read_i64(a + 40)
        first, last = share(read_i64(read_i64(a + 48)), thread, threads)
        for t in range(first, last):
            row, target = rows + ids[t] * row_bytes, f32_at(out + t * width * 4)
            for k in range(K):
                target[k] = value(row, k)

    return kernel(embed, name=f"embed_{name}")


@kernel(name="embed")
def _block_kernel(a, thread, threads):
    """Pack each token's row as a panel of its own and unpack it: the product's weights."""
    rows, row_bytes, K = read_i64(a), read_i64(a + 8), read_i64(a + 16)
    ids, out, width = i64_at(read_i64(a + 24)), read_i64(a + 32), read_i64(a + 40)
    first, last = share(read_i64(read_i64(a + 48)), thread, threads)
    units, unit, steps, lanes = (
        read_i64(a + 56), read_i64(a + 64), read_i64(a + 72), read_i64(a + 80),
    )  # fmt: skip
    pack, unpack = read_i64(a + 88), read_i64(a + 96)
    size = read_i64(a + 128)
    pack_arguments = read_i64(a + 104) + thread * size
    unpack_arguments = read_i64(a + 112) + thread * size
    weights = read_i64(a + 120) + thread * size
    for t in range(first, last):
        i64_at(pack_arguments)[0] = rows + ids[t] * row_bytes
        call(pack, pack_arguments, 0, 1)
        call(unpack, unpack_arguments, 0, weights)
        source, target, at = f32_at(weights), f32_at(out + t * width * 4), 0
        for i in range(lanes):
            for u in range(read_i64(steps + 16 * i), units, LANES):
                for k in range(min(unit, K - u * unit)):
                    target[u * unit + k] = source[(at + k) * ROWS]
                at += unit


def lookup(
    name: str, rows: np.ndarray, tokens: np.ndarray, out: np.ndarray, control, threads: int
) -> Call:
    """The call that writes the decoded rows of tokens.

    Args:
        rows: [V, row_bytes] uint8, the file's bytes.
        tokens: int64; control[0] tells how many of them count.
        out: [T, width] float32.
    """
    K = FORMATS[name].columns(rows.shape[1])
    arguments = [rows, rows.shape[1], K, tokens, out, out.shape[1], control]
    if name in FLOATS:
        return Call(_float_kernel(name), words(*arguments), tuple(arguments), False)
    one, unit = layout(name, 1, K), FORMATS[name].unit
    steps, places = walk(one.units), places_of(one.units)
    planes = one.four_planes
    # of each thread: both argument blocks, the panel, its weights
    panel, weights = 256, 256 + one.stride
    size = -(-(weights + one.units * unit * ROWS * 4) // 64) * 64
    scratch = aligned(threads * size)
    for own in scratch.reshape(threads, size):
        packed = own[panel:]
        pack_words = words(
            rows, rows.shape[1], 1, K, packed, one.stride, one.units, *planes, 1, places
        )
        unpack_words = words(packed, one.stride, one.units, steps, len(steps), *planes)
        own[: pack_words.nbytes] = pack_words.view(np.uint8)
        own[128 : 128 + unpack_words.nbytes] = unpack_words.view(np.uint8)
    arguments += [
        one.units, unit, steps, len(steps), 0, 0, scratch, scratch[128:], scratch[weights:], size,
        places,
    ]  # fmt: skip
    calls = ((11, pack_kernel(name)), (12, unpack_kernel(name, "f32")))
    return Call(_block_kernel, words(*arguments), tuple(arguments), False, calls)


@kernel(name="take")
def take_kernel(a, thread, threads):
    """out[t] = x[first + t]. Arguments: x, x width, out, out width, n, control.

    control: rows wanted, then the first of them.
    """
    x, wx, out, wo, n = (
        read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24), read_i64(a + 32),
    )  # fmt: skip
    control = read_i64(a + 40)
    start = read_i64(control + 8)
    first, last = share(read_i64(control), thread, threads)
    for t in range(first, last):
        source, target = i32_at(x + (start + t) * wx * 4), i32_at(out + t * wo * 4)
        for i in range(n):
            target[i] = source[i]
