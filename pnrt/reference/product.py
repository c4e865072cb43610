"""Quantized activations and the product of a quantized matrix with them (NUMERICS.md 1)."""

from __future__ import annotations

import itertools

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.reference.arithmetic import LANES, butterfly, f32, fma, quiet

Q8_BLOCK = 32
ACTIVATIONS = ("q8_0", "f32")
# rows of a product are taken in slices of about this many weights, to bound memory
SLICE = 1 << 22


@quiet
def quantize_q8_0(x) -> tuple[np.ndarray, np.ndarray]:
    """Activations to q8_0 by the scalar rule: q = round(x * (1 / d)), halves away from zero.

    d = max|x| / 127 codes the block, its fp16 rounding is the scale. Where 1 / d is not finite
    (d is zero or below 2^-128; the fp16 scale is zero then) the codes are zero.

    Args:
        x: [T, K] – activations; the last block is padded with zeros.
    Returns:
        q [T, K'] int8 and dx [T, K'/32] – codes and widened fp16 scales, K' = K rounded up to 32.
    Raises:
        FormatError: an element is not finite, or so large that the fp16 scale overflows.
    """
    x = np.asarray(x, f32)
    _refuse(x, np.isfinite(x), "finite numbers")
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % Q8_BLOCK)))
    blocks = padded.reshape(len(x), padded.shape[1] // Q8_BLOCK, Q8_BLOCK)
    d = np.abs(blocks).max(-1) / f32(127)
    scale = d.astype(np.float16).astype(f32)
    fits = np.repeat(np.isfinite(scale), Q8_BLOCK, axis=1)[:, : x.shape[1]]
    _refuse(x, fits, "blocks of 32 with max|x| / 127 below 65520")
    inverse = f32(1) / d
    inverse = np.where(np.isfinite(inverse), inverse, f32(0))
    v = blocks * inverse[..., None]
    whole = np.trunc(v)
    q = whole + np.where(np.abs(v - whole) >= f32(0.5), np.sign(v), f32(0))
    return q.reshape(padded.shape).astype(np.int8), scale


def _refuse(x: np.ndarray, good: np.ndarray, allowed: str) -> None:
    if not good.all():
        token, k = np.argwhere(~good)[0]
        raise FormatError(
            f"activation of token {token}, element {k}: found {x[token, k]}; q8_0 codes {allowed}. "
            "Run with activations='f32', or trace where the value comes from."
        )


def _format(name: str):
    if name not in FORMATS:
        raise FormatError(
            f"format {name!r}: unknown; known are {', '.join(FORMATS)}. Use one of these names."
        )
    return FORMATS[name]


def segments(unit: int, group: int) -> list[tuple[int, int]]:
    """Runs (start, stop) inside a unit that have one weight scale and one activation scale."""
    borders = sorted({*range(0, unit, Q8_BLOCK), *range(0, unit, group), unit})
    return list(itertools.pairwise(borders))


@quiet
def matmul(format: str, rows, x, activations: str = "q8_0") -> np.ndarray:
    """y[t, n] = sum over k of W[n, k] x[t, k], in units, segments and lanes.

    A format with an offset adds, in each segment, its scale term first and its offset term second.
    Weights in f32, f16 and bf16 take the "f32" order whatever `activations` says.

    Args:
        format: name in FORMATS.
        rows: [N, row bytes] uint8 – the weights.
        x: [T, K] – activations.
        activations: "q8_0" (codes of 8 bits, integer sums) or "f32" (decoded weights, fma chain).
    Returns:
        [T, N] – products.
    Raises:
        FormatError: unknown format or activations, x of another width, values q8_0 cannot code.
    """
    fmt, rows, x = _format(format), np.asarray(rows, np.uint8), np.asarray(x, f32)
    columns = fmt.columns(rows.shape[1])
    if activations not in ACTIVATIONS:
        raise FormatError(
            f"activations {activations!r}: unknown; choose one of {', '.join(ACTIVATIONS)}."
        )
    if x.ndim != 2 or x.shape[1] != columns:
        raise FormatError(
            f"product with {format} rows of {columns} weights: activations have shape {x.shape}; "
            f"[T, {columns}] is needed. Pass one row of {columns} values per token."
        )
    step = max(1, SLICE // max(1, columns))
    slices = [rows[n : n + step] for n in range(0, len(rows), step)]
    if activations == "f32" or fmt.group == 0:
        products = [_product_f32(fmt.decode(part), x, fmt.unit) for part in slices]
    else:
        q, dx = quantize_q8_0(x)
        products = [_product_q8_0(fmt, part, q, dx) for part in slices]
    return np.concatenate([np.zeros((len(x), 0), f32), *products], axis=1)


def _units(a: np.ndarray, unit: int) -> np.ndarray:
    """a [R, K] -> [units, R, unit], the last unit padded with zeros."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % unit)))
    return a.reshape(len(a), a.shape[1] // unit, unit).transpose(1, 0, 2)


def _product_q8_0(fmt, rows: np.ndarray, q: np.ndarray, dx: np.ndarray) -> np.ndarray:
    codes, dw, offset = fmt.parts(rows)
    group = fmt.group
    # integer sums by float64 products: exact, they stay below 2^53
    w, q = _units(codes.astype(np.float64), fmt.unit), _units(q.astype(np.float64), fmt.unit)
    dx = np.pad(dx, ((0, 0), (0, len(w) * fmt.unit // Q8_BLOCK - dx.shape[1])))
    lanes = np.zeros((LANES, q.shape[1], len(rows)), f32)
    for first in range(0, len(w), LANES):
        u = np.arange(first, min(first + LANES, len(w)))
        mine = lanes[: len(u)]
        for start, stop in segments(fmt.unit, group):
            a, b = q[u, :, start:stop], w[u, :, start:stop]
            at = u * fmt.unit + start
            scale = dx.T[at // Q8_BLOCK][:, :, None]
            # behind the end of the row the codes are zero and any scale does
            weight = np.minimum(at // group, dw.shape[1] - 1)
            total = (a @ b.transpose(0, 2, 1)).astype(f32)
            mine[:] = fma(total, dw.T[weight][:, None, :] * scale, mine)
            if offset is not None:
                total = a.sum(-1, keepdims=True).astype(f32)
                mine[:] = fma(total, offset.T[weight][:, None, :] * scale, mine)
    return butterfly(lanes)


def _product_f32(w: np.ndarray, x: np.ndarray, unit: int) -> np.ndarray:
    w, x = _units(w, unit), _units(x, unit)
    lanes = np.zeros((LANES, x.shape[1], w.shape[1]), f32)
    for first in range(0, len(w), LANES):
        a, b = x[first : first + LANES], w[first : first + LANES]
        mine = lanes[: len(a)]
        for k in range(unit):
            mine[:] = fma(b[:, None, :, k], a[:, :, None, k], mine)
    return butterfly(lanes)


def embedding(format: str, rows, tokens) -> np.ndarray:
    """tokens [T] int -> [T, K]: the decoded rows of a table rows [V, row bytes] uint8."""
    return _format(format).decode(np.asarray(rows)[np.asarray(tokens)])
