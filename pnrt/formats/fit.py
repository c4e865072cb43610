"""Searches for the scales of ggml's formats: vectorized over groups, a group per column.

They are ggml's: float32, one rounding per operation, sums from the first weight to the last, so
that they choose what ggml chooses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pnrt.formats.base import largest

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


def affine_levels(top: int, start: float, count: int) -> np.ndarray:
    """Levels a range is divided into: top + start, then steps of 0.1, in float32."""
    steps = np.float32(0.1) * np.arange(count, dtype=np.float32)
    return np.float32(start) + steps + np.float32(top)


def fit_affine(
    x: np.ndarray, weights: np.ndarray, top: int, tries: np.ndarray, absolute: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit x = scale * code - low with codes 0..top and low >= 0.

    Args:
        x, weights: [n, g] float32 – values and their importance.
        tries: levels (fractional) the range is divided into before each least-squares refinement.
        absolute: compare weighted absolute errors, not squared ones.
    Returns:
        scale [n], low [n], codes [n, g] float32.
    """
    # groups become columns: sums over a group then run from its first weight to its last, as ggml's
    x, weights = np.ascontiguousarray(x.T), np.ascontiguousarray(weights.T)
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
    return scale, -low, codes.T


def fit_symmetric(
    x: np.ndarray, nearest: Callable[[np.ndarray], np.ndarray], tries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit x = scale * value with weights x^2, from several first scales.

    Args:
        x: [n, g] float32.
        nearest: float32 array (may be overwritten) -> the nearest values that can be stored.
        tries: what the element of largest magnitude is mapped to, one first scale each.
    Returns:
        scale [n], values [n, g] float32; scale 0 for groups without magnitude.
    """
    extreme = largest(x)
    usable = np.abs(extreme) >= TINY
    x = np.ascontiguousarray(x.T)
    square = x * x
    cube = square * x
    best = scale = values = None
    for level in tries.astype(np.float32):
        trial = nearest(divide(level, extreme) * x)
        sum_xv, product = (cube * trial).sum(axis=0), square * trial
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

    x [n, g] float32 -> scale [n], codes [n, g] float32; scale 0 for groups without magnitude.
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
    return np.where(usable, divide(sum_xl, sum_l2), np.float32(0)), codes.T


def round_scales(scales: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """Group scales [n, m] -> superblock scale d [n] float16, integers [n, m] in -zero..zero-1."""
    factor = divide(np.float32(-zero), largest(scales))
    small = np.clip(np.rint(scales * factor[:, None]), -zero, zero - 1)
    return divide(1, factor).astype(np.float16), small


def recode(x: np.ndarray, step: np.ndarray, codes: np.ndarray, low: int, high: int) -> np.ndarray:
    """The codes nearest to x / step (the fit's where step is 0): [n, m, g], [n, m] -> [n, m, g]."""
    nearest = np.clip(np.rint(divide(x, step[:, :, None])), low, high)
    return np.where(step[:, :, None] != 0, nearest, codes)
