"""The searches of fit.py, compiled: sixteen groups of weights are the lanes of each vector.

Operation for operation those of fit.py, which is their judge: the bytes are the same. A kernel runs
on the thread that calls it, so that quantizing in chunks on many threads needs nothing else.

Scratch holds the values of sixteen groups at 0, their importance or codes at 64 g, bytes behind.
Sums start at -0.0, which leaves the first term as it is.
"""

from __future__ import annotations

import functools

import numpy as np

from pnrt import jit
from pnrt.emit import LANES
from pnrt.formats.fit import E2M1, NL_MIDDLES, NL_VALUES, TINY
from pnrt.simd import (
    add,
    both,
    differ,
    divide,
    i64_at,
    larger,
    less,
    load_f32,
    load_u8,
    mul,
    pick,
    read_f32,
    read_u8,
    root,
    set_f32,
    size,
    smaller,
    some,
    stairs,
    store_f32,
    store_u8,
    sub,
    to_f32,
    whole,
    write_f32,
    write_u8,
)

f32 = np.float32


@jit.inline
def gather(x, first, groups, g, out):
    """Up to 16 groups of x [groups, g], from `first` on, become the lanes of g vectors."""
    for lane in range(min(LANES, groups - first)):
        for i in range(g):
            write_f32(out + 64 * i + 4 * lane, read_f32(x + 4 * (g * (first + lane) + i)))


@jit.inline
def scatter(codes, out, first, groups, g):
    """The reverse for codes: g vectors of 16 bytes -> bytes [.., g] from group `first` on."""
    for lane in range(min(LANES, groups - first)):
        for i in range(g):
            write_u8(out + g * (first + lane) + i, read_u8(codes + LANES * i + lane))


@jit.inline
def clamp(x, low, high):
    """The nearest whole number within low..high."""
    return smaller(larger(whole(x), low), high)


@jit.inline
def extreme(xs, g):
    """The element of largest magnitude of each lane, the first of equals."""
    out = load_f32(xs)
    for i in range(1, g):
        x = load_f32(xs + 64 * i)
        out = pick(less(size(out), size(x)), x, out)
    return out


@functools.cache
def affine_kernel(top: int, absolute: bool) -> jit.Kernel:
    """fit.fit_affine. Arguments: x, scale, low, codes, scratch, tries, their count, groups, g."""

    @jit.inline
    def error(code, scale, low, x, weight):
        left = sub(add(mul(code, scale), low), x)
        return mul(size(left) if absolute else mul(left, left), weight)

    def kernel(a, thread, threads):
        args = i64_at(a)
        x_in, scale_out, low_out, codes_out, xs = args[0], args[1], args[2], args[3], args[4]
        tries, count, groups, g = args[5], args[6], args[7], args[8]
        ws = xs + 64 * g
        packed = ws + 64 * g
        zero, nothing, most_code = set_f32(f32(0)), set_f32(f32(-0.0)), set_f32(f32(top))
        for first in range(0, groups, LANES):
            gather(x_in, first, groups, g, xs)
            low = high = load_f32(xs)
            square = mul(low, low)
            for i in range(1, g):
                x = load_f32(xs + 64 * i)
                low, high = smaller(low, x), larger(high, x)
                square = add(square, mul(x, x))
            low = smaller(low, zero)
            mean = root(divide(square, set_f32(f32(g))))
            for i in range(g):
                weight = size(load_f32(xs + 64 * i))
                store_f32(ws + 64 * i, weight if absolute else add(mean, weight))
            wide = differ(high, low)
            factor = divide(most_code, sub(high, low))
            base, best_factor = low, factor
            scale = divide(set_f32(f32(1)), factor)
            best = sum_w = sum_x = nothing
            for i in range(g):
                x, w = load_f32(xs + 64 * i), load_f32(ws + 64 * i)
                code = clamp(mul(sub(x, low), factor), zero, most_code)
                best = add(best, error(code, scale, low, x, w))
                sum_w = add(sum_w, w)
                sum_x = add(sum_x, mul(w, x))
            for t in range(count):
                factor = divide(set_f32(read_f32(tries + 4 * t)), sub(high, low))
                sum_l = sum_l2 = sum_xl = nothing
                for i in range(g):
                    x, w = load_f32(xs + 64 * i), load_f32(ws + 64 * i)
                    code = clamp(mul(sub(x, low), factor), zero, most_code)
                    weighted = mul(w, code)
                    sum_l = add(sum_l, weighted)
                    sum_l2 = add(sum_l2, mul(weighted, code))
                    sum_xl = add(sum_xl, mul(weighted, x))
                determinant = sub(mul(sum_w, sum_l2), mul(sum_l, sum_l))
                new_scale = sub(mul(sum_w, sum_xl), mul(sum_x, sum_l))
                new_scale = divide(new_scale, determinant)
                new_low = sub(mul(sum_l2, sum_x), mul(sum_l, sum_xl))
                new_low = divide(new_low, determinant)
                # a positive minimum cannot be stored: fit the scale alone
                new_scale = pick(less(zero, new_low), divide(sum_xl, sum_l2), new_scale)
                new_low = smaller(new_low, zero)
                new_error = nothing
                for i in range(g):
                    x, w = load_f32(xs + 64 * i), load_f32(ws + 64 * i)
                    code = clamp(mul(sub(x, low), factor), zero, most_code)
                    new_error = add(new_error, error(code, new_scale, new_low, x, w))
                better = both(both(less(zero, determinant), less(new_error, best)), wide)
                best, scale = pick(better, new_error, best), pick(better, new_scale, scale)
                best_factor, base = pick(better, factor, best_factor), pick(better, low, base)
                low = pick(better, new_low, low)
            for i in range(g):
                code = clamp(mul(sub(load_f32(xs + 64 * i), base), best_factor), zero, most_code)
                store_u8(packed + LANES * i, code)
            scatter(packed, codes_out, first, groups, g)
            store_f32(scale_out + 4 * first, scale)
            store_f32(low_out + 4 * first, low)

    return jit.kernel(kernel, name=f"formats.affine_{top}_{int(absolute)}")


