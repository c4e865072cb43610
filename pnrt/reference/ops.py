"""Every op that is not a product: norms, rotations, attention, the gated delta rule."""

from __future__ import annotations

import numpy as np

from pnrt.errors import FormatError
from pnrt.reference.arithmetic import exp, f32, fma, lane_sum, quiet, sigmoid, silu, softplus

ATTENTION_BLOCK = 256


@quiet
def rms_norm(x, w, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * w over the last axis.

    Order: mean = lane sum of squares / D; r = 1 / sqrt(mean + eps); (x * r) * w.

    Args:
        x: [..., D] – vectors (for a norm per head: [T, H, E]).
        w: [D] – weight.
        eps: added to the mean, rounded to float32.
    Returns:
        [..., D].
    """
    x = np.asarray(x, f32)
    mean = lane_sum(x, squares=True) / f32(x.shape[-1])
    r = f32(1) / np.sqrt(mean + f32(eps))
    return (x * r[..., None]) * np.asarray(w, f32)


@quiet
def l2_norm(x, eps: float) -> np.ndarray:
    """x / sqrt(sum(x^2) + eps) over the last axis: r = 1 / sqrt(sum + eps), then x * r."""
    x = np.asarray(x, f32)
    r = f32(1) / np.sqrt(lane_sum(x, squares=True) + f32(eps))
    return x * r[..., None]


@quiet
def rope(x, cos, sin, neox: bool) -> np.ndarray:
    """Rotate pairs of components: r0 = fma(-x1, sin, x0 * cos), r1 = fma(x1, cos, x0 * sin).

    Args:
        x: [T, H, E] – heads.
        cos, sin: [T, R/2] – tables of each token's position; components from R on pass through.
        neox: pairs are (j, j + R/2), else (2j, 2j + 1).
    Returns:
        [T, H, E].
    """
    out = np.array(x, f32)
    half = np.shape(cos)[-1]
    first = slice(0, half) if neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
    c, s = (np.asarray(table, f32)[:, None, :] for table in (cos, sin))
    x0, x1 = out[..., first].copy(), out[..., second].copy()
    out[..., first] = fma(-x1, s, x0 * c)
    out[..., second] = fma(x1, c, x0 * s)
    return out


@quiet
def hadamard(x, block: int, signs=None, inverse: bool = False) -> np.ndarray:
    """Sylvester-Hadamard transform of each block of the last axis, scaled by 1 / sqrt(block).

    Order: signs first (exact), butterflies with h = 1, 2, 4, ..., then one multiplication by
    1 / sqrt(block), which is computed in float64 and rounded once. The inverse has the signs last.

    Args:
        x: [..., K] – vectors.
        block: a power of two that divides K.
        signs: [K] of +1 and -1, or None.
        inverse: undo what the same call without it does.
    Returns:
        [..., K].
    Raises:
        FormatError: block is not a power of two dividing K.
    """
    x = np.asarray(x, f32)
    if block < 1 or block & (block - 1) or x.shape[-1] % block:
        raise FormatError(
            f"hadamard over {x.shape[-1]} columns: found block {block}; a power of two dividing "
            "the columns is needed. Correct the rotation's block sizes."
        )
    signs = f32(1) if signs is None else np.asarray(signs, f32)
    out = x.copy() if inverse else x * signs
    h = 1
    while h < block:
        pairs = out.reshape(-1, 2, h)
        a, b = pairs[:, 0], pairs[:, 1]
        out = np.stack([a + b, a - b], axis=1)
        h *= 2
    out = out.reshape(x.shape) * f32(1 / np.sqrt(float(block)))
    return out * signs if inverse else out


@quiet
def add(a, b) -> np.ndarray:
    """a + b, elementwise (residuals, biases)."""
    return np.add(a, b, dtype=f32)


@quiet
def multiply(a, b) -> np.ndarray:
    """a * b, elementwise or by a float32 constant."""
    return np.multiply(a, b, dtype=f32)


@quiet
def swiglu(gate, up) -> np.ndarray:
    """silu(gate) * up, elementwise."""
    return silu(gate) * np.asarray(up, f32)


@quiet
def sigmoid_gate(x, gate) -> np.ndarray:
    """x * sigmoid(gate), elementwise."""
    return np.asarray(x, f32) * sigmoid(gate)


# attention


@quiet
def softmax_pieces(scores, seen=None) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominator of a softmax over the last axis.

    Args:
        scores: [..., P].
        seen: bool, broadcast to scores – the positions that take part, or None for all.
    Returns:
        p [..., P] = exp(score - max), 0 where not seen, and its lane sum [...].
    """
    scores = np.asarray(scores, f32)
    seen = np.ones(scores.shape, bool) if seen is None else seen
    top = np.where(seen, scores, f32(-np.inf)).max(-1, keepdims=True)
    p = np.where(seen, exp(scores - top), f32(0))
    return p, lane_sum(p)


@quiet
def softmax(scores) -> np.ndarray:
    """exp(score - max) / denominator over the last axis, one division per element."""
    p, denominator = softmax_pieces(scores)
    return p / denominator[..., None]


@quiet
def attention(q, k, v, start: int, scale: float) -> np.ndarray:
    """Causal attention of T new tokens over P = start + T cached positions.

    Order: score = fma chain over the head, ascending, then * scale; exact maximum; exp(score -
    max); denominator by lane sum; per block of 256 positions (counted from position 0) an fma
    chain ascending; the first block's partial, then the others added ascending; one division.
    A position after the token's own takes no part.

    Args:
        q: [T, H, E] – queries; token t is at position start + t.
        k, v: [P, G, E] – keys and values as the cache holds them, widened; head h reads h // (H/G).
        start: positions before the first token.
        scale: rounded to float32.
    Returns:
        [T, H, E].
    """
    q, k, v = (np.asarray(a, f32) for a in (q, k, v))
    tokens, heads, width = q.shape
    group = np.arange(heads) // (heads // k.shape[1])
    k, v = k[:, group].transpose(1, 0, 2), v[:, group]
    score = np.zeros((tokens, heads, len(v)), f32)
    for d in range(width):
        score = fma(q[:, :, None, d], k[None, :, :, d], score)
    seen = np.arange(len(v)) <= start + np.arange(tokens)[:, None]  # [T, P]
    p, denominator = softmax_pieces(score * f32(scale), seen[:, None])
    out = np.zeros((tokens, heads, width), f32)
    for first in range(0, len(v), ATTENTION_BLOCK):
        part = np.zeros_like(out)
        for t in range(first, min(first + ATTENTION_BLOCK, len(v))):
            now = seen[:, t]
            part[now] = fma(p[now, :, t, None], v[t], part[now])
        begun = seen[:, first]
        out[begun] = out[begun] + part[begun] if first else part
    return out / denominator[..., None]


# gated delta rule


@quiet
def conv(x, w, state) -> tuple[np.ndarray, np.ndarray]:
    """Causal convolution per channel: an fma chain over the taps, oldest first.

    Args:
        x: [T, C] – new inputs.
        w: [C, J] – taps, oldest first.
        state: [J - 1, C] – the inputs before x, oldest first.
    Returns:
        [T, C] outputs (no bias, no silu) and the next state [J - 1, C].
    """
    w = np.asarray(w, f32)
    window = np.concatenate([np.asarray(state, f32), np.asarray(x, f32)])
    y = np.zeros(np.shape(x), f32)
    for j in range(w.shape[1]):
        y = fma(w[:, j], window[j : j + len(y)], y)
    return y, window[len(y) :]


@quiet
def decay(a, alpha, dt) -> np.ndarray:
    """exp(a * softplus(alpha + dt)), elementwise: the factor the delta state shrinks by."""
    return exp(np.asarray(a, f32) * softplus(np.add(alpha, dt, dtype=f32)))


@quiet
def delta_step(state, q, k, v, g, beta) -> tuple[np.ndarray, np.ndarray]:
    """One token of the gated delta rule for H value heads; both sums go over keys, ascending.

    Args:
        state: [H, E, E] – S[h, i, j], i over keys, j over values.
        q, k: [H, E] – normalized query and key of each value head; q already scaled.
        v: [H, E] – value.
        g: [H] – decay factor (not its logarithm).
        beta: [H] – write strength.
    Returns:
        o [H, E] and the new state [H, E, E].
    """
    q, k, v = (np.asarray(a, f32) for a in (q, k, v))
    state = np.asarray(state, f32) * np.asarray(g, f32)[:, None, None]
    u = np.zeros_like(v)
    for i in range(k.shape[1]):
        u = fma(state[:, i], k[:, i, None], u)
    e = (v - u) * np.asarray(beta, f32)[:, None]
    state = fma(k[:, :, None], e[:, None, :], state)
    o = np.zeros_like(v)
    for i in range(q.shape[1]):
        o = fma(state[:, i], q[:, i, None], o)
    return o, state
