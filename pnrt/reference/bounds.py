"""How far an op in the contract's order may be from the truth: derived from its roundings.

Names and arguments are those of the ops in `pnrt.reference`; results are float64, one per output.
gamma(m) = m u / (1 - m u) with u = 2^-24 bounds m roundings in a row; besides that, each operation
that can underflow may lose half the smallest subnormal. A bound is infinite where a value on the
way leaves float32: nothing is promised there. The product's bound is `exact.bound`.
"""

from __future__ import annotations

import numpy as np

from pnrt.reference import exact, product
from pnrt.reference.exact import BUTTERFLY_STEPS, UNIT_ROUNDOFF
from pnrt.reference.ops import ATTENTION_BLOCK

f64 = np.float64
U = UNIT_ROUNDOFF
LOST = exact.SMALLEST_ERROR
# the largest magnitude that rounding cannot turn into infinity, with room for the bound itself
LARGEST = 2.0**127


def gamma(m) -> np.ndarray:
    """The relative error m roundings can add up to."""
    return m * U / (1 - m * U)


def _inside(error, *values) -> np.ndarray:
    """error, but infinite where one of the values (or the error itself) leaves float32."""
    good = np.isfinite(error)
    for value in values:
        good = good & (np.abs(value) < LARGEST)
    return np.where(good, error, np.inf)


def _lane_steps(n: int) -> int:
    return -(-n // product.LANES) + BUTTERFLY_STEPS


def embedding(format: str, rows, tokens) -> np.ndarray:
    """Decoding is exact: 0."""
    return np.zeros((len(tokens), 1))


def quantize_q8_0(x) -> np.ndarray:
    """|x - dx q|: half a step, and what rounding d, 1 / d, x / d and dx to a half can add.

    The codes reach 127, so a relative error of dx counts 127 times; below 2^-14 dx is subnormal,
    and where it is zero the whole value is lost.
    """
    x = np.asarray(x, f64)
    padded = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % 32)))
    top = np.repeat(padded.reshape(len(x), -1, 32).max(-1), 32, axis=1)[:, : x.shape[1]]
    d = top / 127
    # dx is d to 11 bits, or to half of 2^-24; the code is within 1/2 + 127 * gamma(3) of x / d
    step = np.maximum(d * 2.0**-11, 2.0**-25) + d * U
    return np.where(d > 2.0**-126, (0.5 + 127 * gamma(3)) * d + 127.5 * step, top)


def add(a, b) -> np.ndarray:
    """One rounding; a sum never underflows."""
    total = exact.add(a, b)
    return _inside(U * np.abs(total), total)


def multiply(a, b) -> np.ndarray:
    """One rounding."""
    y = exact.multiply(a, b)
    return _inside(U * np.abs(y) + LOST, y)


def _norm(x, total, n: int, w, fixed: int) -> np.ndarray:
    """x / sqrt(total) * w: the sum's roundings and `fixed` more; squares may underflow."""
    with np.errstate(all="ignore"):
        relative = gamma(_lane_steps(n) + fixed) + 2 * n * LOST / total
        y = np.asarray(x, f64) / np.sqrt(total)[..., None] * w
    return _inside(relative[..., None] * np.abs(y) + LOST * (np.abs(w) + 1), total[..., None], y)


def rms_norm(x, w, eps: float) -> np.ndarray:
    """The lane sum; division, eps (rounded itself), their sum; root, reciprocal, two products."""
    x = np.asarray(x, f64)
    n = x.shape[-1]
    total = (x * x).sum(-1) + n * eps
    return _norm(x * np.sqrt(n), total, n, np.asarray(w, f64), 3 + 4)


def l2_norm(x, eps: float) -> np.ndarray:
    """The lane sum; eps (rounded itself) and its sum; root, reciprocal, product."""
    x = np.asarray(x, f64)
    return _norm(x, (x * x).sum(-1) + eps, x.shape[-1], 1.0, 2 + 3)


