"""Compiled packing of rows for the GPU: the planes of pack.py, from the bytes of a file.

A kernel is made of a reader of codes (rows.py), a writer for the layout of a unit's words, and one
for the scales of a row. They are the only things that differ between formats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from pnrt import rows
from pnrt.cuda.pack import CODECS, Weight, groups_of, layout
from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.jit import Kernel, call, inline, kernel
from pnrt.rows import word
from pnrt.simd import (
    f32_at,
    half_value,
    read_i64,
    read_u16,
    u8_at,
    u16_at,
    u32_at,
    u64_at,
)

# writers of codes: unit u of a row, its codes at c, to the quads of the row at out. A whole unit
# also gets n, the number of its weights, and has room for 128 bytes at c


def _quads(count: int):
    """Words as they are, 16 bytes per quad."""

    @inline
    def write(c, row, u, units, out):
        source = u64_at(c)
        for q in range(count):
            target = u64_at(out + (q * units + u) * 16)
            target[0], target[1] = source[2 * q], source[2 * q + 1]

    return write


_TOP = np.uint64(0x8080808080808080)
_two_quads = _quads(2)


def _bytes(code: rows.Codes):
    """Signed codes, the even ones plus 128."""
    zeros, table = np.uint64(0x0101010101010101 * code.zero), np.array(code.table or (0,), np.int8)
    table, named, wide = table.view(np.uint8), bool(code.table), code.zero == 128

    @inline
    def write(c, row, u, units, out):
        if named:
            for j in range(32):
                u8_at(c)[j] = table[u8_at(c)[j]]
        words = u64_at(c)
        for i in range(4):
            signed = words[i]
            if wide:
                signed ^= _TOP
            elif not named:
                # the top bits keep a byte from borrowing of the next
                signed = (signed | _TOP) - zeros ^ _TOP
            words[i] = signed ^ np.uint64(0x0080008000800080)
        _two_quads(c, row, u, units, out)

    return write


@inline
def _floats8(c, row, u, units, out):
    """8-bit floats; -0 and NaN become 0, as in the integers of their values."""
    words, ones = u64_at(c), np.uint64(0x0101010101010101)
    for i in range(4):
        # 0 where the seven low bits are all equal
        some = (words[i] & ~_TOP) + ones & np.uint64(0x7E7E7E7E7E7E7E7E)
        words[i] &= (some + (_TOP - ones) >> np.uint64(7) & ones) * np.uint64(255)
    _two_quads(c, row, u, units, out)


@inline
def _every_other(x, spread):
    """Bytes 0, 2, 4, 6 of x side by side, each at a multiple of the bits that spread has room for:
    a product with no two terms on one bit."""
    return ((x & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(spread)) >> np.uint64(48)


def _pairs(bits: int) -> int:
    return sum(1 << (48 + i * bits - 16 * i) for i in range(4))


_FOURS, _THREES = _pairs(4), _pairs(3)


@inline
def _nibbles(c, row, u, units, out):
    codes, words = u64_at(c), u32_at(out + u * 16)
    for w in range(4):
        low, high = _every_other(codes[w], _FOURS), _every_other(codes[w] >> np.uint64(8), _FOURS)
        words[w] = np.uint32(low | high << np.uint64(16)) ^ np.uint32(0x80008000)


@inline
def _threes(c, row, u, units, out):
    """Codes of three bits, and in word 3 the scales of q3_K."""
    words, last = u32_at(out + u * 16), u8_at(c + 30)
    for w in range(3):
        x, top = u64_at(c + 10 * w)[0], u8_at(c + 10 * w + 8)
        low = _every_other(x, _THREES) | np.uint64(top[0]) << np.uint64(12)
        high = _every_other(x >> np.uint64(8), _THREES) | np.uint64(top[1]) << np.uint64(12)
        low |= np.uint64((last[0] >> w) & 1) << np.uint64(15)
        high |= np.uint64((last[1] >> w) & 1) << np.uint64(15)
        words[w] = np.uint32(low | high << np.uint64(16))
    d = np.uint32(read_u16(row + (u >> 3) * 110 + 108))
    first, second = rows.q3_k_scale(row, 2 * u), rows.q3_k_scale(row, 2 * u + 1)
    small = np.uint32(first & 0xFF) << np.uint32(16) | np.uint32(second & 0xFF) << np.uint32(24)
    words[3] = d | small


# the file's own words, without a detour over codes


@inline
def _pn3t(row, u, n, units, out, c):
    for block in range(2):
        words = row + (2 * u + block) * 34 + 2
        for q in range(2):
            target = u32_at(out + ((2 * block + q) * units + u) * 16)
            for w in range(4):
                # kernels rely on the reserved bits being zero
                read = word(words + 16 * q + 4 * w) if n > 80 * block else np.uint32(0)
                target[w] = read & np.uint32(0x7FFF7FFF)


@inline
def _pn4t(row, u, n, units, out, c):
    words, target = row + (u >> 1) * 34 + 2 + (u & 1) * 16, u32_at(out + u * 16)
    for w in range(4):
        target[w] = word(words + 4 * w) ^ np.uint32(0x80008000)


def _coded(name: str) -> Callable:
    """A unit by way of its codes; behind the end of a row they are zero."""
    code, layout = rows.CODES[name], CODECS[name].layout
    write = {"nibble": _nibbles, "three": _threes, "e4m3": _floats8}.get(layout) or _bytes(code)
    read, zero = code.read, np.uint8(code.zero)

    @inline
    def unit(row, u, n, units, out, c):
        if n < 32:
            for k in range(32):
                u8_at(c)[k] = zero
        read(row, u, n, c)
        write(c, row, u, units, out)

    return unit


def _copied(size: int) -> Callable:
    """A unit of numbers of so many bytes."""
    quads = _quads(2 * size)

    @inline
    def unit(row, u, n, units, out, c):
        source = row + u * 32 * size
        if n < 32:
            for i in range(32 * size):
                u8_at(c)[i] = u8_at(source)[i] if i < n * size else np.uint8(0)
            source = c
        quads(source, row, u, units, out)

    return unit


# writers of scales: those of a row of K weights to the row's one or two planes


def _halves(name: str) -> Callable:
    """A half per block."""
    block, nbytes = FORMATS[name].block, FORMATS[name].nbytes

    @inline
    def write(row, K, units, p, q):
        for b in range(K // block):
            u16_at(p)[b] = read_u16(row + b * nbytes)

    return write


@inline
def _q4_1(row, K, units, p, q):
    for u in range(units):
        u32_at(p)[u] = word(row + u * 20)


_small, _minimum = rows.six_bits(144, False), rows.six_bits(144, True)


@inline
def _q4_k(row, K, units, p, q):
    for s in range(units // 8):
        u32_at(p)[s] = word(row + s * 144)
    for u in range(units):
        u8_at(q)[2 * u], u8_at(q)[2 * u + 1] = _small(row, u), _minimum(row, u)


@inline
def _nothing(row, K, units, p, q):
    pass


def _numbers(name: str) -> Callable:
    """Scales as float32, and what the second plane holds beside them."""
    width, groups = FORMATS[name].group, groups_of(name)
    value, *second = _VALUES[name]
    two, other = bool(second), second[0] if second else value

    @inline
    def write(row, K, units, p, q):
        last = (K + width - 1) // width - 1
        for g in range(units * groups):
            # behind the end of a row the codes are zero and any scale does
            i = min(g * 32 // (groups * width), last)
            f32_at(p)[g] = value(row, i)
            if two:
                f32_at(q)[g] = other(row, i)

    return write


# float32 scales: value(row, group)


def _half(nbytes: int, at: int, per: int = 1, factor: float = 1.0) -> Callable:
    times = np.float32(factor)

    @inline
    def value(row, g):
        return half_value(read_u16(row + g // per * nbytes + at)) * times

    return value


def _times(d: Callable, small: Callable, sign: int = 1) -> Callable:
    one = np.float32(sign)

    @inline
    def value(row, g):
        return d(row, g) * np.float32(small(row, g)) * one

    return value


def _power(exponent: Callable, first: int) -> Callable:
    """2^(e + first)."""
    powers = np.ldexp(np.float32(1), np.arange(256) + first)

    @inline
    def value(row, g):
        return powers[exponent(row, g)]

    return value


def _fixed(nbytes: int, full: int) -> Callable:
    divisor = np.float32(256 * full)

    @inline
    def value(row, g):
        return np.float32(np.int16(read_u16(row + g * nbytes))) / divisor

    return value


@inline
def _nvfp4(row, g):
    return half_value(np.uint16(rows.nvfp4_scale(row, g)))


@inline
def _one(row, g):
    return np.float32(1)


_VALUES = {
    "q5_0": (_half(22, 0),),
    "q5_1": (_half(24, 0), _half(24, 2)),
    "q2_K": (
        _times(_half(84, 80, 16), rows.q2_k_scale),
        _times(_half(84, 82, 16), rows.q2_k_minimum, -1),
    ),
    "q5_K": (
        _times(_half(176, 0, 8), rows.six_bits(176, False)),
        _times(_half(176, 2, 8), rows.six_bits(176, True), -1),
    ),
    "q6_K": (_times(_half(210, 208, 16), rows.q6_k_scale),),
    "iq4_nl": (_half(18, 0),),
    "iq4_xs": (_times(_half(136, 0, 8), rows.iq4_xs_scale),),
    "tq1_0": (_half(54, 52),),
    "tq2_0": (_half(66, 64),),
    "mxfp4": (_power(rows.mxfp4_scale, -128),),
    "nvfp4": (_nvfp4,),
    "e4m3": (_half(34, 0, 1, 2.0**-9),),
    "mxfp8": (_power(rows.mxfp8_scale, -136),),
    "mxfp8_264": (_power(rows.mxfp8_264_scale, -136),),
    "cyb_q8": (_fixed(34, 127), _fixed(34, 1)),
    "cyb_q4": (_fixed(18, 8), _fixed(18, 1)),
    "cyb_ternary": (_one,),
    "bitnet_ternary": (_one,),
}


def _scales(name: str) -> Callable:
    kind = CODECS[name].scale
    if kind in ("pn3t", "half64", "half"):
        return _halves(name)
    known = {"": _nothing, "word": _nothing, "halves": _q4_1, "k4": _q4_k}
    return known.get(kind) or _numbers(name)


@functools.cache
def packer(name: str) -> Kernel:
    """The kernel of a format: rows, their bytes, N, K, units, then a plane's address and row bytes
    for each of three planes."""
    form, width = CODECS[name].layout, FORMATS[name].unit
    direct = {"pn3t": _pn3t, "pn4t": _pn4t}.get(name)
    sizes = {"f32": 4, "half": 2, "bf16": 2}
    unit = direct or (_copied(sizes[form]) if form in sizes else _coded(name))
    scales = _scales(name)

    def pack(a, thread, threads):
        source, row_bytes, N, K = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
        units, room = read_i64(a + 32), np.empty(128, np.uint8)
        for r in range(N * thread // threads, N * (thread + 1) // threads):
            row, out = source + r * row_bytes, read_i64(a + 40) + r * read_i64(a + 48)
            for u in range(units):
                unit(row, u, min(width, K - u * width), units, out, room.ctypes.data)
            p, q = read_i64(a + 56) + r * read_i64(a + 64), read_i64(a + 72) + r * read_i64(a + 80)
            scales(row, K, units, p, q)

    return kernel(pack, name=f"cuda_pack_{name}")


def pack_rows(name: str, given: np.ndarray, K: int) -> tuple[np.ndarray, ...]:
    """Pack rows on the calling thread; several may at once.

    Args:
        given: [n, row bytes] uint8 of a format.
    Returns: each plane [n, its row bytes] uint8.
    Raises: FormatError for rows that have not K weights.
    """
    form, weight = FORMATS[name], layout(name, len(given), K)
    if form.row_bytes(form.columns(given.shape[1])) != form.row_bytes(K):
        raise FormatError(
            f"pack: rows of {given.shape[1]} bytes; {name} with K = {K} needs {form.row_bytes(K)}"
        )
    if name in ("cyb_u32", "cyb_u16"):
        name, given = "f32", form.decode(given).view(np.uint8)
    given = np.ascontiguousarray(given)
    # zeros: of pn3t's last unit one scale may be missing
    planes = [np.zeros((len(given), size), np.uint8) for size in weight.row_bytes]
    places = [v for plane in planes for v in (plane, plane.shape[1])] + [0] * 4
    call(packer(name), given, given.shape[1], len(given), K, weight.units, *places[:6])
    return tuple(planes)


def pack(name: str, rows: np.ndarray, K: int) -> tuple[Weight, np.ndarray]:
    """Pack a whole matrix: its layout and its bytes."""
    weight = layout(name, len(rows), K)
    data = np.zeros(weight.nbytes, np.uint8)
    for at, plane in zip(weight.offsets, pack_rows(name, rows, K), strict=True):
        data[at : at + plane.size] = plane.reshape(-1)
    return weight, data
