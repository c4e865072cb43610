"""The kernels of steps, their own source run by the stand-in, against the reference."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cuda import argmax, attention, delta, elementwise, embed, norm, rope, rotate
from pnrt.cuda.control import elements
from pnrt.cuda.standin import StandIn
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal


def floats(*shape, spread=3.0):
    rng = np.random.default_rng([*shape, 5])
    return (rng.standard_normal(shape) * spread).astype(np.float32)


class Machine(StandIn):
    """Launches with arrays in place of addresses, and reads them back."""

    def __init__(self):
        super().__init__(1 << 26)
        self.arrays = []

    def put(self, value):
        """Arguments as a launch takes them."""
        if not isinstance(value, np.ndarray):
            return value
        self.arrays.append((self.upload(value), value))
        return self.arrays[-1][0]

    def control(self, tokens, start=0):
        return self.put(np.array([tokens, start], np.uint32))

    def apply(self, kernel, grid, *args):
        """Launch; arrays among the arguments take what the device's memory holds afterwards."""
        self.launch(kernel, grid, *(self.put(a) for a in args))
        for address, array in self.arrays:
            array[...] = self.read(address, array.shape, array.dtype)
        self.arrays.clear()


@pytest.fixture
def machine():
    return Machine()


def poison(*shape):
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize("n", [1, 24, 100, 576, 5120])
def test_rms_norm(machine, n):
    x, w, out = floats(3, n), floats(n), poison(3, n)
    x[0, 0] = 1e-30
    grid, control = (1, 3), machine.control(3)
    machine.apply(norm.rms_norm_kernel, grid, x, n, w, out, n, n, 1, n, 1e-5, control)
    assert_bits_equal("rms_norm", reference.rms_norm(x, w, 1e-5), out)


def test_rms_norm_of_heads_in_place_and_with_something_between(machine):
    x, w = floats(3, 4 * 24), floats(24)
    expected = reference.rms_norm(x.reshape(3, 4, 24), w, 1e-6).reshape(3, 96)
    machine.put(x)
    place, control = machine.arrays[0][0], machine.control(3)
    machine.apply(norm.rms_norm_kernel, (4, 3), place, 96, w, place, 96, 24, 4, 24, 1e-6, control)
    assert_bits_equal("in place", expected, x)
    x, out = floats(3, 4 * 50), poison(3, 100)
    expected = reference.rms_norm(x.reshape(3, 4, 50)[..., :24], w, 1e-6).reshape(3, 96)
    control = machine.control(2)
    machine.apply(norm.rms_norm_kernel, (4, 3), x, 200, w, out, 100, 24, 4, 50, 1e-6, control)
    assert_bits_equal("apart", expected[:2], out[:2, :96])
    # rows wider than the result, and rows behind the last token, are not touched
    assert np.isnan(out[:, 96:]).all()
    assert np.isnan(out[2]).all()


def test_l2_norm(machine):
    x, out = floats(3, 10 + 4 * 300), poison(3, 1200)
    x[1, 10:310] = 0
    heads = x[:, 10:].reshape(3, 4, 300)
    expected = reference.multiply(reference.l2_norm(heads, 1e-6), np.float32(0.158))
    args = (x, 1210, 10, out, 1200, 300, 4, 1e-6, np.float32(0.158), machine.control(3))
    machine.apply(norm.l2_norm_kernel, (4, 3), *args)
    assert_bits_equal("l2_norm", expected.reshape(3, 1200), out)


def test_add_and_bias(machine):
    x, y, out = floats(3, 150), floats(3, 150) * 7, poison(3, 150)
    grid = elements(150, 3, elementwise.add_kernel)
    args = (x, 150, y, 150, out, 150, 150, machine.control(3))
    machine.apply(elementwise.add_kernel, grid, *args)
    assert_bits_equal("add", reference.add(x, y), out)
    expected = reference.add(x, np.broadcast_to(y[0], x.shape))
    args = (x, 150, y[0].copy(), 150, machine.control(3))
    machine.apply(elementwise.bias_kernel, grid, *args)
    assert_bits_equal("add_bias", expected, x)
    expected = reference.multiply(x, y[1, :1])
    args = (x, 150, y[1, :1].copy(), 150, machine.control(3))
    machine.apply(elementwise.scale_kernel, grid, *args)
    assert_bits_equal("scale", expected, x)


def test_swiglu(machine):
    gate, up, out = floats(4, 333, spread=30.0), floats(4, 333), poison(4, 333)
    gate[0, :6] = [0.0, -0.0, 1e-40, -104.0, 104.0, 3e38]
    args = (gate, 333, up, 333, out, 333, 333, machine.control(4))
    machine.apply(elementwise.swiglu_kernel, elements(333, 4, elementwise.swiglu_kernel), *args)
    assert_bits_equal("swiglu", reference.swiglu(gate, up), out)


