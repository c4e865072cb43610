"""The other ops of the CPU against the reference, bit for bit."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cpu import attention, elementwise, embed, norm, pack, rope
from pnrt.formats import FORMATS
from pnrt.jit import Script, run
from pnrt.testing import assert_bits_equal

from .cases import FLOATS, QUANTIZED, random_rows

rng = np.random.default_rng(7)


def floats(*shape, spread=3.0):
    return (rng.standard_normal(shape) * spread).astype(np.float32)


def control(tokens, start=0):
    return np.array([tokens, start], np.int64)


def poison(*shape):
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [24, 32, 100, 576])
def test_rms_norm(n, threads):
    x, w, out = floats(5, n), floats(n), poison(5, n)
    args = (x, n, w, out, n, n, 1, n, 1e-5, control(5))
    run(norm.rms_norm_kernel, *args, threads=threads)
    assert_bits_equal("rms_norm", reference.rms_norm(x, w, 1e-5), out)


def test_rms_norm_of_heads_in_place():
    x, w = floats(3, 4 * 24), floats(24)
    expected = reference.rms_norm(x.reshape(3, 4, 24), w, 1e-6).reshape(3, 96)
    run(norm.rms_norm_kernel, x, 96, w, x, 96, 24, 4, 24, 1e-6, control(3), threads=2)
    assert_bits_equal("rms_norm", expected, x)


def test_add_and_bias():
    x, y, out = floats(3, 50), floats(3, 50), poison(3, 50)
    run(elementwise.add_kernel, x, 50, y, 50, out, 50, 50, control(3), threads=2)
    assert_bits_equal("add", reference.add(x, y), out)
    expected = reference.add(x, np.broadcast_to(y[0], x.shape))
    run(elementwise.bias_kernel, x, 50, y[0].copy(), 50, control(3), threads=2)
    assert_bits_equal("add_bias", expected, x)
    expected = reference.multiply(x, y[1, :1])
    run(elementwise.scale_kernel, x, 50, y[1, :1].copy(), 50, control(3), threads=2)
    assert_bits_equal("scale", expected, x)


def test_swiglu():
    gate, up, out = floats(4, 333, spread=30.0), floats(4, 333), poison(4, 333)
    gate[0, :6] = [0.0, -0.0, 1e-40, -104.0, 104.0, 3e38]
    run(elementwise.swiglu_kernel, gate, 333, up, 333, out, 333, 333, control(4), threads=2)
    assert_bits_equal("swiglu", reference.swiglu(gate, up), out)


def test_exp_on_vectors_and_scalars():
    """The vectorized loop and its scalar tail give the reference's bits over the whole range."""
    gate = np.arange(0, 1 << 32, 99991, dtype=np.uint32).view(np.float32)
    gate = np.ascontiguousarray(gate[np.isfinite(gate)])[None]
    up, out, n = np.ones_like(gate), np.empty_like(gate), gate.size
    run(elementwise.swiglu_kernel, gate, n, up, n, out, n, n, control(1), threads=1)
    assert_bits_equal("silu", reference.swiglu(gate, up), out)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("pairs", [8, 12])
def test_rope(neox, pairs):
    heads, dim, start = 3, 24, 5
    x, cos, sin = floats(4, heads * dim), floats(9, pairs, spread=1), floats(9, pairs, spread=1)
    shaped = x.reshape(4, heads, dim)
    expected = reference.rope(shaped, cos[start:], sin[start:], neox).reshape(x.shape)
    args = (x, heads * dim, heads, dim, pairs, neox, cos, sin, control(4, start))
    run(rope.rope_kernel, *args, threads=2)
    assert_bits_equal("rope", expected, x)


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize(
    ("start", "tokens", "dim"),
    [(0, 1, 16), (0, 40, 24), (300, 3, 80), (270, 5, 144), (200, 70, 128)],
)
def test_attention(kv, start, tokens, dim):
    heads, groups, capacity = 4, 2, 320
    kind = np.float16 if kv == "f16" else np.float32
    total = start + tokens
    q, k, v = floats(tokens, heads * dim), floats(total, groups * dim), floats(total, groups * dim)
    keys, values = (np.zeros(groups * capacity * dim, kind) for _ in range(2))
    args = (k, groups * dim, v, groups * dim, groups, dim, keys, values, capacity, kv == "f16")
    run(rope.store_kernel, *args, control(total), threads=2)
    scale, out = float(np.float32(dim) ** np.float32(-0.5)), poison(tokens, heads * dim)
    scratch_bytes = 8192
    scratch = pack.aligned(2 * scratch_bytes)
    run(
        attention.attention_kernels[kv], q, heads * dim, keys, values, out, heads * dim, heads,
        groups, dim, capacity, scale, control(tokens, start), scratch, scratch_bytes, threads=2,
    )  # fmt: skip
    stored = [a.astype(kind).astype(np.float32).reshape(total, groups, dim) for a in (k, v)]
    expected = reference.attention(q.reshape(tokens, heads, dim), *stored, start, scale)
    assert_bits_equal("attention", expected.reshape(out.shape), out)


@pytest.mark.parametrize("name", [*QUANTIZED, *FLOATS])
def test_embed(name):
    k = 320 if 320 % FORMATS[name].block == 0 else 256
    rows = random_rows(name, 40, k)
    ids, out = np.array([3, 0, 39, 3], np.int64), poison(4, k)
    Script([embed.lookup(name, rows, ids, out, control(4), 2)]).run(2)
    assert_bits_equal(name, FORMATS[name].decode(rows)[ids], out)


def test_halves():
    """All fp16 patterns through the cache's load, and rounding to fp16 through its store."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)].astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), x * np.float32(1.0003)])
    x = np.concatenate([x, np.array([65519.99, 65520.0, -65520.0, 1e-8, 3e-8, 1e38], np.float32)])
    x = np.ascontiguousarray(np.resize(x, -(-x.size // 16) * 16))[None]
    n = x.shape[1]
    keys, values = np.zeros((2, 16 * n), np.float16)
    run(rope.store_kernel, x, n, x, n, 1, n, keys, values, 16, True, control(1), threads=1)
    with np.errstate(over="ignore"):
        expected = x[0].astype(np.float16)
    assert_bits_equal("store", expected.astype(np.float32), values[:n].astype(np.float32))