@functools.cache
def symmetric_kernel(low: int, high: int) -> jit.Kernel:
    """fit.fit_symmetric with whole numbers, or with the values of iq4_nl where low is high.

    Arguments: x, scale, codes, scratch, tries, their count, groups, g. Codes are counted from
    `low`; there are none for iq4_nl.
    """
    table = low == high
    value_of = stairs(NL_MIDDLES, NL_VALUES)

    @jit.inline
    def nearest(x):
        if not table:
            return clamp(x, set_f32(f32(low)), set_f32(f32(high)))
        # NaN, from a zero times infinity, counts as zero
        return value_of(pick(differ(x, x), set_f32(f32(0)), x))

    def kernel(a, thread, threads):
        args = i64_at(a)
        x_in, scale_out, codes_out, xs = args[0], args[1], args[2], args[3]
        tries, count, groups, g = args[4], args[5], args[6], args[7]
        packed = xs + 64 * g
        zero, nothing = set_f32(f32(0)), set_f32(f32(-0.0))
        for first in range(0, groups, LANES):
            gather(x_in, first, groups, g, xs)
            largest = extreme(xs, g)
            best = scale = chosen = zero
            for t in range(count):
                level = set_f32(read_f32(tries + 4 * t))
                factor = divide(level, largest)
                if table and t == 0:
                    factor = divide(set_f32(f32(1)), divide(largest, level))
                sum_xv = sum_v2 = nothing
                for i in range(g):
                    x = load_f32(xs + 64 * i)
                    value = nearest(mul(factor, x))
                    square = mul(x, x)
                    weighted = mul(square, value)
                    one = mul(weighted, x) if table else mul(mul(square, x), value)
                    sum_xv = add(sum_xv, one)
                    sum_v2 = add(sum_v2, mul(weighted, value))
                new_scale = divide(sum_xv, sum_v2)
                score = mul(new_scale, sum_xv)
                if t == 0:
                    best, scale, chosen = score, new_scale, factor
                else:
                    better = less(mul(best, sum_v2), mul(sum_xv, sum_xv))
                    better = both(better, less(zero, sum_v2))
                    best, scale = pick(better, score, best), pick(better, new_scale, scale)
                    chosen = pick(better, factor, chosen)
            tiny = less(size(largest), set_f32(TINY))
            store_f32(scale_out + 4 * first, pick(tiny, zero, scale))
            if not table:
                for i in range(g):
                    code = nearest(mul(chosen, load_f32(xs + 64 * i)))
                    store_u8(packed + LANES * i, sub(code, set_f32(f32(low))))
                scatter(packed, codes_out, first, groups, g)

    name = "formats.symmetric_nl" if table else f"formats.symmetric_{-low}_{high}"
    return jit.kernel(kernel, name=name)