def test_sigmoid_and_gate(machine):
    x, out = floats(3, 96, spread=20), poison(3, 96)
    grid = elements(96, 3, elementwise.sigmoid_kernel)
    args = (x, 96, out, 96, 96, machine.control(3))
    machine.apply(elementwise.sigmoid_kernel, grid, *args)
    assert_bits_equal("sigmoid", reference.sigmoid(x), out)
    gate, out = floats(3, 4 * 50, spread=20), poison(3, 96)
    expected = reference.sigmoid_gate(x, gate.reshape(3, 4, 50)[..., 26:].reshape(3, 96))
    args = (x, 96, gate, 200, out, 96, 24, 4, 50, 26, machine.control(3))
    machine.apply(elementwise.sigmoid_gate_kernel, grid, *args)
    assert_bits_equal("sigmoid_gate", expected, out)


def test_decay(machine):
    x, rate, dt, out = floats(3, 48, spread=20), -np.abs(floats(48)), floats(48), poison(3, 48)
    x[0, :4] = [0.0, -0.0, 90.0, -110.0]
    args = (x, 48, rate, dt, out, 48, 48, machine.control(3))
    machine.apply(delta.decay_kernel, elements(48, 3, delta.decay_kernel), *args)
    assert_bits_equal("decay", reference.decay(rate, x, np.broadcast_to(dt, x.shape)), out)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("pairs", [12, 8])
