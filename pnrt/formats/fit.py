"""Searches for the scales of ggml's formats: vectorized over groups, a group per column.

They are ggml's: float32, one rounding per operation, sums from the first weight to the last, so
that they choose what ggml chooses. fit_search.py is the same compiled; these functions, slow and
plain, are its judge. Codes are uint8, counted from the lowest.
"""

from __future__ import annotations

import numpy as np

from pnrt.formats.base import largest

# the values of iq4_nl and iq4_xs, and the places half-way between them
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32)
NL_VALUES = NL.astype(np.float32)
NL_MIDDLES = (NL_VALUES[1:] + NL_VALUES[:-1]) / 2

# twice the values of a 4-bit float; code 8 is plain zero
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int32)
E2M1 = np.concatenate([E2M1, -E2M1])

# groups whose largest magnitude is smaller count as zero
TINY = np.float32(1e-15)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b in float32, 0 where b is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), b)
    return np.divide(a, b, out=np.zeros(a.shape, np.float32), where=b != 0)


def nearest_integers(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """Round x to integers within low..high, in place."""
    np.rint(x, out=x)
    np.maximum(x, np.float32(low), out=x)
    return np.minimum(x, np.float32(high), out=x)


def nearest_nl(x: np.ndarray) -> np.ndarray:
    """The code whose value is nearest to x, the upper of two equally near ones; NaN counts as 0."""
    return np.searchsorted(NL_MIDDLES, np.nan_to_num(x, nan=0), side="right").astype(np.uint8)


def nl_codes(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """The codes nearest to x * factor: [n, g], [n] float32 (in any shape) -> [n, g] uint8."""
    return nearest_nl(x * factor.reshape(-1, 1))


def nearest_e2m1(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The code with E2M1[code] * unit nearest to x, the smaller magnitude of equals.

    x [n, g] float32, unit [n] float32 -> [n, g] uint8.
    """
    magnitude, code = np.abs(x), np.zeros(x.shape, np.uint8)
    best = magnitude
    for candidate in range(1, 8):
        distance = np.abs(np.float32(E2M1[candidate]) * unit[:, None] - magnitude)
        # strictly nearer: where float32 cannot tell candidates apart the smaller one stays
        code[distance < best] = candidate
        best = np.minimum(best, distance)
    return code | ((x < 0) & (code > 0)).astype(np.uint8) << 3


def bytes_from(codes: np.ndarray, low: int) -> np.ndarray:
    """Whole numbers -> uint8, counted from `low`; NaN becomes 0."""
    return np.nan_to_num(codes - np.float32(low), nan=0).astype(np.uint8)


def affine_levels(top: int, start: float, count: int) -> np.ndarray:
    """Levels a range is divided into: top + start, then steps of 0.1, in float32."""
    steps = np.float32(0.1) * np.arange(count, dtype=np.float32)
    return np.float32(start) + steps + np.float32(top)


def fit_affine(
    x: np.ndarray, top: int, tries: np.ndarray, absolute: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit x = scale * code - low with codes 0..top and low >= 0.

    Args:
        x: [n, g] float32.
        tries: levels (fractional) the range is divided into before each least-squares refinement.
        absolute: weigh absolute errors by |x|; else squared ones by |x| + sqrt(mean x^2).
    Returns:
        scale [n], low [n] float32, codes [n, g] uint8.
    """
    # groups become columns: sums over a group then run from its first weight to its last, as ggml's
    x = np.ascontiguousarray(x.T)
    weights = np.abs(x)
    if not absolute:
        weights = np.sqrt((x * x).sum(axis=0) / np.float32(len(x))) + weights
    low, high = np.minimum(x.min(axis=0), 0), x.max(axis=0)
    flat = high == low

    def codes_for(levels, low):
        codes = x - low
        codes *= divide(levels, high - low)
        return nearest_integers(codes, 0, top)

    def error(codes, scale, low):
        left = codes * scale
        left += low
        left -= x
        if absolute:
            np.abs(left, out=left)
        else:
            left *= left
        left *= weights
        return left.sum(axis=0)

    codes = codes_for(np.float32(top), low)
    scale = divide(1, divide(np.float32(top), high - low))
    best = error(codes, scale, low)
    sum_w, sum_x = weights.sum(axis=0), (weights * x).sum(axis=0)
    for levels in tries:
        trial = codes_for(levels, low)
        weighted = weights * trial
        sum_l, sum_l2 = weighted.sum(axis=0), (weighted * trial).sum(axis=0)
        weighted *= x
        sum_xl = weighted.sum(axis=0)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = divide(sum_w * sum_xl - sum_x * sum_l, determinant)
        new_low = divide(sum_l2 * sum_x - sum_l * sum_xl, determinant)
        # a positive minimum cannot be stored: fit the scale alone
        new_scale = np.where(new_low > 0, divide(sum_xl, sum_l2), new_scale)
        new_low = np.minimum(new_low, 0)
        new_error = error(trial, new_scale, new_low)
        better = (determinant > 0) & (new_error < best) & ~flat
        best, scale = np.where(better, new_error, best), np.where(better, new_scale, scale)
        low = np.where(better, new_low, low)
        np.copyto(codes, trial, where=better)
    return scale, -low, bytes_from(codes.T, 0)


def fit_symmetric(
    x: np.ndarray, low: int, high: int, tries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit x = scale * code with weights x^2 and codes low..high, from several first scales.

    Args:
        x: [n, g] float32.
        tries: what the element of largest magnitude is mapped to, one first scale each.
    Returns:
        scale [n] float32, codes [n, g] uint8; scale 0 for groups without magnitude.
    """
    scale, codes = _fit(x, lambda scaled: nearest_integers(scaled, low, high), tries, False)
    return scale, bytes_from(codes, low)


def fit_nl(x: np.ndarray, tries: np.ndarray) -> np.ndarray:
    """The scale of NL for each group, as fit_symmetric: [n, g] -> [n] float32."""
    return _fit(x, lambda scaled: NL_VALUES[nearest_nl(scaled)], tries, True)[0]


def _fit(x: np.ndarray, nearest, tries: np.ndarray, table: bool) -> tuple[np.ndarray, np.ndarray]:
    extreme = largest(x)
    usable = np.abs(extreme) >= TINY
    x = np.ascontiguousarray(x.T)
    square = x * x
    cube = square * x
    best = scale = values = None
    for level in tries.astype(np.float32):
        factor = divide(level, extreme)
        if table and best is None:
            # for a table ggml's first factor is the inverse of a scale: rounded twice
            factor = divide(1, divide(extreme, level))
        trial = nearest(factor * x)
        product = square * trial
        # ggml multiplies a value of a table before the weight, a whole number after it
        sum_xv = (product * x if table else cube * trial).sum(axis=0)
        product *= trial
        sum_v2 = product.sum(axis=0)
        new_scale = divide(sum_xv, sum_v2)
        if best is None:
            best, scale, values = new_scale * sum_xv, new_scale, trial
            continue
        better = (sum_v2 > 0) & (sum_xv * sum_xv > best * sum_v2)
        best, scale = np.where(better, new_scale * sum_xv, best), np.where(better, new_scale, scale)
        np.copyto(values, trial, where=better)
    return np.where(usable, scale, np.float32(0)), values.T


def refine_symmetric(x: np.ndarray, zero: int, rounds: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Fit x = scale * code, codes -zero..zero-1, moving one code at a time while the fit improves.

    x [n, g] float32 -> scale [n] float32, codes [n, g] uint8; scale 0 for groups without magnitude.
    """
    extreme = largest(x)
    usable = np.abs(extreme) >= TINY
    x = np.ascontiguousarray(x.T)
    square = x * x
    cube = square * x
    codes = np.clip(np.rint(divide(np.float32(-zero), extreme) * x), -zero, zero - 1)
    sum_xl, sum_l2 = (cube * codes).sum(axis=0), (square * codes * codes).sum(axis=0)
    for _ in range(rounds):
        changed = False
        for i in range(len(x)):
            rest_xl = sum_xl - cube[i] * codes[i]
            rest_l2 = sum_l2 - square[i] * codes[i] * codes[i]
            code = np.clip(np.rint(divide(x[i] * rest_l2, rest_xl)), -zero, zero - 1)
            new_xl, new_l2 = rest_xl + cube[i] * code, rest_l2 + square[i] * code * code
            better = (rest_xl > 0) & (code != codes[i]) & (new_l2 > 0)
            better &= new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            codes[i] = np.where(better, code, codes[i])
            sum_xl, sum_l2 = np.where(better, new_xl, sum_xl), np.where(better, new_l2, sum_l2)
            changed |= bool(better.any())
        if not changed:
            break
    # like ggml, groups without magnitude take the lowest code; their scale makes it a zero
    codes = np.where(usable, codes, np.float32(-zero))
    return np.where(usable, divide(sum_xl, sum_l2), np.float32(0)), bytes_from(codes.T, -zero)


def round_scales(scales: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """Group scales [n, m] -> superblock scale d [n] float16, integers [n, m] in -zero..zero-1."""
    extreme = largest(scales)
    factor = divide(np.float32(-zero), extreme)
    small = np.clip(np.rint(scales * factor[:, None]), -zero, zero - 1)
    # a scale beyond float32 must be seen as one: its inverse would make it a zero
    d = np.where(np.isfinite(extreme), divide(1, factor), extreme)
    return d.astype(np.float16), small


def recode(
    x: np.ndarray,
    step: np.ndarray,
    offset: np.ndarray | None,
    codes: np.ndarray,
    low: int,
    high: int,
) -> np.ndarray:
    """The codes nearest to (x + offset) / step, the fit's where step is 0.

    x [n, g], step and offset [n] (in any shape) float32, codes [n, g] uint8 -> [n, g] uint8.
    """
    step = step.reshape(-1, 1)
    above = x if offset is None else x + offset.reshape(-1, 1)
    nearest = bytes_from(np.clip(np.rint(divide(above, step)), low, high), low)
    return np.where(step != 0, nearest, codes)
