"""Elementary functions written once, in float32 operations that every machine rounds alike.

`build(primitives)` compiles the formulas below for one user: NumPy arrays (the reference), numba on
the CPU, numba on CUDA. There is no libm underneath: a formula is a fixed sequence of IEEE float32
add, multiply, divide and fma and of 32-bit integer operations, without branches, so a loop over it
vectorizes and every user gets the same bits. Sums and products are spelled `p.add(p.mul(..), ..)`
because CUDA would contract `a * b + c` into an fma; `p.fma` is written where one is meant.

A NaN argument gives a NaN result everywhere; which NaN (sign, payload) is not part of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

_f = np.float32
_i = np.int32

LOG2E = _f(1.4426950408889634)
LN2 = _f(0.6931471805599453)
# ln 2 minus its float32 value
LN2_LOW = _f(-1.904654299957768e-09)

# adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum
ROUNDER = _f(12582912.0)
ROUNDER_BITS = _i(0x4B400000)
MANTISSA_BITS = _i(23)
EXPONENT_BIAS = _i(127)
HALF_SHIFT = _i(1)

# exp(r) = 1 + r + r^2 (EXP_2 + EXP_3 r + ...), |r| <= ln(2) / 2, relative error below 2^-28
EXP_2, EXP_3, EXP_4, EXP_5, EXP_6 = (
    _f(0.49999994),
    _f(0.1666652),
    _f(0.041668404),
    _f(0.008368862),
    _f(0.0013814198),
)
# beyond these the result is zero or infinite, and the exponent arithmetic would leave its range
EXP_LOWEST, EXP_HIGHEST = _f(-105.0), _f(89.0)

# log1p(m) = m + m^2 (LOG_2 + LOG_3 m + ...), -1/4 <= m <= 1/2, relative error below 2^-27
LOG_2, LOG_3, LOG_4, LOG_5, LOG_6, LOG_7, LOG_8, LOG_9, LOG_10 = (
    _f(-0.5),
    _f(0.33333454),
    _f(-0.25000054),
    _f(0.19990581),
    _f(-0.16647777),
    _f(0.14482464),
    _f(-0.13162632),
    _f(0.104469),
    _f(-0.044888776),
)
THREE_QUARTERS_BITS = _i(0x3F400000)
EXPONENT_MASK = _i(-0x00800000)
FOUR_BITS = _i(0x40800000)
EXPONENT_UNIT = _f(2.0**-23)

ZERO, QUARTER, ONE = _f(0.0), _f(0.25), _f(1.0)
INFINITY, NAN = _f(np.inf), _f(np.nan)
SOFTPLUS_LINEAR = _f(20.0)


class Primitives(Protocol):
    """What a user of the formulas supplies. Floats are float32, integers int32."""

    add: Callable  # (a, b) -> a + b, rounded once, never contracted
    sub: Callable  # (a, b) -> a - b
    mul: Callable  # (a, b) -> a * b
    div: Callable  # (a, b) -> a / b, correctly rounded
    fma: Callable  # (a, b, c) -> a * b + c, rounded once
    f32: Callable  # int32 -> float32, to nearest even
    i32: Callable  # any integer -> its low 32 bits as int32
    float_to_bits: Callable  # float32 -> int32
    bits_to_float: Callable  # int32 -> float32
    select: Callable  # (condition, a, b) -> a where the condition holds, else b
    compile: Callable  # function -> function callable from the user's kernels


class Functions(NamedTuple):
    """The compiled functions, each float32 -> float32."""

    exp: Callable
    log1p: Callable
    sigmoid: Callable
    silu: Callable
    softplus: Callable


def build(p: Primitives) -> Functions:
    """Compile every function for one user.

    Args:
        p: the user's primitives.
    Returns:
        Functions on float32 (scalars or arrays, as the primitives have it).
    Exact: the same bits for every user whose primitives keep their promise (NaN compares as NaN).
    """
    exp = _build_exp(p)
    log1p = _build_log1p(p)
    sigmoid, silu, softplus = _build_activations(p, exp, log1p)
    return Functions(exp, log1p, sigmoid, silu, softplus)


def _build_exp(p: Primitives) -> Callable:
    fma, add, sub, mul, i32 = p.fma, p.add, p.sub, p.mul, p.i32
    select, float_to_bits, bits_to_float = p.select, p.float_to_bits, p.bits_to_float

    @p.compile
    def exp(x):
        """e to the x. Within: 1 ulp, subnormal results included. exp(-inf) = 0, exp(inf) = inf."""
        c = select(x < EXP_LOWEST, EXP_LOWEST, x)
        c = select(c > EXP_HIGHEST, EXP_HIGHEST, c)
        t = fma(c, LOG2E, ROUNDER)
        n = sub(t, ROUNDER)
        # c - n ln 2 as an exact head and a small tail, so that only the last two additions matter
        head, tail = fma(n, -LN2, c), mul(n, -LN2_LOW)
        r = add(head, tail)
        q = fma(EXP_6, r, EXP_5)
        q = fma(q, r, EXP_4)
        q = fma(q, r, EXP_3)
        q = fma(q, r, EXP_2)
        y = add(ONE, add(head, fma(mul(r, r), q, tail)))
        # 2^n in two factors: each is a normal number, and only the second product can round
        k = i32(float_to_bits(t) - ROUNDER_BITS)
        half = i32(k >> HALF_SHIFT)
        rest = i32(k - half)
        y = mul(y, bits_to_float(i32(i32(half + EXPONENT_BIAS) << MANTISSA_BITS)))
        return mul(y, bits_to_float(i32(i32(rest + EXPONENT_BIAS) << MANTISSA_BITS)))

    return exp


def _build_log1p(p: Primitives) -> Callable:
    fma, add, mul, f32, i32 = p.fma, p.add, p.mul, p.f32, p.i32
    select, float_to_bits, bits_to_float = p.select, p.float_to_bits, p.bits_to_float

    @p.compile
    def log1p(x):
        """ln(1 + x). Within: 2 ulp. log1p(-1) = -inf, NaN below -1, inf at inf, keeps -0."""
        # 1 + x = 2^e (1 + m) with -1/4 <= m < 1/2; e is kept in the exponent's bit position
        e = i32(i32(float_to_bits(add(ONE, x)) - THREE_QUARTERS_BITS) & EXPONENT_MASK)
        # 4 * 2^-e, because 2^-e itself is subnormal at the top of the range
        s = bits_to_float(i32(FOUR_BITS - e))
        m = fma(mul(x, s), QUARTER, fma(QUARTER, s, -ONE))
        q = fma(LOG_10, m, LOG_9)
        q = fma(q, m, LOG_8)
        q = fma(q, m, LOG_7)
        q = fma(q, m, LOG_6)
        q = fma(q, m, LOG_5)
        q = fma(q, m, LOG_4)
        q = fma(q, m, LOG_3)
        q = fma(q, m, LOG_2)
        y = fma(mul(m, m), q, m)
        y = fma(mul(f32(e), EXPONENT_UNIT), LN2, y)
        y = select(x == ZERO, x, y)
        y = select(x == INFINITY, INFINITY, y)
        y = select(x == -ONE, -INFINITY, y)
        return select(x < -ONE, NAN, y)

    return log1p


def _build_activations(p: Primitives, exp: Callable, log1p: Callable) -> tuple:
    add, mul, div, select = p.add, p.mul, p.div, p.select

    @p.compile
    def sigmoid(x):
        """1 / (1 + exp(-x)). 0 at -inf (and below -88.73, where exp(-x) overflows), 1 at inf."""
        return div(ONE, add(ONE, exp(-x)))

    @p.compile
    def silu(x):
        """x sigmoid(x). -0 below -88.73. NaN at -inf: -inf times 0 is shown, not hidden."""
        return mul(x, sigmoid(x))

    @p.compile
    def softplus(x):
        """ln(1 + exp(x)), and x itself above 20, where the two differ by less than half an ulp."""
        return select(x > SOFTPLUS_LINEAR, x, log1p(exp(x)))

    return sigmoid, silu, softplus
