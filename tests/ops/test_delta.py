"""The recurrent blocks' ops on the CPU: the reference's bits, however the tokens are cut."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cpu import delta, elementwise, norm
from pnrt.jit import run
from pnrt.testing import assert_bits_equal

from .test_steps import control, floats, poison


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "taps"), [(16, 4), (50, 4), (96, 1), (33, 2)])
def test_conv_silu(n, taps, threads):
    x, w = floats(11, n), floats(n, taps)
    y, last = reference.conv(x, w, np.zeros((taps - 1, n), np.float32))
    columns = np.ascontiguousarray(w.T)
    for cut in ((11,), (1, 2, 1, 7), (1,) * 11):
        state, parts = np.zeros((max(1, taps - 1), n), np.float32), []
        for part in np.split(x, np.cumsum(cut)[:-1]):
            out = poison(len(part), n)
            args = (np.ascontiguousarray(part), n, columns, state, out, n, n, taps)
            run(delta.conv_silu_kernel, *args, control(len(part)), threads=threads)
            parts.append(out)
        assert_bits_equal(f"conv_silu {cut}", reference.silu(y), np.concatenate(parts))
        assert_bits_equal(f"conv state {cut}", last, state[: taps - 1])


@pytest.mark.parametrize("threads", [1, 2])
def test_l2_norm(threads):
    x, out = floats(3, 10 + 4 * 40), poison(3, 160)
    x[1, 10:50] = 0
    heads = x[:, 10:].reshape(3, 4, 40)
    expected = reference.multiply(reference.l2_norm(heads, 1e-6), np.float32(0.158)).reshape(3, 160)
    args = (x, 170, 10, out, 160, 40, 4, 1e-6, 0.158, control(3))
    run(norm.l2_norm_kernel, *args, threads=threads)
    assert_bits_equal("l2_norm", expected, out)


def test_rms_norm_of_heads_with_something_between():
    x, w, out = floats(3, 4 * 50), floats(24), poison(3, 96)
    expected = reference.rms_norm(x.reshape(3, 4, 50)[..., :24], w, 1e-6).reshape(3, 96)
    args = (x, 200, w, out, 96, 24, 4, 50, 1e-6, control(3))
    run(norm.rms_norm_kernel, *args, threads=2)
    assert_bits_equal("rms_norm", expected, out)


def test_decay_and_sigmoid():
    x, rate, dt = floats(3, 48, spread=20), -np.abs(floats(48)), floats(48)
    x[0, :4] = [0.0, -0.0, 90.0, -110.0]
    out = poison(3, 48)
    run(delta.decay_kernel, x, 48, rate, dt, out, 48, 48, control(3), threads=2)
    assert_bits_equal("decay", reference.decay(rate, x, np.broadcast_to(dt, x.shape)), out)
    expected = reference.sigmoid(x)
    run(elementwise.sigmoid_kernel, x, 48, x, 48, 48, control(3), threads=2)
    assert_bits_equal("sigmoid", expected, x)


def test_sigmoid_gate():
    x, gate, out = floats(3, 4 * 24), floats(3, 4 * 50, spread=20), poison(3, 96)
    expected = reference.sigmoid_gate(x, gate.reshape(3, 4, 50)[..., 26:].reshape(3, 96))
    args = (x, 96, gate, 200, out, 96, 24, 4, 50, 26, control(3))
    run(elementwise.sigmoid_gate_kernel, *args, threads=2)
    assert_bits_equal("sigmoid_gate", expected, out)


class Delta:
    """Inputs of T tokens as a model makes them, and the kernel's memory."""

    def __init__(self, tokens, n, heads, key_heads, seed=0):
        rng = np.random.default_rng(seed)
        self.n, self.heads, self.key_heads = n, heads, key_heads

        def unit(scale):
            x = rng.standard_normal((tokens, key_heads, n)).astype(np.float32)
            return reference.multiply(reference.l2_norm(x, 1e-6), np.float32(scale))

        self.q, self.k = unit(n**-0.5), unit(1.0)
        self.v = rng.standard_normal((tokens, heads, n)).astype(np.float32)
        # decays as a trained model has them: heads that forget at once and heads that never do
        rate = -np.exp(rng.uniform(-7, 1, heads)).astype(np.float32)
        alpha = rng.standard_normal((tokens, heads)).astype(np.float32)
        self.g = reference.decay(rate, alpha, np.zeros_like(alpha))
        self.beta = reference.sigmoid(rng.standard_normal((tokens, heads)).astype(np.float32))
        self.memory = delta.new_state((heads, n, n))

    @property
    def state(self):
        """[H, E, E] of the kernel's memory."""
        return delta.read_state(self.memory, (self.heads, self.n, self.n))

    def run(self, start, stop, threads):
        """Outputs [stop - start, H * E] of the kernel, which moves the state on."""
        n, heads, tokens = self.n, self.heads, stop - start
        q, k, v, g, beta = (
            np.ascontiguousarray(a[start:stop].reshape(tokens, -1))
            for a in (self.q, self.k, self.v, self.g, self.beta)
        )
        v = np.concatenate([poison(tokens, 5), v], axis=1)
        out, keys = poison(tokens, heads * n), self.key_heads * n
        run(
            delta.delta_kernel, q, keys, k, keys, v, v.shape[1], 5, g, heads, beta, heads,
            self.memory, out, heads * n, n, heads, self.key_heads, control(tokens),
            threads=threads,
        )  # fmt: skip
        return out

    def judge(self, ops):
        """Outputs [T, H * E] and the last state by reference or reference.exact."""
        state, out = np.zeros((self.heads, self.n, self.n), np.float32), []
        # value head h reads key head h mod key_heads
        key = np.arange(self.heads) % self.key_heads
        for t in range(len(self.v)):
            o, state = ops.delta_step(
                state, self.q[t, key], self.k[t, key], self.v[t], self.g[t], self.beta[t]
            )
            out.append(o.reshape(-1))
        return np.stack(out), state


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("n", "heads", "key_heads"), [(16, 4, 2), (24, 3, 1), (64, 2, 2), (128, 6, 2), (200, 2, 1)]
)
def test_delta(n, heads, key_heads, threads):
    expected, last = Delta(9, n, heads, key_heads).judge(reference)
    for cut in ((9,), (1, 5, 1, 2), (1,) * 9):
        case, parts, start = Delta(9, n, heads, key_heads), [], 0
        for tokens in cut:
            parts.append(case.run(start, start + tokens, threads))
            start += tokens
        assert_bits_equal(f"delta {cut}", expected, np.concatenate(parts))
        assert_bits_equal(f"delta state {cut}", last, case.state)


def test_the_state_does_not_drift(record_property):
    """512 tokens in float32 against the float64 twin: the error stays that of a few roundings."""
    case = Delta(512, 128, 6, 2)
    out = case.run(0, 512, 2)
    expected, last = case.judge(reference.exact)

    def error(got, exact):
        return float(np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()))

    early, late = error(out[:64], expected[:64]), error(out[-64:], expected[-64:])
    state = max(error(case.state[h], last[h]) for h in range(6))
    record_property("early", early)
    record_property("late", late)
    record_property("state", state)
    assert max(early, late, state) < 1e-6, (early, late, state)
