"""Arithmetic and the ops that are not products: by exact rationals, scalar loops and float64."""

from fractions import Fraction

import numpy as np
import pytest

from pnrt import reference
from pnrt.errors import FormatError

f32 = np.float32


def bits(x) -> np.ndarray:
    return np.asarray(x, f32).view(np.uint32)


# fma and sums


def rounded(value: Fraction) -> np.float32:
    """A rational to float32, to nearest even, by exact comparison."""
    sign, v = (-1 if value < 0 else 1), abs(value)
    if v == 0:
        return f32(0)
    power = -149
    while v >= Fraction(2) ** (power + 24):
        power += 1
    return f32(sign * round(v / Fraction(2) ** power) * 2.0**power)  # round() is half to even


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    n = 600
    size = np.ldexp(1.0, rng.integers(-70, 60, (3, n)))
    a, b, c = (rng.standard_normal((3, n)) * size).astype(f32)
    # products next to a half of c's last place, where two roundings go wrong
    a[:200] = 1 + 2.0**-15
    b[:200] = 2.0**-24 * (1 + rng.integers(-1, 2, 200) * 2.0**-15)
    c[:200] = 1 + rng.integers(0, 1 << 23, 200) * 2.0**-23
    # results below the normal range
    a[200:300] *= f32(2.0**-60)
    c[200:300] = (rng.standard_normal(100) * 2.0**-130).astype(f32)
    # subnormal results next to a half of the last place
    a[300:400] = 2.0**-75 * (1 + 2.0**-20)
    b[300:400] = 2.0**-75 * (1 + rng.integers(-1, 2, 100) * 2.0**-20)
    c[300:400] = rng.integers(1 << 20, 1 << 22, 100) * 2.0**-149
    got = reference.fma(a, b, c)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    fits = np.array([abs(v) < Fraction(2) ** 127 for v in exact])
    want = np.array([rounded(v) if ok else 0 for v, ok in zip(exact, fits, strict=True)], f32)
    assert fits.sum() > 500
    np.testing.assert_array_equal(got[fits], want[fits])
    twice = (a.astype(float) * b.astype(float) + c.astype(float)).astype(f32)
    for kind in (slice(0, 200), slice(300, 400)):
        assert (twice[kind] != got[kind]).any(), "no case here tells one rounding from two"


def test_fma_at_the_edges():
    big, inf = f32(3e38), f32(np.inf)
    np.testing.assert_array_equal(
        reference.fma([big, -big, inf, inf, 0], [big, big, 1, 0, inf], [0, 0, -inf, 1, 1]),
        [inf, -inf, np.nan, np.nan, np.nan],
    )
    assert np.signbit(reference.fma(f32(-0.0), f32(1), f32(-0.0)))
    assert not np.signbit(reference.fma(f32(-0.0), f32(1), f32(0.0)))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 576, 1000])
@pytest.mark.parametrize("squares", [False, True])
def test_lane_sum_is_the_scalar_loop(size, squares):
    x = np.random.default_rng(size).standard_normal(size).astype(f32)
    lanes = np.zeros(32, f32)
    for i, v in enumerate(x):
        old = lanes[i % 32]
        lanes[i % 32] = reference.fma(v, v, old) if squares else old + v
    for s in (16, 8, 4, 2, 1):
        for lane in range(s):
            lanes[lane] = lanes[lane] + lanes[lane + s]
    assert bits(reference.lane_sum(x, squares)) == bits(lanes[0])
    stacked = np.stack([x, -x, 2 * x])
    assert bits(reference.lane_sum(stacked, squares))[0] == bits(lanes[0])


# the other ops: near the exact twin, and what their order promises


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


def test_norms_rotations_and_gates_are_near_their_twins(rng):
    x = rng.standard_normal((3, 4, 80)).astype(f32)
    w = rng.standard_normal(80).astype(f32)
    angle = rng.uniform(-9, 9, (3, 20))
    cos, sin = np.cos(angle).astype(f32), np.sin(angle).astype(f32)
    signs = rng.choice([-1, 1], 80)
    calls = {
        "rms_norm": (x, w, 1e-5),
        "l2_norm": (x, 1e-6),
        "hadamard": (x, 16, signs),
        "add": (x, w),
        "multiply": (x, w),
        "swiglu": (x, w * x),
        "sigmoid_gate": (x, w * x),
        "softmax": (x,),
        "decay": (-abs(w), x, w),
    }
    for name, args in calls.items():
        got, want = getattr(reference, name)(*args), getattr(reference.exact, name)(*args)
        assert got.dtype == f32, name
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6, err_msg=name)
    for neox in (False, True):
        got = reference.rope(x, cos, sin, neox)
        want = reference.exact.rope(x, cos, sin, neox)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(got[..., 40:], x[..., 40:])