def rope(x, cos, sin, neox: bool) -> np.ndarray:
    """A product and an fma per component; what passes through is exact."""
    x, cos, sin = (np.abs(np.asarray(a, f64)) for a in (x, cos, sin))
    # the sum of both magnitudes: the same turn by (cos, -sin) for one half and (cos, sin) otherwise
    magnitude = np.maximum(np.abs(exact.rope(x, cos, sin, neox)), exact.rope(x, cos, -sin, neox))
    error = gamma(2) * magnitude + 2 * LOST
    turned = np.arange(x.shape[-1]) < 2 * cos.shape[-1]
    return _inside(np.where(turned, error, 0.0), magnitude)


def hadamard(x, block: int, signs=None) -> np.ndarray:
    """log2(block) additions, the rounded factor and the product."""
    x = np.abs(np.asarray(x, f64))
    total = np.repeat(x.reshape(*x.shape[:-1], -1, block).sum(-1), block, axis=-1)
    steps = int(np.log2(block)) + 2
    return _inside(gamma(steps) * total / np.sqrt(block) + LOST, total)


def sigmoid(x) -> np.ndarray:
    """exp (1 ulp is at most 2 u), the sum, the division; 0 where exp(-x) overflows."""
    return gamma(4) * exact.sigmoid(x) + np.where(np.asarray(x) < -88, 2.0**-127, 0.0) + LOST


def _gated(x, gate, factors: int) -> np.ndarray:
    x, gate = np.abs(np.asarray(x, f64)), np.asarray(gate, f64)
    with np.errstate(over="ignore"):
        y = x * exact.sigmoid(gate)
        return _inside(x * sigmoid(gate) + gamma(factors + 4) * y + LOST * (x + 1), y)


def silu(x) -> np.ndarray:
    """A sigmoid and a product."""
    return _gated(x, x, 1)


def swiglu(gate, up) -> np.ndarray:
    """A sigmoid and two products."""
    gate = np.asarray(gate, f64)
    with np.errstate(over="ignore"):
        return _gated(gate * np.asarray(up, f64), gate, 2) + LOST * np.abs(up)


def sigmoid_gate(x, gate) -> np.ndarray:
    """A sigmoid and a product."""
    return _gated(x, gate, 1)


def _softmax_parts(scores, error, seen=None) -> tuple[np.ndarray, ...]:
    """p, its error, the denominator and its error, for scores that are off by up to `error`."""
    with np.errstate(over="ignore"):
        p, total = exact.softmax_pieces(scores, seen)
        visible = np.where(True if seen is None else seen, scores, -np.inf)
        distance = visible.max(-1, keepdims=True) - scores
        shift = error + np.max(np.where(p > 0, error, 0), -1, keepdims=True) + U * np.abs(distance)
        # exp is within one ulp, which is at most 2 u or the smallest subnormal
        dp = p * (np.expm1(shift) * (1 + 2 * U) + 2 * U) + 2 * LOST
    dp = np.where(np.isneginf(visible), 0.0, dp)
    return p, dp, total, dp.sum(-1) + gamma(_lane_steps(p.shape[-1])) * (p + dp).sum(-1)


def softmax(scores) -> np.ndarray:
    """Difference, exp, lane sum, division."""
    scores = np.asarray(scores, f64)
    p, dp, total, dt = _softmax_parts(scores, np.zeros_like(scores))
    total, dt = total[..., None], dt[..., None]
    y = p / total
    return _inside((dp + y * dt) / np.maximum(total - dt, LOST) + U * y + LOST)


