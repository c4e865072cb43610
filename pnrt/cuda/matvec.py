"""One token's product for the formats that matter, tuned: fewest issue slots per weight.

The codes are never unpacked. A word's mask leaves a pair of codes where they lie, worth 2^s times
themselves; the activations beside them are scaled by the complement (activations.py), so that a
unit's integer sum comes out times a power of two, which the activation's scale takes back. Both are
exact. Zero points enter as the accumulator's first value. Warps stay for many rows, two at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from pnrt.cuda.kernel import Kernel, device, kernel, registers, unroll
from pnrt.cuda.lanes import (
    bits_to_float,
    dot_pairs,
    f32,
    fetch_half,
    fetch_u16,
    fetch_u32,
    fetch_u32x4,
    fma,
    half_to_float,
    i32,
    lane,
    shared,
    shared_load_u32x4,
    shared_store_u32x4,
    syncthreads,
    thread,
    u32,
    u64,
    warp,
)
from pnrt.cuda.pack import CODECS, WORDS, layout
from pnrt.cuda.parts import PARTS, addend, choose, count, place, row_of, store_rows
from pnrt.cuda.parts import ROWS as N
from pnrt.cuda.views import PN3T_SEGMENTS

ROWS = 2
SHARED_BYTES = 48 * 1024
# bytes of a unit's activations: 16 words of pairs, then its scale and sums
UNIT_BYTES = 80


def tuned(name: str, K: int) -> str:
    """The activation view of a format's tuned kernel for rows of K weights; '' if there is none."""
    codec, units = CODECS[name], layout(name, 1, K).units
    if codec.layout == "pn3t":
        return "pn3t" if units <= 32 else ""
    fits = units * UNIT_BYTES <= SHARED_BYTES
    return codec.layout if fits and codec.scale in _PLANES else ""


class Planes(NamedTuple):
    """Where a lane's scales lie: per plane a divisor of the unit's number and bytes per entry."""

    entries: tuple[tuple[int, int], ...]
    scales: Callable


@device
def _one_half(p, more, q, s):
    s[0] = fetch_half(p)


@device
def _two_halves(p, more, q, s):
    both = fetch_u32(p)
    s[0], s[2] = half_to_float(both), half_to_float(both >> 16)


@device
def _k4(p, more, q, s):
    both, small = fetch_u32(p), fetch_u16(more)
    s[0] = half_to_float(both) * f32(i32(small & 0xFF))
    s[2] = -(half_to_float(both >> 16) * f32(i32(small >> 8)))


@device
def _in_word(p, more, q, s):
    d = half_to_float(q[3])
    s[0], s[1] = d * f32(i32(q[3] << 8) >> 24), d * f32(i32(q[3]) >> 24)


_PLANES = {
    "half64": Planes(((2, 2),), _one_half),
    "half": Planes(((1, 2),), _one_half),
    "halves": Planes(((1, 4),), _two_halves),
    "k4": Planes(((8, 4), (1, 2)), _k4),
    "word": Planes((), _in_word),
}


# a unit of 32 weights q with its activations x, scale dx, first sums: the chain goes on


def _nibble_unit(codec):
    masks = (0x000F000F, 0x00F000F0, 0x0F000F00, 0xF000F000)

    @device
    def unit(acc, q, x, s, dx, z8, z0, total):
        low, high = i32(0), i32(z8 if codec.zero == 8 else z0)
        for w in unroll(4):
            for j in unroll(3):
                low = dot_pairs(low, q[w] & masks[j], x[4 * w + j])
            high = dot_pairs(high, q[w] & masks[3], x[4 * w + 3])
        acc = fma(f32((low << 4) + high), s[0] * dx, acc)
        if codec.scale in ("halves", "k4"):
            acc = fma(bits_to_float(total), s[2] * dx, acc)
        return acc

    return unit


def _byte_unit(codec):
    @device
    def unit(acc, q, x, s, dx, zero, none, nothing):
        total = i32(zero)
        for w in unroll(8):
            total = dot_pairs(total, q[w] & 0x00FF00FF, x[2 * w])
            total = dot_pairs(total, q[w], x[2 * w + 1])
        return fma(f32(total), s[0] * dx, acc)

    return unit


