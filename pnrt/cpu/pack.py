"""Pack weights for the CPU: lanes are rows, units lie in the order the contract walks them.

A panel is 16 rows. It holds the codes of all units in bit-reversed lane order (codec.py tells how
32 of them lie), then the scales, one plane per kind, indexed [group, row].
f32, f16 and bf16 rows are transposed: element k of 16 rows side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pnrt.cpu.codec import CODECS, FLOATS, ROWS
from pnrt.cpu.layout import WORDS, WRITERS
from pnrt.cpu.walk import places_of
from pnrt.formats import FORMATS
from pnrt.jit import Kernel, inline, kernel, run
from pnrt.simd import i64_at, read_i64, u8_at, u16_at, u32_at

# bytes of a file that are packed at a time, and mapped at most
SLICE = 1 << 25


class Weight(NamedTuple):
    """A packed matrix.

    data: uint8, `panels` panels of `stride` bytes; planes: byte offset of each scale plane inside
    a panel; units: units (of 160 or 32 weights) in a row.
    """

    format: str
    N: int
    K: int
    data: np.ndarray
    panels: int
    stride: int
    units: int
    planes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def four_planes(self) -> tuple[int, ...]:
        """The planes as kernels take them: four offsets, 0 for those the format lacks."""
        return (*self.planes, 0, 0, 0, 0)[:4]


def _plane(plane) -> Callable:
    read, wide = plane.read, plane.size == 2

    @inline
    def fill(rows, row_bytes, N, groups, out):
        halves, bytes_ = u16_at(out), u8_at(out)
        for r in range(N):
            row = rows + r * row_bytes
            for g in range(groups):
                if wide:
                    halves[g * ROWS + r] = np.uint16(read(row, g))
                else:
                    bytes_[g * ROWS + r] = np.uint8(read(row, g))

    return fill


def _pack_kernel(name: str) -> Kernel:
    codec, form = CODECS[name], FORMATS[name]
    codes, write, words = codec.codes, WRITERS[codec.layout], WORDS[codec.layout]
    zero, unit, tail = np.uint8(codec.zero), form.unit, 64 * min(4, words)
    nbytes = unit // 32 * words * 64
    planes = [(_plane(plane), plane.per) for plane in codec.scales.planes]
    nothing = inline(lambda rows, row_bytes, N, groups, out: None)
    planes += [(nothing, 256)] * (4 - len(planes))
    (plane0, per0), (plane1, per1), (plane2, per2), (plane3, per3) = planes

    def packer(a, thread, threads):
        rows, row_bytes, N, K = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        data, stride, units = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
        panels, places = read_i64(a + 88), i64_at(read_i64(a + 96))
        codes_of_unit = np.empty(unit, np.uint8)
        c = codes_of_unit.ctypes.data
        for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
            base = data + panel * stride
            row, inside = rows + panel * ROWS * row_bytes, min(ROWS, N - panel * ROWS)
            # ascending, so that rows are read straight through
            for u in range(units):
                out = base + places[u] * nbytes
                for r in range(ROWS):
                    n = min(unit, K - u * unit) if r < inside else 0
                    if n < unit:
                        for k in range(unit):
                            codes_of_unit[k] = zero
                    if n > 0:
                        codes(row + r * row_bytes, u, n, c)
                    for block in range(unit // 32):
                        at = out + block * words * 64 + r * 4
                        write(u32_at(c + block * 32), u32_at(at), u32_at(at + tail))
            plane0(row, row_bytes, inside, (K + per0 - 1) // per0, base + read_i64(a + 56))
            plane1(row, row_bytes, inside, (K + per1 - 1) // per1, base + read_i64(a + 64))
            plane2(row, row_bytes, inside, (K + per2 - 1) // per2, base + read_i64(a + 72))
            plane3(row, row_bytes, inside, (K + per3 - 1) // per3, base + read_i64(a + 80))

    return kernel(packer, name=f"pack_{name}")


def _transpose_kernel(size: int) -> Kernel:
    at = u16_at if size == 2 else u32_at

    def packer(a, thread, threads):
        rows, row_bytes, N, K = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        data, stride, units = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
        panels, places = read_i64(a + 88), i64_at(read_i64(a + 96))
        for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
            for u in range(units):
                target = at(data + panel * stride + places[u] * 32 * ROWS * size)
                for r in range(min(ROWS, N - panel * ROWS)):
                    source = at(rows + (panel * ROWS + r) * row_bytes + 32 * u * size)
                    for k in range(min(32, K - 32 * u)):
                        target[k * ROWS + r] = source[k]

    return kernel(packer, name=f"pack_float{size}")


_kernels: dict[str, Kernel] = {}


def pack_kernel(name: str) -> Kernel:
    """The kernel that packs a format."""
    if name not in _kernels:
        make = _transpose_kernel(FLOATS[name]) if name in FLOATS else _pack_kernel(name)
        _kernels[name] = make
    return _kernels[name]


def layout(name: str, N: int, K: int) -> Weight:
    """Sizes of a packed [N, K] matrix; its data is still empty."""
    unit = FORMATS[name].unit
    units, panels = -(-K // unit), -(-N // ROWS)
    if name in FLOATS:
        stride, planes = units * 32 * ROWS * FLOATS[name], ()
    else:
        stride, planes = units * (unit // 32) * WORDS[CODECS[name].layout] * 64, []
        for plane in CODECS[name].scales.planes:
            planes.append(stride)
            # scales are read for whole units: a last, partial unit finds zeros behind its groups
            stride += -(-units * unit // plane.per) * ROWS * plane.size
    stride = -(-stride // 64) * 64
    return Weight(name, N, K, np.empty(0, np.uint8), panels, stride, units, tuple(planes))


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed uint8 memory whose first byte is aligned."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + nbytes]


def pack(
    name: str,
    rows: np.ndarray,
    K: int,
    threads: int,
    before: Callable[[int, int], None] | None = None,
) -> Weight:
    """Pack rows of a format.

    Args:
        rows: [N, row_bytes] uint8 - the file's bytes.
        K: weights per row.
        before: told (first, last) before these rows are read; each row once, in order.
    Returns: Weight with 64-byte aligned data.
    """
    weight = layout(name, len(rows), K)
    data, places = aligned(weight.panels * weight.stride), places_of(weight.units)
    step = max(1, SLICE // (ROWS * rows.shape[1])) * ROWS
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        if before:
            before(first, first + len(part))
        if name in ("cyb_u32", "cyb_u16"):
            part = FORMATS[name].decode(part).view(np.uint8)
        part, out = np.ascontiguousarray(part), data[first // ROWS * weight.stride :]
        run(
            pack_kernel(name), part, part.shape[1], len(part), K, out, weight.stride,
            weight.units, *weight.four_planes, -(-len(part) // ROWS), places, threads=threads,
        )  # fmt: skip
    return weight._replace(data=data)
