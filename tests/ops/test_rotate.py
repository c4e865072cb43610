"""The Hadamard transform and the head order on the CPU, against the reference."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cpu import rotate
from pnrt.jit import run
from pnrt.testing import assert_bits_equal

from .test_steps import control, floats, poison


def transform(x, n, block, signs, inverse, out, threads=2):
    scale = 1 / np.sqrt(float(block))
    args = (x, x.shape[1], 0 if signs is None else signs, out, out.shape[1], n, block, inverse)
    run(rotate.hadamard_kernel, *args, scale, control(len(x)), threads=threads)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("n", "block"), [(6, 2), (24, 8), (48, 16), (160, 32), (192, 64), (2560, 512), (5120, 1024)]
)
def test_hadamard(n, block, inverse):
    x = floats(3, n + 7)
    x[0, :3] = [-0.0, 1e-40, 3e38]
    signs = np.sign(floats(n))
    for given in (None, signs):
        expected = reference.hadamard(x[:, :n], block, given, inverse)
        for threads in (1, 2):
            out = poison(3, n + 3)
            transform(x, n, block, given, inverse, out, threads)
            assert_bits_equal(f"hadamard {n} {block}", expected, np.ascontiguousarray(out[:, :n]))
            assert np.isnan(out[:, n:]).all()


def test_hadamard_in_place_and_back():
    x, signs = floats(2, 320), np.sign(floats(320))
    y = x.copy()
    transform(y, 320, 64, signs, False, y)
    assert_bits_equal("in place", reference.hadamard(x, 64, signs), y)
    transform(y, 320, 64, signs, True, y)
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)


def test_hadamard_of_one_number_is_a_row_of_the_matrix():
    x, out = np.zeros((32, 32), np.float32), poison(32, 32)
    np.fill_diagonal(x, 8.0)
    transform(x, 32, 32, None, False, out)
    i = np.arange(32)
    signs = 1 - 2.0 * (np.bitwise_count(i[:, None] & i) & 1)
    assert_bits_equal("rows", (signs * np.float32(8 / np.sqrt(32.0))).astype(np.float32), out)


@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (48, 16), (4, 4), (3, 1)])
def test_regroup(heads, groups):
    x, out = floats(3, heads * 5), poison(3, heads * 5)
    run(
        rotate.regroup_kernel, x, heads * 5, out, heads * 5, 5, heads, groups, control(3), threads=2
    )
    # head r * groups + g moves to head g * members + r
    expected = x.reshape(3, heads // groups, groups, 5).swapaxes(1, 2).reshape(3, -1)
    assert_bits_equal("regroup", np.ascontiguousarray(expected), out)