@functools.cache
def refine_kernel(zero_code: int) -> jit.Kernel:
    """fit.refine_symmetric. Arguments: x, scale, codes, scratch, rounds, groups, g."""

    def kernel(a, thread, threads):
        args = i64_at(a)
        x_in, scale_out, codes_out, xs = args[0], args[1], args[2], args[3]
        rounds, groups, g = args[4], args[5], args[6]
        codes = xs + 64 * g
        packed = codes + 64 * g
        zero, nothing = set_f32(f32(0)), set_f32(f32(-0.0))
        low = set_f32(f32(-zero_code))
        high = set_f32(f32(zero_code - 1))
        for first in range(0, groups, LANES):
            gather(x_in, first, groups, g, xs)
            largest = extreme(xs, g)
            factor = divide(low, largest)
            sum_xl = sum_l2 = nothing
            for i in range(g):
                x = load_f32(xs + 64 * i)
                code, square = clamp(mul(factor, x), low, high), mul(x, x)
                store_f32(codes + 64 * i, code)
                sum_xl = add(sum_xl, mul(mul(square, x), code))
                sum_l2 = add(sum_l2, mul(mul(square, code), code))
            for _ in range(rounds):
                changed = False
                for i in range(g):
                    x, old = load_f32(xs + 64 * i), load_f32(codes + 64 * i)
                    square = mul(x, x)
                    cube = mul(square, x)
                    rest_xl = sub(sum_xl, mul(cube, old))
                    rest_l2 = sub(sum_l2, mul(mul(square, old), old))
                    code = clamp(divide(mul(x, rest_l2), rest_xl), low, high)
                    new_xl = add(rest_xl, mul(cube, code))
                    new_l2 = add(rest_l2, mul(mul(square, code), code))
                    better = both(less(zero, rest_xl), differ(code, old))
                    better = both(better, less(zero, new_l2))
                    ours = mul(mul(new_xl, new_xl), sum_l2)
                    better = both(better, less(mul(mul(sum_xl, sum_xl), new_l2), ours))
                    if some(better):
                        changed = True
                        store_f32(codes + 64 * i, pick(better, code, old))
                        sum_xl, sum_l2 = pick(better, new_xl, sum_xl), pick(better, new_l2, sum_l2)
                if not changed:
                    break
            tiny = less(size(largest), set_f32(TINY))
            store_f32(scale_out + 4 * first, pick(tiny, zero, divide(sum_xl, sum_l2)))
            for i in range(g):
                code = sub(pick(tiny, low, load_f32(codes + 64 * i)), low)
                store_u8(packed + LANES * i, code)
            scatter(packed, codes_out, first, groups, g)

    return jit.kernel(kernel, name=f"formats.refine_{zero_code}")


@functools.cache
def recode_kernel(low: int, high: int) -> jit.Kernel:
    """fit.recode. Arguments: x, step, offset, codes (replaced), groups, g; codes from `low`."""

    def kernel(a, thread, threads):
        args = i64_at(a)
        x_in, steps, offsets, codes = args[0], args[1], args[2], args[3]
        groups, g = args[4], args[5]
        least_code, most_code = set_f32(f32(low)), set_f32(f32(high))
        for group in range(groups):
            step = set_f32(read_f32(steps + 4 * group))
            offset = set_f32(read_f32(offsets + 4 * group))
            keep = differ(step, set_f32(f32(0)))
            for i in range(g * group, g * (group + 1), LANES):
                x = add(load_f32(x_in + 4 * i), offset)
                code = sub(clamp(divide(x, step), least_code, most_code), least_code)
                store_u8(codes + i, pick(keep, code, to_f32(load_u8(codes + i))))

    return jit.kernel(kernel, name=f"formats.recode_{-low}_{high}")


