"""The quantized product in the contract's order: a lane of the contract is a lane of the warp.

Two kernels serve every format: integer sums with q8_0 activations, and an fma chain over decoded
weights with float32 activations. Each takes a few rows and a few tokens per warp, so that a weight
is decoded once per tile of tokens and an activation read once per tile of rows.

Activations lie per token, in blocks of 32, as quads of words that 32 lanes read side by side:

    q8_0  pairs of codes as signed halves [4][blocks][4], then per block: its scale (f32), the sums
          of its first and of its last 16 codes (i32), 0
    f32   [8][blocks][4]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pnrt.cuda import matvec
from pnrt.cuda.activations import CONVERSIONS, VIEWS
from pnrt.cuda.codecs import reader
from pnrt.cuda.kernel import Call, Kernel, device, kernel, registers, unroll
from pnrt.cuda.lanes import (
    at,
    bits_to_float,
    block_y,
    dot8,
    f32,
    fetch_f32x4,
    fetch_u32x4,
    fma,
    fma4,
    global_warp,
    i32,
    lane,
    store_f32,
    u32,
    u64,
    warp,
)
from pnrt.cuda.pack import CODECS, Weight, layout
from pnrt.cuda.parts import PARTS, Part, addend, arguments, choose, place, store_rows
from pnrt.cuda.parts import ROWS as N
from pnrt.cuda.reduce import reduce
from pnrt.formats import FORMATS

WARPS = 4
# of a P100: 56 multiprocessors, four blocks each
BLOCKS = 224


def _coordinates(count, tokens):
    """@device () -> row and token of this lane's value after reduce, and whether it stores."""
    spread = 32 // count

    @device
    def coordinates():
        value = lane() // spread
        return value // tokens, value % tokens, lane() % spread == 0

    return coordinates


def _segment(R):
    """@device functions that add one block of 32 weights to a chain."""

    @device
    def segment(acc, total, sum, dx, s, half):
        acc = fma(f32(total), s[half] * dx, acc)
        if R.offset:
            acc = fma(f32(sum), s[2 + half] * dx, acc)
        return acc

    @device
    def pairs(w, x, which, total):
        i = 8 * which
        return dot8(
            total,
            w[i], w[i + 1], w[i + 2], w[i + 3], w[i + 4], w[i + 5], w[i + 6], w[i + 7],
            x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7],
        )  # fmt: skip

    @device
    def codes(w, x, which, total):
        for i in unroll(8):
            both = x[8 * which + i]
            total += w[16 * which + 2 * i] * (i32(both << 16) >> 16)
            total += w[16 * which + 2 * i + 1] * (i32(both) >> 16)
        return total

    dot = codes if R.pair is None else pairs

    @device
    def block(acc, w, x, s, b, dx, low, high):
        first, last = dot(w, x, 0, low * -R.zero), dot(w, x, 1, high * -R.zero)
        if R.split == "all":
            acc = segment(segment(acc, first, low, dx, s, 0), last, high, dx, s, 1)
        elif R.split == "none":
            acc = segment(acc, first + last, low + high, dx, s, 0)
        else:
            if b == 2:
                acc = segment(segment(acc, first, low, dx, s, 0), last, high, dx, s, 1)
            else:
                acc = segment(acc, first + last, low + high, dx, s, 0)
        return acc

    return block


def _walk(name: str, K: int, count: int, unit_block):
    """@device: fill the sums v of a warp's rows and tokens, from every unit of the rows."""
    R, units = reader(name, K), layout(name, 1, K).units

    @device
    def walk(codes, scales, more, x, row, token, T, v):
        for i in unroll(count):
            v[i] = f32(0)
        for u in range(lane(), units, 32):
            if R.blocks == 1:
                unit_block(codes, scales, more, x, row, token, T, u, u32(0), v)
            else:
                for b in range(u32(0), R.blocks):
                    unit_block(codes, scales, more, x, row, token, T, u, b, v)

    return walk


def _one(name: str, K: int, mode: str, walk, adds: bool) -> Kernel:
    """The kernel of one token; adds: as parts.Part."""

    @kernel(name=f"matmul_{name}_{K}_{mode}_1x1{'_add' if adds else ''}", threads=32 * WARPS,
            registers=168)  # fmt: skip
    def matmul(x: u64, parts: PARTS):
        """A warp takes a row."""
        m = v = registers()
        choose(parts, m)
        row = place(m) * WARPS + warp()
        if row < m[N]:
            plus = addend(m, row) if adds else 0.0
            walk(m[0], m[1], m[2], x, row, u32(0), u32(1), v)
            store_rows(v, 1, m, row, adds, plus)

    return matmul


