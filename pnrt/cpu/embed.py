"""Embedding: decode the rows of the tokens straight from the file's bytes."""

from __future__ import annotations

import numpy as np

from pnrt.cpu.elementwise import share
from pnrt.cpu.pack import CODECS, FLOATS
from pnrt.cpu.simd import (
    bits_float,
    f32_at,
    fma_scalar,
    half_value,
    i32_at,
    i64_at,
    read_i64,
    u16_at,
)
from pnrt.formats import FORMATS
from pnrt.jit import Kernel, inline, kernel


def _decoder(name: str):
    """value(row, k): weight k of the row at an address, in float32."""
    if name == "f32":
        return inline(lambda row, k: f32_at(row)[k])
    if name == "f16":
        return inline(lambda row, k: half_value(u16_at(row)[k]))
    if name == "bf16":
        return inline(
            lambda row, k: bits_float(np.int32(np.uint32(u16_at(row)[k]) << np.uint32(16)))
        )
    codec, group = CODECS[name], FORMATS[name].group
    code, zero, first, second = codec.code, codec.zero, codec.planes[0], codec.planes[-1]
    offset = len(codec.planes) == 2

    @inline
    def value(row, k):
        g = k // group
        centred = np.float32(code(row, k) - np.int32(zero))
        d = half_value(first(row, g))
        if offset:
            return fma_scalar(centred, d, -half_value(second(row, g)))
        return centred * d

    return value


def _embed_kernel(name: str) -> Kernel:
    value = _decoder(name)

    def embed(a, thread, threads):
        rows, row_bytes, K = read_i64(a), read_i64(a + 8), read_i64(a + 16)
        tokens, out, width = read_i64(a + 24), read_i64(a + 32), read_i64(a + 40)
        ids = i64_at(tokens)
        first, last = share(read_i64(read_i64(a + 48)), thread, threads)
        for t in range(first, last):
            row, target = rows + ids[t] * row_bytes, f32_at(out + t * width * 4)
            for k in range(K):
                target[k] = value(row, k)

    return kernel(embed, name=f"embed_{name}")


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


_kernels: dict[str, Kernel] = {}


def embed_kernel(name: str) -> Kernel:
    """The kernel that looks up rows of a format."""
    if name not in _kernels:
        if name not in CODECS and name not in FLOATS:
            raise KeyError(name)
        _kernels[name] = _embed_kernel(name)
    return _kernels[name]
