"""How a difference of bytes is told: how many blocks, which is the worst, which bits."""

import numpy as np


def assert_blocks_equal(name: str, expected: np.ndarray, got: np.ndarray, nbytes: int) -> None:
    """Raise AssertionError unless rows of blocks are equal.

    Args:
        name: what is compared; the message starts with it.
        expected, got: [N, row_bytes] uint8 of one shape.
        nbytes: bytes per block.
    """
    if expected.shape != got.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {expected.shape}")
    a, b = (rows.reshape(-1, nbytes) for rows in (expected, got))
    wrong = np.bitwise_count(a ^ b).sum(axis=1)
    if not wrong.any():
        return
    i = int(wrong.argmax())
    places = [
        f"byte {j}: {a[i, j]:08b} expected, {b[i, j]:08b} found"
        for j in np.flatnonzero(a[i] != b[i])[:4]
    ]
    row, block = divmod(i, expected.shape[1] // nbytes)
    raise AssertionError(
        f"{name}: {np.count_nonzero(wrong)} of {len(a)} blocks differ; the worst is row {row} "
        f"block {block}, {wrong[i]} bits: {'; '.join(places)}"
    )
