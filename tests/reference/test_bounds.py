"""The derived bounds hold for the reference, and are tight enough to see a wrong op."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.reference import bounds, exact

f32 = np.float32


def floats(*shape, spread=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(f32)


X, Y = floats(7, 4, 48), floats(7, 4, 48, seed=1)
W = floats(48, seed=2)
ANGLE = floats(7, 24, spread=9, seed=3)
COS, SIN = np.cos(ANGLE).astype(f32), np.sin(ANGLE).astype(f32)
K, V = floats(300, 2, 48, seed=4), floats(300, 2, 48, seed=5)

# op, arguments; the last is what a slightly wrong one would get
OPS = {
    "add": ((X, Y), (X, Y * f32(1 + 1e-5))),
    "multiply": ((X, Y), (X, Y * f32(1 + 1e-5))),
    "rms_norm": ((X, W, 1e-5), (X, W, 3e-3)),
    "l2_norm": ((X, 1e-5), (X, 3e-2)),
    "rope": ((X, COS, SIN, True), (X, COS, SIN * f32(1 + 1e-4), True)),
    "hadamard": ((X, 16), (X * f32(1 + 1e-4), 16)),
    "swiglu": ((X * 20, Y), (X * f32(20.001), Y)),
    "sigmoid_gate": ((X, Y * 20), (X, Y * f32(20.001))),
    "softmax": ((X * 10,), (X * f32(10.001),)),
    "attention": ((X, K, V, 293, 0.25), (X, K, V, 293, 0.26)),
    "decay": ((-abs(X), Y, W), (-abs(X), Y, W * f32(1.001))),
}


@pytest.mark.parametrize("op", OPS)
def test_the_reference_is_within_and_a_wrong_one_is_not(op):
    right, wrong = OPS[op]
    truth, bound = (getattr(judge, op)(*right) for judge in (exact, bounds))
    error = np.abs(getattr(reference, op)(*right) - truth)
    assert np.isfinite(bound).all()
    assert (error <= bound).all()
    assert error.max() > 0.001 * bound.max(), "the bound is far too wide"
    assert (np.abs(getattr(reference, op)(*wrong) - truth) > bound).mean() > 0.1


def test_rope_has_one_rounding_more_than_its_parts():
    part = bounds.rope(X, COS[:, :8], SIN[:, :8], False)
    assert (part[..., 16:] == 0).all()
    truth = exact.rope(X, COS[:, :8], SIN[:, :8], False)
    assert (np.abs(reference.rope(X, COS[:, :8], SIN[:, :8], False) - truth) <= part).all()


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 1e-9, 1e-40, 1e5])
def test_quantized_activations(spread):
    x = floats(50, 80, spread=spread)
    q, dx = reference.quantize_q8_0(x)
    y = (q * np.repeat(dx, 32, axis=1))[:, :80].astype(np.float64)
    bound = bounds.quantize_q8_0(x)
    assert (np.abs(y - x) <= bound).all()
    if spread > 1e-2:
        assert (bound < np.abs(x).max(1, keepdims=True) / 200).all()


def test_conv():
    x, w, state = floats(20, 6), floats(6, 4, seed=1), floats(3, 6, seed=2)
    error = np.abs(reference.conv(x, w, state)[0] - exact.conv(x, w, state)[0])
    assert (error <= bounds.conv(x, w, state)).all()
    assert (bounds.conv(x, w, state) < 1e-4).all()


def test_delta_over_many_tokens():
    """The bound follows the state over many steps and does not run away."""
    rng = np.random.default_rng(0)
    state = truth = np.zeros((2, 16, 16))
    error = np.zeros((2, 16))
    for _ in range(100):
        q, k, v = (rng.standard_normal((2, 16)).astype(f32) for _ in range(3))
        k = reference.l2_norm(k, 1e-6)
        g, beta = rng.uniform(0.8, 1, 2).astype(f32), rng.uniform(0, 1, 2).astype(f32)
        limit, error = bounds.delta_step(truth, error, q, k, v, g, beta)
        o, state = reference.delta_step(state, q, k, v, g, beta)
        want, truth = exact.delta_step(truth, q, k, v, g, beta)
        assert (np.abs(o - want) <= limit).all()
        assert (np.linalg.norm(state - truth, axis=1) <= error).all()
    assert error.max() < 1e-3
    assert np.linalg.norm(state - truth, axis=1).max() > 0.001 * error.max()


def test_nothing_is_promised_beyond_float32():
    big = np.full((1, 4), 2e38, f32)
    assert np.isinf(bounds.add(big, big)).all()
    assert np.isinf(bounds.rms_norm(big, np.ones(4), 1e-5)).all()
