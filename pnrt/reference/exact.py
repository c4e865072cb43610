"""The second judge: what each op means, in float64, with no order and no rounding to speak of.

Names and arguments are those of the ops in `pnrt.reference`; results are float64. `bound` says how
far a product in the contract's order may be from the truth, from its own count of roundings.
"""

from __future__ import annotations

import numpy as np

from pnrt.formats import FORMATS
from pnrt.reference import product

f64 = np.float64
UNIT_ROUNDOFF = 2.0**-24
SMALLEST_ERROR = 2.0**-150  # of one rounding in the subnormal range
BUTTERFLY_STEPS = 5


def _terms(format: str, rows, x, activations: str) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The product exactly, the sum of its terms' magnitudes, roundings and fma steps on a path."""
    fmt = FORMATS[format]
    rows, x = np.asarray(rows, np.uint8), np.asarray(x, np.float32)
    columns = fmt.columns(rows.shape[1])
    rounds = -(-columns // (fmt.unit * product.LANES))
    if activations == "f32" or fmt.group == 0:
        w, x = fmt.decode(rows).astype(f64), x.astype(f64)
        steps = rounds * fmt.unit
        return x @ w.T, abs(x) @ abs(w).T, steps + BUTTERFLY_STEPS, steps
    q, dx = (a.astype(f64) for a in product.quantize_q8_0(x))
    codes, dw, offset = fmt.parts(rows)
    group = fmt.group
    runs = product.segments(fmt.unit, group)
    total = magnitude = 0.0
    for first in range(0, columns, fmt.unit):
        for start, stop in runs:
            k = slice(first + start, min(first + stop, columns))
            if k.start >= columns:
                continue
            scale = dx[:, k.start // product.Q8_BLOCK, None]
            term = scale * dw[:, k.start // group].astype(f64) * (q[:, k] @ codes[:, k].T)
            total, magnitude = total + term, magnitude + abs(term)
            if offset is not None:
                sums = q[:, k].sum(1, keepdims=True)
                term = scale * offset[:, k.start // group].astype(f64) * sums
                total, magnitude = total + term, magnitude + abs(term)
    steps = rounds * len(runs) * (1 if offset is None else 2)
    # besides the fma steps and the butterfly, a term is rounded in float32(I) and in dw * dx
    return total, magnitude, steps + BUTTERFLY_STEPS + 2, steps


def matmul(format: str, rows, x, activations: str = "q8_0") -> np.ndarray:
    """The product of the format's own scales and codes with x (quantized, for "q8_0"): [T, N]."""
    return _terms(format, rows, x, activations)[0]


def bound(format: str, rows, x, activations: str = "q8_0") -> np.ndarray:
    """The most that matmul in the contract's order can differ from the exact product: [T, N].

    gamma(m) times the sum of |term|, m the roundings on the longest path, gamma(m) = m u / (1 - m
    u), u = 2^-24; plus half the smallest subnormal for each fma, and for each rounded scale times
    its integer sum (below 2^31).
    """
    _, magnitude, m, steps = _terms(format, rows, x, activations)
    gamma = m * UNIT_ROUNDOFF / (1 - m * UNIT_ROUNDOFF)
    fmas = steps * product.LANES
    scales = 0 if activations == "f32" else fmas * 2.0**31
    return gamma * magnitude + (fmas + scales) * SMALLEST_ERROR


def embedding(format: str, rows, tokens) -> np.ndarray:
    """Decoded rows [T, K]."""
    return FORMATS[format].decode(np.asarray(rows)[np.asarray(tokens)]).astype(f64)


def fma(a, b, c) -> np.ndarray:
    """a * b + c (the product of two float32 is exact, the sum is rounded to float64)."""
    return np.asarray(a, f64) * np.asarray(b, f64) + np.asarray(c, f64)


def lane_sum(x, squares: bool = False) -> np.ndarray:
    """Sum, or sum of squares, over the last axis."""
    x = np.asarray(x, f64)
    return (x * x if squares else x).sum(-1)


def exp(x) -> np.ndarray:
    """e to the x."""
    return np.exp(np.asarray(x, f64))


def log1p(x) -> np.ndarray:
    """ln(1 + x)."""
    return np.log1p(np.asarray(x, f64))


def sigmoid(x) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-np.asarray(x, f64)))


def silu(x) -> np.ndarray:
    """x sigmoid(x)."""
    return np.asarray(x, f64) * sigmoid(x)


def softplus(x) -> np.ndarray:
    """ln(1 + exp(x)), without overflow."""
    return np.logaddexp(0, np.asarray(x, f64))


def rms_norm(x, w, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * w over the last axis."""
    x = np.asarray(x, f64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(w, f64)


def l2_norm(x, eps: float) -> np.ndarray:
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    x = np.asarray(x, f64)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def rope(x, cos, sin, neox: bool) -> np.ndarray:
    """Pairs as complex numbers, turned: (x0 + i x1)(cos + i sin)."""
    out = np.array(x, f64)
    half = np.shape(cos)[-1]
    turn = (np.asarray(cos, f64) + 1j * np.asarray(sin, f64))[:, None, :]
    part = out[..., : 2 * half]
    pairs = part.reshape(*part.shape[:-1], 2, half) if neox else None
    x0, x1 = (pairs[..., 0, :], pairs[..., 1, :]) if neox else (part[..., 0::2], part[..., 1::2])
    z = (x0 + 1j * x1) * turn
    stacked = np.stack([z.real, z.imag], axis=-2 if neox else -1)
    out[..., : 2 * half] = stacked.reshape(part.shape)
    return out


def hadamard(x, block: int, signs=None, inverse: bool = False) -> np.ndarray:
    """Blocks times the matrix (-1)^popcount(i & j) / sqrt(block), after (or before) the signs."""
    signs = 1 if signs is None else np.asarray(signs, f64)
    x = np.asarray(x, f64) * (1 if inverse else signs)
    i = np.arange(block)
    matrix = 1.0 - 2.0 * (np.bitwise_count(i[:, None] & i) & 1)
    x = (x.reshape(-1, block) @ matrix / np.sqrt(block)).reshape(x.shape)
    return x * signs if inverse else x


def add(a, b) -> np.ndarray:
    """a + b."""
    return np.asarray(a, f64) + np.asarray(b, f64)


def multiply(a, b) -> np.ndarray:
    """a * b."""
    return np.asarray(a, f64) * np.asarray(b, f64)


def swiglu(gate, up) -> np.ndarray:
    """silu(gate) * up."""
    return silu(gate) * np.asarray(up, f64)


def sigmoid_gate(x, gate) -> np.ndarray:
    """x * sigmoid(gate)."""
    return np.asarray(x, f64) * sigmoid(gate)


def softmax_pieces(scores, seen=None) -> tuple[np.ndarray, np.ndarray]:
    """exp(score - max), 0 where not seen, and its sum over the last axis."""
    scores = np.where(True if seen is None else seen, np.asarray(scores, f64), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p, p.sum(-1)


def softmax(scores) -> np.ndarray:
    """Softmax over the last axis."""
    p, denominator = softmax_pieces(scores)
    return p / denominator[..., None]


def attention(q, k, v, start: int, scale: float) -> np.ndarray:
    """Causal attention, heads [T, H, E] over [P, G, E]."""
    q, k, v = (np.asarray(a, f64) for a in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    seen = np.arange(len(k)) <= start + np.arange(len(q))[:, None]
    p, denominator = softmax_pieces(np.einsum("thd,phd->thp", q, k) * scale, seen[:, None])
    return np.einsum("thp,phd->thd", p, v) / denominator[..., None]


def conv(x, w, state) -> tuple[np.ndarray, np.ndarray]:
    """Causal convolution per channel and the next state."""
    w = np.asarray(w, f64)
    window = np.concatenate([np.asarray(state, f64), np.asarray(x, f64)])
    count = len(x)
    y = sum(w[:, j] * window[j : j + count] for j in range(w.shape[1]))
    return y, window[count:]


def decay(a, alpha, dt) -> np.ndarray:
    """exp(a * softplus(alpha + dt))."""
    return np.exp(np.asarray(a, f64) * softplus(np.asarray(alpha, f64) + np.asarray(dt, f64)))


def delta_step(state, q, k, v, g, beta) -> tuple[np.ndarray, np.ndarray]:
    """One token of the gated delta rule: o [H, E] and the new state [H, E, E]."""
    state, q, k, v, g, beta = (np.asarray(a, f64) for a in (state, q, k, v, g, beta))
    state = state * g[:, None, None]
    e = (v - np.einsum("hij,hi->hj", state, k)) * beta[:, None]
    state = state + k[:, :, None] * e[:, None, :]
    return np.einsum("hij,hi->hj", state, q), state