def _product(name: str, K: int, mode: str, rows: int, tokens: int, walk) -> Kernel:
    """The kernel of several tokens."""
    count = rows * tokens
    coordinates = _coordinates(count, tokens)

    @kernel(name=f"matmul_{name}_{K}_{mode}_{rows}x{tokens}", threads=32 * WARPS, registers=168)
    def matmul(codes: u64, scales: u64, more: u64, x: u64, out: u64, width: u32, N: u32, T: u32):
        """out [T, width] f32. A warp takes `rows` rows and `tokens` tokens, block_y the tokens."""
        row, token = global_warp() * rows, block_y() * tokens
        v = registers()
        if row < N:
            walk(codes, scales, more, x, row, token, T, v)
            total = reduce(v, count)
            r, t, mine = coordinates()
            if mine and row + r < N and token + t < T:
                store_f32(at(out + u64(token + t) * 4 * u64(width), row + r, 4), total)

    return matmul


def _q8_block(name: str, K: int, rows: int, tokens: int):
    """@device: add a block of a unit to the sums v."""
    R, quad, stride = reader(name, K), VIEWS["q8_0"].units(K) * 16, view_bytes("q8_0", K, 1)
    add_block = _segment(R)

    @device
    def weights(q, w):
        if R.pair is not None:
            for i in unroll(16):
                w[i] = R.pair(q, i)
        else:
            for k in unroll(32):
                w[k] = R.code(q, k)

    @device
    def unit_block(codes, scales, more, x, row, token, T, u, b, v):
        q = s = w = a = registers()
        for r in unroll(rows):
            R.words(codes, row + r, u, b, q[r])
            R.scales(scales, more, q[r], row + r, u, b, s[r])
            weights(q[r], w[r])
        for t in unroll(tokens):
            p = at(x + u64(min(token + t, T - 1)) * stride, u * R.blocks + b, 16)
            for c in unroll(4):
                a[4 * c], a[4 * c + 1], a[4 * c + 2], a[4 * c + 3] = fetch_u32x4(p + c * quad)
            dx, low, high, _ = fetch_u32x4(p + 4 * quad)
            for r in unroll(rows):
                i = r * tokens + t
                v[i] = add_block(v[i], w[r], a, s[r], b, bits_to_float(dx), i32(low), i32(high))

    return unit_block


