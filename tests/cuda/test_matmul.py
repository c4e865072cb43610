"""Packs and products of the CUDA backend, run by the stand-in, against the reference."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cuda import matmul
from pnrt.cuda.pack import CODECS
from pnrt.cuda.packers import pack
from pnrt.cuda.standin import StandIn
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal

QUANTIZED = [name for name in CODECS if FORMATS[name].group]
TUNED = ("pn3t", "pn4t", "q4_0", "q4_1", "q3_K", "q4_K", "q8_0")


def widths(name):
    """One block; a few, that leave lanes without a unit or a unit partial; more than all lanes."""
    block = FORMATS[name].block
    # ternary rows are quantized by the 32
    block = 32 if "ternary" in name else block
    few, many = {"pn3t": (400, 5280), "pn4t": (576, 1088)}.get(name, (3 * block, 0))
    return block, 33 if block == 1 else few, many or 1056 // block * block + block


def shapes(name):
    """(N, K, T) of the products that are compared."""
    one, few, many = widths(name)
    tuned = [(17, few, 1)] if name in TUNED else []
    return [(1, one, 1), (33, many, 5), (7, few, 2), *tuned]


def random_rows(name, n, k):
    """Rows of any codes and scales: quantized noise of blocks that differ in size, some zero."""
    rng = np.random.default_rng([n, k])
    x = rng.standard_normal((n, k)) * np.exp(rng.standard_normal((n, 1)))
    step = min(32, k)
    x[:, : k // step * step] *= np.exp(rng.standard_normal((n, k // step))).repeat(step, axis=1)
    x[-1, :step] = 0
    return FORMATS[name].quantize((x * 0.02).astype(np.float32))


def random_x(t, k):
    rng = np.random.default_rng([7, t, k])
    x = rng.standard_normal((t, k)).astype(np.float32)
    x[rng.random(x.shape) < 0.02] *= 50
    x[rng.random(x.shape) < 0.02] = -0.0
    x[-1, : min(32, k)] = 0
    return x


def multiply(name, rows, k, x, mode, width=None):
    """Everything a session does: pack, upload, convert, multiply; one block takes many rows."""
    device = StandIn(1 << 26)
    weight, data = pack(name, rows, k)
    t, width = len(x), width or weight.N
    view = matmul.view_of(name, k, mode, t)
    address, bad = device.upload(data), device.upload(np.zeros(1, np.uint32))
    prepared = device.allocate(matmul.view_bytes(view, k, t))
    out = device.allocate(t * width * 4)
    device.run(
        [
            matmul.convert(view, device.upload(x), k, k, t, prepared, bad),
            matmul.multiply(weight, address, view, prepared, out, width, t, 1),
        ]
    )
    return device.read(out, (t, width)), int(device.read(bad, (1,), np.uint32)[0])


@pytest.mark.parametrize("mode", ["q8_0", "f32"])
@pytest.mark.parametrize("name", CODECS)
def test_products_have_the_references_bits(name, mode):
    for n, k, t in shapes(name):
        rows, x = random_rows(name, n, k), random_x(t, k)
        got, bad = multiply(name, rows, k, x, mode)
        assert not bad
        expected = reference.matmul(name, rows, x, mode)
        assert_bits_equal(f"{name} {n}x{k} {mode} T={t}", expected, got)


@pytest.mark.parametrize("name", TUNED)
def test_products_at_the_models_width(name):
    k = 5120
    rows, x = random_rows(name, 5, k), random_x(1, k)
    got, _ = multiply(name, rows, k, x, "q8_0")
    assert_bits_equal(name, reference.matmul(name, rows, x), got)


@pytest.mark.parametrize("name", ["pn3t", "pn4t", "q3_K", "q4_K", "q8_0"])
def test_largest_codes_and_activations_do_not_overflow(name):
    """Every code at one end, activations at +-127: sums are as large as they get."""
    form, k = FORMATS[name], widths(name)[2]
    rows = random_rows(name, 4, k)
    blocks = rows.reshape(-1, form.nbytes)
    skip = {"q3_K": slice(0, 96), "q4_K": slice(16, 144)}.get(name, slice(2, 34))
    for i, fill in enumerate((0x00, 0x7F if name in ("pn3t", "q8_0") else 0xFF)):
        rows[i * 2 : i * 2 + 2].reshape(-1, form.nbytes)[:, skip] = fill
    if name == "pn3t":
        blocks[len(blocks) // 2 :, 2::2] = 0xFF
    x = np.where(np.random.default_rng(0).random((2, k)) < 0.5, -1, 1).astype(np.float32)
    x[1] = 1
    for t in (1, 2):
        got, _ = multiply(name, rows, k, x[:t], "q8_0")
        assert_bits_equal(f"{name} T={t}", reference.matmul(name, rows, x[:t]), got)


@pytest.mark.parametrize("name", QUANTIZED)
def test_one_hot_names_every_column(name):
    k = widths(name)[0]
    rows = random_rows(name, 3, k)
    got, _ = multiply(name, rows, k, np.eye(k, dtype=np.float32), "f32")
    # chains start from +0.0, so a weight of -0.0 comes out as +0.0
    assert_bits_equal(name, FORMATS[name].decode(rows).T + np.float32(0), got)


def test_rows_of_the_output_may_be_wider():
    rows, x = random_rows("pn4t", 5, 128), random_x(3, 128)
    got, _ = multiply("pn4t", rows, 128, x, "q8_0", width=9)
    assert_bits_equal("inside", reference.matmul("pn4t", rows, x), got[:, :5])
    assert np.isnan(got[:, 5:]).all()


@pytest.mark.parametrize("mode", ["q8_0", "f32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_noted(mode, value):
    rows, x = random_rows("q4_0", 2, 64), random_x(2, 64)
    x[1, 40] = value
    assert multiply("q4_0", rows, 64, x, mode)[1] == 1


def test_scales_beyond_fp16_are_noted():
    rows, x = random_rows("q4_0", 2, 64), np.zeros((1, 64), np.float32)
    x[0, 3] = np.nextafter(np.float32(65520 * 127), np.float32(0))
    assert multiply("q4_0", rows, 64, x, "q8_0")[1] == 0
    x[0, 3] = 65520 * 127
    assert multiply("q4_0", rows, 64, x, "q8_0")[1] == 1