@functools.cache
def nl_kernel() -> jit.Kernel:
    """fit.nl_codes. Arguments: x, factor, codes, groups, g."""
    code_of = stairs(NL_MIDDLES, range(len(NL_VALUES)))

    def kernel(a, thread, threads):
        args = i64_at(a)
        x_in, factors, codes, groups, g = args[0], args[1], args[2], args[3], args[4]
        zero = set_f32(f32(0))
        for group in range(groups):
            factor = set_f32(read_f32(factors + 4 * group))
            for i in range(g * group, g * (group + 1), LANES):
                x = mul(load_f32(x_in + 4 * i), factor)
                store_u8(codes + i, code_of(pick(differ(x, x), zero, x)))

    return jit.kernel(kernel, name="formats.nl_codes")


@functools.cache
def e2m1_kernel() -> jit.Kernel:
    """fit.nearest_e2m1. Arguments: x, unit, codes, E2M1 as float32, groups, g."""

    def kernel(a, thread, threads):
        args = i64_at(a)
        x_in, units, codes, values, groups, g = args[0], args[1], args[2], args[3], args[4], args[5]
        zero = set_f32(f32(0))
        for group in range(groups):
            unit = set_f32(read_f32(units + 4 * group))
            for i in range(g * group, g * (group + 1), LANES):
                x, code = load_f32(x_in + 4 * i), zero
                magnitude = best = size(x)
                for candidate in range(1, 8):
                    value = mul(set_f32(read_f32(values + 4 * candidate)), unit)
                    distance = size(sub(value, magnitude))
                    nearer = less(distance, best)
                    code = pick(nearer, set_f32(f32(candidate)), code)
                    best = pick(nearer, distance, best)
                negative = both(less(x, zero), less(zero, code))
                store_u8(codes + i, pick(negative, add(code, set_f32(f32(8))), code))

    return jit.kernel(kernel, name="formats.nearest_e2m1")


def _room(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales (whole vectors), codes and scratch for groups [n, g]."""
    groups, g = x.shape
    scales = np.empty(-(-groups // LANES) * LANES, np.float32)
    # lanes without a group hold numbers, whichever
    return scales, np.empty((groups, g), np.uint8), np.zeros(160 * g, np.uint8)


def fit_affine(x, top, tries, absolute):
    """See fit.fit_affine."""
    scale, codes, scratch = _room(x)
    low = np.empty_like(scale)
    tries = np.ascontiguousarray(tries, np.float32)
    kernel = affine_kernel(top, absolute)
    jit.call(kernel, x, scale, low, codes, scratch, tries, len(tries), *x.shape)
    return scale[: len(x)], -low[: len(x)], codes


def fit_symmetric(x, low, high, tries):
    """See fit.fit_symmetric."""
    scale, codes, scratch = _room(x)
    tries = np.ascontiguousarray(tries, np.float32)
    jit.call(symmetric_kernel(low, high), x, scale, codes, scratch, tries, len(tries), *x.shape)
    return scale[: len(x)], codes


def fit_nl(x, tries):
    """See fit.fit_nl."""
    return fit_symmetric(x, 0, 0, tries)[0]


def nl_codes(x, factor):
    """See fit.nl_codes."""
    codes = np.empty(x.shape, np.uint8)
    factor = np.ascontiguousarray(factor.reshape(-1), np.float32)
    jit.call(nl_kernel(), x, factor, codes, *x.shape)
    return codes


def nearest_e2m1(x, unit):
    """See fit.nearest_e2m1."""
    codes = np.empty(x.shape, np.uint8)
    jit.call(e2m1_kernel(), x, unit, codes, E2M1.astype(np.float32), *x.shape)
    return codes


def refine_symmetric(x, zero, rounds=5):
    """See fit.refine_symmetric."""
    scale, codes, scratch = _room(x)
    jit.call(refine_kernel(zero), x, scale, codes, scratch, rounds, *x.shape)
    return scale[: len(x)], codes


def recode(x, step, offset, codes, low, high):
    """See fit.recode."""
    step = np.ascontiguousarray(step.reshape(-1), np.float32)
    offset = np.zeros_like(step) if offset is None else np.ascontiguousarray(offset.reshape(-1))
    codes = np.ascontiguousarray(codes)
    jit.call(recode_kernel(low, high), x, step, offset, codes, *x.shape)
    return codes