def _f32_block(name: str, K: int, rows: int, tokens: int):
    """The same with float32 activations: in a unit fma over k ascending."""
    R, quad, stride = reader(name, K), VIEWS["f32"].units(K) * 16, view_bytes("f32", K, 1)

    @device
    def weight(q, s, k):
        """Weight k of a block, decoded: code * scale (+ offset), each rounded."""
        if R.scales is None:
            value = R.code(q, k)
        elif R.divisor:
            value = f32(R.code(q, k)) * s[2] / R.divisor
        elif R.offset:
            value = f32(R.code(q, k) - R.zero) * s[k // 16] + s[2 + k // 16]
        else:
            value = f32(R.code(q, k) - R.zero) * s[k // 16]
        return value

    @device
    def unit_block(codes, scales, more, x, row, token, T, u, b, v):
        q = s = w = a = registers()
        for r in unroll(rows):
            R.words(codes, row + r, u, b, q[r])
            if R.scales is not None:
                R.scales(scales, more, q[r], row + r, u, b, s[r])
        for c in unroll(8):
            for r in unroll(rows):
                for k in unroll(4):
                    w[r][k] = weight(q[r], s[r], 4 * c + k)
            for t in unroll(tokens):
                p = at(x + u64(min(token + t, T - 1)) * stride, u * R.blocks + b, 16)
                a[0], a[1], a[2], a[3] = fetch_f32x4(p + c * quad)
                for r in unroll(rows):
                    i = r * tokens + t
                    v[i] = fma4(v[i], w[r][0], w[r][1], w[r][2], w[r][3], a[0], a[1], a[2], a[3])

    return unit_block


@functools.cache
def product(
    name: str, K: int, mode: str, rows: int, tokens: int, adds: bool | None = None
) -> Kernel:
    """The kernel of a product: format, columns, 'q8_0' or 'f32', rows and tokens per warp.

    adds: for one token, whether something is added to it (parts.Part); None for several.
    """
    make = _q8_block if mode == "q8_0" else _f32_block
    walk = _walk(name, K, rows * tokens, make(name, K, rows, tokens))
    if adds is None:
        return _product(name, K, mode, rows, tokens, walk)
    return _one(name, K, mode, walk, adds)


def view_of(name: str, K: int, mode: str, T: int) -> str:
    """The order of activations that a product reads: format, columns, 'q8_0' or 'f32', tokens."""
    if FORMATS[name].group == 0:
        return "f32"
    return (matvec.tuned(name, K) if mode == "q8_0" and T == 1 else "") or mode


def view_bytes(view: str, K: int, T: int) -> int:
    """Bytes of T tokens' activations."""
    return T * VIEWS[view].units(K) * VIEWS[view].nbytes


def convert(view: str, x: int, width: int, K: int, T: int, out: int, bad: int) -> Call:
    """The launch that turns x [T, width] f32 into activations at `out` (view_bytes long).

    bad: address of a u32 that becomes 1 where q8_0 cannot code a value or one is not finite.
    """
    units = VIEWS[view].units(K)
    grid = (-(-units * VIEWS[view].blocks // WARPS), T)
    return Call(CONVERSIONS[view], grid, (x, width, K, out, units, bad))


def multiply(
    weight: Weight, address: int, view: str, x: int, out: int, width: int, T: int, blocks=BLOCKS
) -> Call:
    """The launch of out[t, n] = sum over k of W[n, k] x[t, k].

    Args:
        weight, address: a packed matrix and where its planes lie.
        view, x: what convert made for view_of(format, K, mode, T).
        out, width: [T, width] f32, width >= N.
        blocks: how many the device can hold at once, for kernels whose warps stay for many rows.
    Exact: the bits of reference.matmul.
    """
    if T == 1:
        return multiply_parts([Part(weight, address, out)], view, x, blocks)
    planes = (*(address + offset for offset in weight.offsets), 0, 0)[:3]
    rows, tokens = _tile(weight.format, view)
    which = product(weight.format, weight.K, view, rows, tokens)
    grid = (-(-weight.N // (WARPS * rows)), -(-T // tokens))
    return Call(which, grid, (*planes, x, out, width, weight.N, T))


def multiply_parts(parts: Sequence[Part], view: str, x: int, blocks=BLOCKS) -> Call:
    """The launch of one token's products with up to parts.MOST matrices of one format and width.

    Args: view, x, blocks as in multiply; all parts add something or none does.
    """
    name, K, adds = parts[0].weight.format, parts[0].weight.K, parts[0].add != 0
    if not VIEWS[view].tokens:
        which = matvec.product(name, K, adds)
        grid, args = arguments(parts, which.threads // 32 * matvec.ROWS, blocks)
    else:
        which = product(name, K, view, 1, 1, adds)
        grid, args = arguments(parts, WARPS)
    return Call(which, (grid, 1), (x, *args))


def _tile(name: str, view: str) -> tuple[int, int]:
    """Rows and tokens per warp: what fits the registers (test_compile.py holds it)."""
    if view == "f32":
        return 2, 4
    if CODECS[name].layout == "e4m3":
        return 1, 4
    return (2, 4) if CODECS[name].scale == "f32m" else (4, 4)


def kernels() -> list[Kernel]:
    """Every kernel of this module for one width; formats that are read alike share theirs."""
    # what is added does not depend on the format
    found, seen = [product("q6_K", 1024, mode, 1, 1, True) for mode in ("q8_0", "f32")], set()
    for name, codec in CODECS.items():
        form = FORMATS[name]
        K = 1024 // form.block * form.block
        if matvec.tuned(name, K):
            found += [matvec.product(name, K), matvec.product(name, K, adds=True)]
        if (codec, form.group == 16) not in seen:
            seen.add((codec, form.group == 16))
            for mode in ("q8_0", "f32") if form.group else ("f32",):
                found += [product(name, K, mode, *_tile(name, mode))]
                found += [product(name, K, mode, 1, 1, False)]
    return found
