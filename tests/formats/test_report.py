"""The report of differing bytes names count, worst block and bits."""

import numpy as np
import pytest

from tests.formats.report import assert_blocks_equal


def test_report():
    expected = np.zeros((3, 8), np.uint8)
    assert_blocks_equal("equal", expected, expected.copy(), 4)
    got = expected.copy()
    got[0, 1], got[2, 6] = 1, 0b11000
    with pytest.raises(AssertionError) as caught:
        assert_blocks_equal("x", expected, got, 4)
    assert str(caught.value) == (
        "x: 2 of 6 blocks differ; the worst is row 2 block 1, 2 bits: "
        "byte 2: 00000000 expected, 00011000 found"
    )
    with pytest.raises(AssertionError, match="shape"):
        assert_blocks_equal("x", expected, got[:1], 4)