def _three_unit(codec):
    @device
    def half(q, x, h, zero):
        low, high = i32(0), i32(zero)
        for i in unroll(range(8 * h, min(8 * h + 8, 15))):
            if i % 5 < 3:
                low = dot_pairs(low, q[i // 5] & (0x00070007 << i % 5 * 3), x[i])
            else:
                high = dot_pairs(high, q[i // 5] & (0x00070007 << i % 5 * 3), x[i])
        if h == 1:
            top = (q[0] >> 15) & 0x00010001 | (q[1] >> 14) & 0x00020002 | (q[2] >> 13) & 0x00040004
            low = dot_pairs(low, top, x[15])
        return f32((low << 6) + high)

    @device
    def unit(acc, q, x, s, dx, first, last, none):
        acc = fma(half(q, x, 0, first), s[0] * dx, acc)
        return fma(half(q, x, 1, last), s[1] * dx, acc)

    return unit


_UNITS = {"nibble": _nibble_unit, "byte": _byte_unit, "three": _three_unit}


def pace_of(name: str, K: int) -> int:
    """Steps of 32 units that one trip of a row's inner loop takes; all of them: no loop."""
    if CODECS[name].layout == "pn3t":
        return 1
    steps = layout(name, 1, K).units // 32
    plain = CODECS[name].layout == "nibble" and CODECS[name].scale != "k4"
    return steps if plain and steps <= 6 else min(steps, 2 if plain else 1)


def _in_shared(name: str, K: int, adds: bool) -> Kernel:
    codec, weight = CODECS[name], layout(name, 1, K)
    units, planes, quads = weight.units, _PLANES[codec.scale], WORDS[codec.layout] // 4
    steps, rest = divmod(units, 32)
    pace = pace_of(name, K)
    unit = _UNITS[codec.layout](codec)
    looped = pace < steps
    left = steps % pace if looped else steps
    warps = 8
    entries = (*planes.entries, (1, 0), (1, 0))[:2]
    code_row, scale_row, more_row = (*weight.row_bytes, 0, 0)[:3]

    @device
    def step(v, pq, ps, pm, xa, n):
        """Step n from these addresses: one unit of each row."""
        q = s = x = registers()
        for r in unroll(ROWS):
            for c in unroll(quads):
                p = pq + (r * code_row + c * units * 16 + n * 512)
                q[r][4 * c], q[r][4 * c + 1], q[r][4 * c + 2], q[r][4 * c + 3] = fetch_u32x4(p)
            planes.scales(
                ps + (r * scale_row + n * (32 // entries[0][0] * entries[0][1])),
                pm + (r * more_row + n * (32 // entries[1][0] * entries[1][1])),
                q[r], s[r],
            )  # fmt: skip
        for c in unroll(4):
            four = shared_load_u32x4(xa + (c * units * 16 + n * 512))
            x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3] = four
        dx, first, second, third = shared_load_u32x4(xa + (4 * units * 16 + n * 512))
        for r in unroll(ROWS):
            v[r] = unit(v[r], q[r], x, s[r], bits_to_float(dx), first, second, third)

    @kernel(name=_name(name, K, adds), threads=32 * warps, registers=64)
    def matvec(x: u64, parts: PARTS):
        """The block keeps the activations in shared memory, a warp takes two rows at a time."""
        m = registers()
        choose(parts, m)
        base = shared(units * UNIT_BYTES)
        for i in range(thread(), units * (UNIT_BYTES // 16), 32 * warps):
            a, b, c, d = fetch_u32x4(x + u64(i) * 16)
            shared_store_u32x4(base + i * 16, a, b, c, d)
        syncthreads()
        v = registers()
        first = (place(m) * warps + warp()) * ROWS
        for row in range(first, m[N], count(m) * (warps * ROWS)):
            v[0], v[1] = f32(0), f32(0)
            plus = addend(m, row_of(row, ROWS)) if adds else 0.0
            pq = m[0] + u64(row) * code_row + u64(lane() * 16)
            ps = m[1] + u64(row) * scale_row + u64(lane() // entries[0][0] * entries[0][1])
            pm = m[2] + u64(row) * more_row + u64(lane() // entries[1][0] * entries[1][1])
            xa = base + lane() * 16
            if looped:
                end = xa + steps // pace * (pace * 512)
                while xa < end:
                    for n in unroll(pace):
                        step(v, pq, ps, pm, xa, n)
                    pq += pace * 512
                    ps += pace * (32 // entries[0][0] * entries[0][1])
                    pm += pace * (32 // entries[1][0] * entries[1][1])
                    xa += pace * 512
            for n in unroll(left):
                step(v, pq, ps, pm, xa, n)
            if rest:
                # lanes behind the last unit wait
                inside = lane() < rest
                if inside:
                    step(v, pq, ps, pm, xa, left)
            store_rows(v, ROWS, m, row_of(row, ROWS), adds, plus)

    return matvec


def _pn3t(K: int, adds: bool) -> Kernel:
    units = layout("pn3t", 1, K).units

    @device
    def row_sum(w, x, z, dx, low, high):
        acc = f32(0)
        for n, (block, which, views) in unroll(tuple(enumerate(PN3T_SEGMENTS))):
            near, far = i32(0), i32(z[n])
            for word, pair, mask in unroll(views):
                seen = w[word] if mask == 0xFFFFFFFF else w[word] & mask
                if pair < 3:
                    near = dot_pairs(near, seen, x[5 * word + pair])
                else:
                    far = dot_pairs(far, seen, x[5 * word + pair])
            acc = fma(f32((near << 6) + far), (high if which else low) * dx[block], acc)
        return acc

    @kernel(name=_name("pn3t", K, adds), threads=128, registers=128)
    def matvec(x: u64, parts: PARTS):
        """A lane keeps its one unit of activations in registers for all its rows."""
        a = b = z = dx = w = d = v = m = registers()
        choose(parts, m)
        u = lane() if units == 32 else min(lane(), u32(units - 1))
        px = x + u64(u * 16)
        for c in unroll(20):
            a[4 * c], a[4 * c + 1], a[4 * c + 2], a[4 * c + 3] = fetch_u32x4(px + c * units * 16)
        for c in unroll(3):
            four = fetch_u32x4(px + (20 + c) * units * 16)
            b[4 * c], b[4 * c + 1], b[4 * c + 2], b[4 * c + 3] = four
        for i in unroll(5):
            dx[i] = bits_to_float(b[i])
            if units < 32:
                # a lane without a unit adds zeros
                dx[i] = dx[i] if lane() < units else 0.0
        for i in unroll(6):
            z[i] = b[5 + i]
        first = (place(m) * 4 + warp()) * ROWS
        for row in range(first, m[N], count(m) * (4 * ROWS)):
            plus = addend(m, row_of(row, ROWS)) if adds else 0.0
            pq = m[0] + u64(row) * (units * 64) + u64(u * 16)
            ps = m[1] + u64(row) * (units * 4) + u64(u * 4)
            for r in unroll(ROWS):
                d[r] = fetch_u32(ps + r * units * 4)
                for c in unroll(4):
                    four = fetch_u32x4(pq + (r * units * 64 + c * units * 16))
                    w[r][4 * c], w[r][4 * c + 1], w[r][4 * c + 2], w[r][4 * c + 3] = four
            for r in unroll(ROWS):
                v[r] = row_sum(w[r], a, z, dx, half_to_float(d[r]), half_to_float(d[r] >> 16))
            store_rows(v, ROWS, m, row_of(row, ROWS), adds, plus)

    return matvec


def _name(name: str, K: int, adds: bool) -> str:
    return f"matmul_{name}_{K}_q8_0_vector{'_add' if adds else ''}"


@functools.cache
def product(name: str, K: int, adds: bool = False) -> Kernel:
    """The tuned kernel of a format for rows of K weights; see `tuned`. adds: as parts.Part."""
    return _pn3t(K, adds) if CODECS[name].layout == "pn3t" else _in_shared(name, K, adds)