def test_rope_pairs():
    x = np.arange(1, 7, dtype=f32).reshape(1, 1, 6)
    cos, sin = np.zeros((1, 2), f32), np.ones((1, 2), f32)  # a quarter turn of four components
    np.testing.assert_array_equal(reference.rope(x, cos, sin, False).ravel(), [-2, 1, -4, 3, 5, 6])
    np.testing.assert_array_equal(reference.rope(x, cos, sin, True).ravel(), [-3, -4, 1, 2, 5, 6])


def test_hadamard_of_integers_is_exact(rng):
    x = rng.integers(-100, 100, (2, 128)).astype(f32)
    for block in (1, 4, 64):
        y = reference.hadamard(x, block)
        np.testing.assert_array_equal(y, reference.exact.hadamard(x, block))
        np.testing.assert_array_equal(reference.hadamard(y, block), x)
    for block in (0, 3, 256):
        with pytest.raises(FormatError, match="a power of two dividing"):
            reference.hadamard(x, block)


def test_attention_is_the_scalar_loop(rng):
    tokens, heads, groups, width, start = 2, 2, 1, 3, 299
    q = rng.standard_normal((tokens, heads, width)).astype(f32)
    k, v = rng.standard_normal((2, start + tokens, groups, width)).astype(f32)
    got = reference.attention(q, k, v, start, width**-0.5)
    for t in range(tokens):
        positions = start + t + 1
        for h in range(heads):
            score = np.zeros(positions, f32)
            for d in range(width):
                score = reference.fma(q[t, h, d], k[:positions, 0, d], score)
            score = score * f32(width**-0.5)
            p = reference.exp(score - score.max())
            for d in range(width):
                parts = []
                for first in range(0, positions, 256):
                    acc = f32(0)
                    for i in range(first, min(first + 256, positions)):
                        acc = reference.fma(p[i], v[i, 0, d], acc)
                    parts.append(acc)
                want = (parts[0] + parts[1]) / reference.lane_sum(p)
                assert bits(got[t, h, d]) == bits(want)


def test_attention_does_not_depend_on_chunks(rng):
    start, tokens = 250, 12
    q = rng.standard_normal((tokens, 4, 16)).astype(f32)
    k, v = rng.standard_normal((2, start + tokens, 2, 16)).astype(f32)
    whole = reference.attention(q, k, v, start, 0.25)
    np.testing.assert_allclose(
        whole, reference.exact.attention(q, k, v, start, 0.25), rtol=1e-5, atol=1e-5
    )
    for chunk in (1, 5):
        for t in range(0, tokens, chunk):
            part, seen = q[t : t + chunk], start + min(t + chunk, tokens)
            got = reference.attention(part, k[:seen], v[:seen], start + t, 0.25)
            np.testing.assert_array_equal(bits(got), bits(whole[t : t + chunk]))
    # what lies behind a token is not read
    k[start + 3 :], v[start + 3 :] = np.nan, np.inf
    got = reference.attention(q, k, v, start, 0.25)
    np.testing.assert_array_equal(bits(got[:3]), bits(whole[:3]))


def test_softmax_of_equal_scores_is_exact():
    np.testing.assert_array_equal(reference.softmax(np.full((2, 64), 3.5, f32)), 1 / 64)


def test_convolution_in_chunks(rng):
    x, w = rng.standard_normal((9, 5)).astype(f32), rng.standard_normal((5, 4)).astype(f32)
    empty = np.zeros((3, 5), f32)
    whole, last = reference.conv(x, w, empty)
    np.testing.assert_allclose(whole, reference.exact.conv(x, w, empty)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(last, x[-3:])
    first, state = reference.conv(x[:1], w, empty)
    second, state = reference.conv(x[1:], w, state)
    np.testing.assert_array_equal(bits(np.concatenate([first, second])), bits(whole))
    np.testing.assert_array_equal(state, last)


def test_delta_step_over_many_tokens(rng):
    heads, width = 3, 16
    state = np.zeros((heads, width, width), f32)
    twin = state.astype(float)
    for _ in range(20):
        q, k, v = rng.standard_normal((3, heads, width)).astype(f32)
        q, k = (reference.l2_norm(a, 1e-6) for a in (q, k))
        g, beta = rng.uniform(0.5, 1, (2, heads)).astype(f32)
        o, state = reference.delta_step(state, q, k, v, g, beta)
        want, twin = reference.exact.delta_step(twin, q, k, v, g, beta)
        np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, twin, rtol=1e-5, atol=1e-5)


def test_every_public_op_has_an_exact_twin():
    own = {"exact", "quantize_q8_0", "segments"}
    missing = [n for n in reference.__all__ if n not in own and not hasattr(reference.exact, n)]
    assert missing == []