def test_rope(machine, pairs, neox):
    x, angles = floats(5, 4 * 24), np.random.default_rng(1).uniform(0, 7, (9, pairs))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected = reference.rope(x.reshape(5, 4, 24), cos[3:8], sin[3:8], neox).reshape(5, 96)
    args = (x, 96, 4, 24, pairs, neox, cos, sin, machine.control(5, 3))
    machine.apply(rope.rope_kernel, elements(4 * pairs, 5, rope.rope_kernel), *args)
    assert_bits_equal("rope", expected, x)


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize(
    ("start", "T", "heads", "groups", "dim"),
    [(0, 1, 2, 1, 8), (14, 4, 4, 2, 20), (250, 9, 3, 3, 16), (530, 2, 2, 1, 144)],
)
def test_attention_over_the_cache(machine, kv, start, T, heads, groups, dim):
    positions = start + T
    capacity, kind = -(-positions // 16) * 16 + 16, np.float16 if kv == "f16" else np.float32
    q, k, v = (
        floats(n, m * dim) for n, m in ((T, heads), (positions, groups), (positions, groups))
    )
    keys, values = (np.full(groups * capacity * dim, np.nan, kind) for _ in range(2))
    keys, values = machine.upload(keys), machine.upload(values)
    # in two parts, as a prompt and what follows it
    for first, count in ((0, start), (start, T)):
        part = [machine.upload(a[first : first + count].copy()) for a in (k, v)]
        args = (part[0], groups * dim, part[1], groups * dim, groups, dim, keys, values, capacity)
        grid = elements(groups * dim, max(count, 1), rope.store_kernel)
        control = machine.control(count, first)
        machine.launch(rope.store_kernel, grid, *args, kv == "f16", control)
    scratch = machine.allocate(T * attention.scratch_bytes(heads, dim, capacity))
    out, width = machine.allocate(T * heads * dim * 4), heads * dim
    scale, control = float(np.float32(dim**-0.5)), machine.control(T, start)
    machine.run(
        attention.attend(
            kv, T, machine.upload(q), width, keys, values, out, width, heads, groups, dim, capacity,
            scale, control, scratch,
        )
    )  # fmt: skip
    kept = [a.astype(kind).astype(np.float32).reshape(positions, groups, dim) for a in (k, v)]
    expected = reference.attention(q.reshape(T, heads, dim), *kept, start, scale)
    assert_bits_equal("attention", expected.reshape(T, width), machine.read(out, (T, width)))


@pytest.mark.parametrize(("n", "taps"), [(50, 4), (160, 4), (96, 1), (33, 2)])
def test_conv_silu(machine, n, taps):
    x, w = floats(11, n), floats(n, taps)
    y, last = reference.conv(x, w, np.zeros((taps - 1, n), np.float32))
    columns = np.ascontiguousarray(w.T)
    for cut in ((11,), (1, 2, 1, 7)):
        state, parts = np.zeros((max(1, taps - 1), n), np.float32), []
        for part in np.split(x, np.cumsum(cut)[:-1]):
            out = poison(len(part), n)
            args = (part.copy(), n, columns, state, out, n, n, taps, machine.control(len(part)))
            machine.apply(delta.conv_silu_kernel, -(-n // 128), *args)
            parts.append(out)
        assert_bits_equal(f"conv_silu {cut}", reference.silu(y), np.concatenate(parts))
        assert_bits_equal(f"conv state {cut}", last, state[: taps - 1])


@pytest.mark.parametrize(
    ("n", "heads", "key_heads", "held"),
    [(16, 10, 2, True), (16, 4, 2, False), (21, 3, 1, False), (128, 2, 1, True)],
)
def test_delta(machine, n, heads, key_heads, held):
    which = delta.kernel_for(n) if held else delta.delta_kernel
    assert held == (which is not delta.delta_kernel)
    rng, T = np.random.default_rng(0), 5
    q, k = (reference.l2_norm(floats(T, key_heads, n) + i, 1e-6) for i in range(2))
    v, g = floats(T, heads, n), np.exp(-rng.exponential(0.3, (T, heads))).astype(np.float32)
    beta = rng.random((T, heads)).astype(np.float32)
    state, expected, key = np.zeros((heads, n, n), np.float32), [], np.arange(heads) % key_heads
    for t in range(T):
        o, state = reference.delta_step(state, q[t, key], k[t, key], v[t], g[t], beta[t])
        expected.append(o.reshape(-1))
    for cut in ((5,), (1, 3, 1)):
        memory, parts, first = np.zeros((heads, n, n), np.float32), [], 0
        for count in cut:
            now = slice(first, first + count)
            a, b, c = (x[now].reshape(count, -1).copy() for x in (q, k, v))
            c = np.concatenate([poison(count, 5), c], axis=1)
            out = poison(count, heads * n)
            args = (
                a, key_heads * n, b, key_heads * n, c, c.shape[1], 5, g[now].copy(), heads,
                beta[now].copy(), heads, memory, out, heads * n, n, heads, key_heads,
                machine.control(count),
            )  # fmt: skip
            machine.apply(which, -(-n * heads // 128), *args)
            parts.append(out)
            first += count
        assert_bits_equal(f"delta {cut}", np.stack(expected), np.concatenate(parts))
        assert_bits_equal(f"state {cut}", state, memory)


@pytest.mark.parametrize(
    ("n", "block"), [(7, 1), (80, 16), (96, 32), (192, 64), (2048, 1024), (8192, 8192)]
)
@pytest.mark.parametrize("inverse", [False, True])
def test_hadamard(machine, n, block, inverse):
    x = floats(2, n)
    for signs in (np.random.default_rng(2).choice([-1.0, 1.0], n).astype(np.float32), None):
        out, scale = poison(2, n), 1 / float(np.sqrt(float(block)))
        given = 0 if signs is None else signs
        args = (x, n, given, out, n, n, block, inverse, scale, machine.control(2))
        machine.apply(rotate.hadamard_kernel, (-(-n // max(block, 32)), 2), *args)
        assert_bits_equal("hadamard", reference.hadamard(x, block, signs, inverse), out)


def test_regroup(machine):
    x, out = floats(2, 6 * 20), poison(2, 120)
    args = (x, 120, out, 120, 20, 6, 2, machine.control(2))
    machine.apply(rotate.regroup_kernel, elements(120, 2, rotate.regroup_kernel), *args)
    expected = x.reshape(2, 3, 2, 20).transpose(0, 2, 1, 3).reshape(2, 120)
    assert_bits_equal("regroup", expected, out)


def test_take(machine):
    x, out = floats(7, 40), poison(3, 30)
    args = (x, 40, out, 30, 30, machine.control(2, 4))
    machine.apply(embed.take_kernel, elements(30, 3, embed.take_kernel), *args)
    assert_bits_equal("take", x[4:6, :30], out[:2])
    assert np.isnan(out[2]).all()


@pytest.mark.parametrize("name", ["pn3t", "q4_K", "q6_K", "f16"])
def test_embedding_rows(name):
    form = FORMATS[name]
    K = 2 * form.block if form.block > 1 else 33
    rows, tokens = form.quantize(floats(9, K)), np.array([3, 0, 8, 3])
    expected = reference.embedding(name, rows, tokens)
    assert_bits_equal(name, expected, embed.lookup(name, rows, tokens))


@pytest.mark.parametrize("n", [1, 31, 300, 20000])
def test_argmax(machine, n):
    scratch = machine.allocate((argmax.BLOCKS + 1) * 8)
    x = np.round(floats(n))
    cases = [x, np.full(n, -np.inf, np.float32), x.copy(), x.copy()]
    cases[2][n // 2 :] = np.inf
    cases[3][[n // 3, n - 1]] = np.nan
    for case in cases:
        machine.run(argmax.largest(machine.upload(case), n, scratch))
        found = machine.read(scratch + 4, (1,), np.int32)[0]
        assert found == np.argmax(case)
