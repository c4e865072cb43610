"""Shapes, formats and inputs of the op tests: the only place they are listed."""

import numpy as np

from pnrt.formats import FORMATS

QUANTIZED = ("pn3t", "pn4t", "q8_0", "q4_0", "q4_1")
FLOATS = ("f32", "f16", "bf16")
# N around the panel of 16 rows; K of one block, a partial unit, empty, full and wrapped lanes
SHAPES = {
    "pn3t": ((1, 80), (17, 240), (16, 400), (33, 5120)),
    "pn4t": ((1, 64), (15, 576), (16, 1024), (33, 2112)),
    "q8_0": ((1, 32), (17, 96), (33, 1056)),
    "q4_0": ((1, 32), (17, 96), (33, 1056)),
    "q4_1": ((1, 32), (17, 96), (33, 1056)),
    "f32": ((1, 1), (17, 33), (33, 1100)),
    "f16": ((1, 1), (17, 33), (33, 1100)),
    "bf16": ((1, 1), (17, 33), (33, 1100)),
}
TOKENS = (1, 2, 8, 19)


def products():
    """Every (format, N, K, activations)."""
    return [
        (name, n, k, mode)
        for name, shapes in SHAPES.items()
        for n, k in shapes
        for mode in (("f32",) if name in FLOATS else ("q8_0", "f32"))
    ]


def random_rows(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random bytes that are valid rows: any code, scales of both signs, some zero or subnormal."""
    form, rng = FORMATS[name], np.random.default_rng([seed, n, k])
    if name in FLOATS:
        return form.quantize(rng.standard_normal((n, k)).astype(np.float32))
    rows = rng.integers(0, 256, (n, form.row_bytes(k)), dtype=np.uint8)
    blocks = rows.reshape(-1, form.nbytes)
    scales = (rng.standard_normal((len(blocks), 2)) * 0.01).astype(np.float16)
    scales[rng.random(scales.shape) < 0.05] = 0
    scales[rng.random(scales.shape) < 0.05] = np.float16(3e-6)
    halves = 2 if name == "q4_1" else 1
    blocks[:, : 2 * halves] = scales[:, :halves].copy().view(np.uint8)
    if name == "pn3t":
        blocks[:, 3::2] &= 0x7F
    return rows


def random_x(t: int, k: int, seed: int = 1) -> np.ndarray:
    """Activations with an outlier, zeros of both signs and a block of zeros."""
    rng = np.random.default_rng([seed, t, k])
    x = rng.standard_normal((t, k)).astype(np.float32)
    x[rng.random(x.shape) < 0.02] *= 50
    x[rng.random(x.shape) < 0.02] = -0.0
    if k >= 96:
        x[-1, 32:64] = 0
    return x