def attention(q, k, v, start: int, scale: float) -> np.ndarray:
    """Chain of E fma and the scale; softmax; chains of 256 positions, their sum; division."""
    q, k, v = (np.asarray(a, f64) for a in (q, k, v))
    shared, width = q.shape[1] // k.shape[1], q.shape[2]
    k, v = np.repeat(k, shared, axis=1), np.abs(np.repeat(v, shared, axis=1))
    seen = (np.arange(len(k)) <= start + np.arange(len(q))[:, None])[:, None]
    scores = np.einsum("thd,phd->thp", q, k) * scale
    size = np.einsum("thd,phd->thp", np.abs(q), np.abs(k)) * abs(scale)
    error = gamma(width + 2) * size + width * LOST * abs(scale) + LOST
    p, dp, total, dt = _softmax_parts(scores, error, seen)
    steps = min(len(k), ATTENTION_BLOCK) + -(-len(k) // ATTENTION_BLOCK)
    sums = np.einsum("thp,phd->thd", p, v)
    ds = np.einsum("thp,phd->thd", dp, v) * (1 + gamma(steps)) + gamma(steps) * sums
    total, dt = total[..., None], dt[..., None]
    y = sums / total
    lost = len(k) * LOST
    error = (ds + lost + y * dt) / np.maximum(total - dt, LOST) + U * y + LOST
    return _inside(error, np.max(size, -1)[..., None], sums)


def conv(x, w, state) -> np.ndarray:
    """A chain of fma over the taps (the next state is exact)."""
    taps = np.shape(w)[1]
    size = exact.conv(*(np.abs(np.asarray(a, f64)) for a in (x, w, state)))[0]
    return _inside(gamma(taps) * size + taps * LOST, size)


def decay(a, alpha, dt) -> np.ndarray:
    """Sum, exp, log1p (2 ulp), product, exp; the product's error is the last one's argument's."""
    a = np.asarray(a, f64)
    inner = np.asarray(alpha, f64) + np.asarray(dt, f64)
    # softplus has slope at most 1; above 20 it is the identity and off by less than 2^-28
    soft = exact.softplus(inner)
    error = U * np.abs(inner) + gamma(8) * soft + np.where(inner > 20, 2.0**-28, 0.0) + 4 * LOST
    argument = np.abs(a) * error + U * np.abs(a * soft) + LOST
    with np.errstate(over="ignore"):
        y = np.exp(a * soft)
        return _inside(y * (np.expm1(argument) * (1 + 2 * U) + 2 * U) + 2 * LOST, inner, y)


def delta_step(state, error, q, k, v, g, beta) -> tuple[np.ndarray, np.ndarray]:
    """How far o [H, E] and each column of the new state may be off.

    Element by element the errors of a recurrence could only grow. But the step multiplies a column
    by g (1 - beta k k'), whose norm is max(1, |1 - beta |k|^2|) g: the 2-norm of a column's error
    shrinks with it, and only the step's own roundings are added.

    Args:
        state: the exact state; error: [H, E], 2-norms of its columns' errors so far.
    """
    state, error, q, k, v, g, beta = (np.asarray(a, f64) for a in (state, error, q, k, v, g, beta))
    n, wide, beta = k.shape[1], g[:, None, None], beta[:, None]

    def chain(s, slack, x):
        """A chain over the keys: its roundings, of terms no larger than |s| + slack allows."""
        size = np.einsum("hij,hi->hj", np.abs(s) + slack, np.abs(x))
        return gamma(n) * size + n * LOST

    s, carried = state * wide, error * np.abs(g)[:, None]
    slack = carried[:, None]
    rounded = U * (np.abs(s) + slack) + LOST
    du = chain(s, slack, k) + np.einsum("hij,hi->hj", rounded, np.abs(k))
    rest = v - np.einsum("hij,hi->hj", s, k)
    size = np.abs(rest) + carried * np.linalg.norm(k, axis=1)[:, None] + du
    de = (du + U * size) * np.abs(beta) * (1 + U) + U * size * np.abs(beta) + LOST
    s = s + k[:, :, None] * (rest * beta)[:, None]
    grown = np.abs(k)[:, :, None] * (size * np.abs(beta) + de)[:, None]
    local = rounded + np.abs(k)[:, :, None] * de[:, None] + U * (np.abs(s) + slack + grown) + LOST
    keeps = np.maximum(1, np.abs(1 - beta * (k * k).sum(1)[:, None]))
    after = carried * keeps + np.linalg.norm(local, axis=1)
    do = chain(s, after[:, None], q) + np.linalg.norm(q, axis=1)[:, None] * after
    return _inside(do, do), _inside(after, np.abs(s).max(1))
