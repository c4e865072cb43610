"""The norm kernel's own source, run by the stand-in, against the reference."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cuda.norm import rms_norm
from pnrt.cuda.standin import StandIn
from pnrt.testing import assert_bits_equal


@pytest.mark.parametrize(
    ("tokens", "heads", "n"), [(1, 1, 1), (1, 1, 5120), (5, 3, 100), (2, 4, 64)]
)
def test_rms_norm_has_the_references_bits(tokens, heads, n):
    rng = np.random.default_rng([tokens, heads, n])
    x = rng.standard_normal((tokens, heads, n)).astype(np.float32)
    x[0, 0, 0] = 1e-30
    w = rng.standard_normal(n).astype(np.float32)
    device, width = StandIn(), heads * n
    out = device.allocate(x.nbytes)
    blocks = -(-tokens * heads // 4)
    arguments = (device.upload(x), width, device.upload(w), out, width, n, heads, tokens * heads)
    device.launch(rms_norm, blocks, *arguments, 1e-6)
    assert_bits_equal("rms_norm", reference.rms_norm(x, w, 1e-6), device.read(out, x.shape))


def test_rms_norm_keeps_rows_apart():
    """Rows wider than what is normalized: the rest of a row is not touched."""
    x = np.ones((3, 50), np.float32)
    device = StandIn()
    out = device.allocate(3 * 60 * 4)
    w = device.upload(np.ones(40, np.float32))
    device.launch(rms_norm, 1, device.upload(x), 50, w, out, 60, 40, 1, 3, 0.0)
    got = device.read(out, (3, 60))
    assert_bits_equal("inside", np.ones((3, 40), np.float32), got[:, :40])
    assert np.isnan(got[:, 40:]).all()
