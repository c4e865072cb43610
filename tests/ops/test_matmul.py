"""The CPU's product against the reference (bits) and against the truth (bounds, exact cases)."""

import numpy as np
import pytest

from pnrt import backend, reference
from pnrt.errors import DeviceError, FormatError
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal

from .cases import QUANTIZED, TOKENS, products, random_rows, random_x


@pytest.fixture(scope="module")
def cpu():
    return backend.open("cpu", threads=2)


@pytest.mark.parametrize(("name", "n", "k", "mode"), products())
def test_matmul_has_the_references_bits(cpu, name, n, k, mode):
    rows, x = random_rows(name, n, k), random_x(max(TOKENS), k)
    expected = reference.matmul(name, rows, x, mode)
    weight = cpu.pack(name, rows, k)
    for t in TOKENS:
        got = cpu.matmul(weight, x[:t], mode)
        assert_bits_equal(f"{name} {n}x{k} {mode} T={t}", expected[:t], got)


@pytest.mark.parametrize("name", QUANTIZED)
def test_matmul_does_not_depend_on_threads(cpu, name):
    k = 960 if 960 % FORMATS[name].block == 0 else 1024
    rows, x = random_rows(name, 70, k), random_x(19, k)
    expected = cpu.matmul(cpu.pack(name, rows, k), x)
    one = backend.open("cpu", threads=1)
    assert_bits_equal(name, expected, one.matmul(one.pack(name, rows, k), x))


@pytest.mark.parametrize("name", QUANTIZED)
def test_one_hot_names_every_column(cpu, name):
    """x = e_k must return column k exactly: it names the element that is decoded wrong."""
    k = 320 if 320 % FORMATS[name].block == 0 else 256
    rows = random_rows(name, 18, k)
    got = cpu.matmul(cpu.pack(name, rows, k), np.eye(k, dtype=np.float32), "f32")
    # chains start from +0.0, so a weight of -0.0 comes out as +0.0
    assert_bits_equal(name, FORMATS[name].decode(rows).T + np.float32(0), got)


@pytest.mark.parametrize("name", [n for n in QUANTIZED if FORMATS[n].halves and n != "e4m3"])
def test_integers_are_exact(cpu, name):
    """Scales that are powers of two and small integers for x leave nothing to round."""
    form, rng = FORMATS[name], np.random.default_rng(3)
    k = 640 if 640 % form.block == 0 else 512
    rows = random_rows(name, 16, k)
    blocks = rows.reshape(-1, form.nbytes)
    for offset, _ in form.halves:
        powers = np.float16(2.0) ** rng.integers(-2, 3, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = powers.view(np.uint8).reshape(-1, 2)
    x = rng.integers(-5, 6, (3, k)).astype(np.float32)
    # one 127 per block of 32 makes the activation scale exactly 1
    x[:, ::32] = 127
    exact = x.astype(np.float64) @ form.decode(rows).T.astype(np.float64)
    weight = cpu.pack(name, rows, k)
    for mode in ("q8_0", "f32"):
        got = cpu.matmul(weight, x, mode)
        np.testing.assert_array_equal(got.astype(np.float64), exact, err_msg=f"{name} {mode}")


def test_historical_bug():
    """FORMATS 1.2: an engine that shifts by element instead of pair gets -34 or 8, and 34 or 42."""
    cpu = backend.open("cpu")
    for name, word, rest, count, right in (
        ("pn3t", 0x6F591D10, 0x49244924, 10, 17.0),
        ("pn4t", 0xFD31EC20, 0x88888888, 8, 88.0),
    ):
        row = np.zeros((1, 34), np.uint8)
        row[0, :2] = np.array([1.0], np.float16).view(np.uint8)
        row[0, 2:] = np.array([word] + [rest] * 7, np.uint32).view(np.uint8)
        k = FORMATS[name].block
        x = np.zeros((1, k), np.float32)
        x[0, :count] = np.arange(1, count + 1)
        # a 127 against a zero code keeps the activation scale at 1 without changing the sum
        x[0, 31] = 127
        for mode in ("q8_0", "f32"):
            got = cpu.matmul(cpu.pack(name, row, k), x, mode)
            assert got[0, 0] == right, (name, mode)
            assert reference.matmul(name, row, x, mode)[0, 0] == right


def test_refusal_says_what_there_is(cpu):
    with pytest.raises(DeviceError, match=r"no matmul kernel for iq2_xxs.*pn3t"):
        cpu.pack("iq2_xxs", np.zeros((1, 66), np.uint8), 256)


@pytest.mark.parametrize(
    ("rows", "k"), [(np.zeros((2, 33), np.uint8), 64), (np.zeros((2, 34), np.int8), 64)]
)
def test_pack_refuses_other_shapes(cpu, rows, k):
    with pytest.raises(FormatError, match="needs uint8"):
        cpu.pack("pn4t", rows, k)


def test_matmul_refuses_bad_activations(cpu):
    weight = cpu.pack("pn4t", random_rows("pn4t", 3, 64), 64)
    x = random_x(2, 64)
    with pytest.raises(FormatError, match=r"x is \[2, 63\]; needed \[T, 64\]"):
        cpu.matmul(weight, x[:, :63])
    x[1, 5] = np.nan
    with pytest.raises(FormatError, match=r"x\[1, 5\] is nan"):
        cpu.matmul(weight, x)
    x[1, 5] = 1e8
    with pytest.raises(FormatError, match="65520"):
        cpu.matmul(weight, x)
    with pytest.raises(DeviceError, match="Allowed: q8_0, f32"):
        cpu.matmul(weight, x, "q4_0")


def test_no_tokens(cpu):
    for name in ("pn4t", "f32", "f16"):
        weight = cpu.pack(name, random_rows(name, 3, 64), 64)
        assert cpu.matmul(weight, np.zeros((0, 64), np.float32)).shape == (0, 3)
