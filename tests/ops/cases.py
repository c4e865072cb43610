"""Shapes, formats and inputs of the op tests: the only place they are listed."""

import numpy as np

from pnrt.formats import FORMATS

QUANTIZED = tuple(f.name for f in FORMATS.values() if f.weight and f.group)
FLOATS = tuple(f.name for f in FORMATS.values() if f.weight and not f.group)
# of each way to hold codes, scales and offsets one: what other instruction sets are tried with
KINDS = ("pn3t", "q2_K", "iq4_xs", "mxfp8")
# N around the panel of 16 rows; K of one block, a partial unit, empty, full and wrapped lanes
SHAPES = {
    1: ((1, 1), (17, 33), (33, 1100)),
    4: ((1, 4), (17, 100), (33, 1056)),
    32: ((1, 32), (17, 96), (33, 1056)),
    64: ((1, 64), (15, 576), (16, 1024), (33, 2112)),
    80: ((1, 80), (17, 240), (16, 400), (33, 5120)),
    256: ((1, 256), (17, 768), (33, 1280)),
}
TOKENS = (1, 2, 8, 19)


def products():
    """Every (format, N, K, activations)."""
    return [
        (name, n, k, mode)
        for name in (*QUANTIZED, *FLOATS)
        for n, k in SHAPES[FORMATS[name].block]
        for mode in (("f32",) if name in FLOATS else ("q8_0", "f32"))
    ]


def random_rows(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random bytes that are valid rows: any code, scales of both signs, some zero or subnormal."""
    form, rng = FORMATS[name], np.random.default_rng([seed, n, k])
    if name in FLOATS:
        return form.quantize(rng.standard_normal((n, k)).astype(np.float32))
    rows = rng.integers(0, 256, (n, form.row_bytes(k)), dtype=np.uint8)
    blocks = rows.reshape(-1, form.nbytes)
    for offset, _ in form.halves:
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        scales[rng.random(scales.shape) < 0.05] = 0
        scales[rng.random(scales.shape) < 0.05] = np.float16(3e-6)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "pn3t":
        blocks[:, 3::2] &= 0x7F
    if name.startswith("cyb_q"):
        blocks[:, 1] &= 0x7F
    for first, count in EXPONENTS.get(name, ()):
        blocks[:, first : first + count] = rng.integers(0, 140, (len(blocks), count))
    if name in ("e4m3", "mxfp8", "mxfp8_264"):
        codes = blocks[:, form.first_code : form.first_code + form.block]
        codes[codes & 0x7F == 0x7F] = 0x80
    return rows


# (first byte, count) of scale exponents in a block
EXPONENTS = {"mxfp4": ((0, 1),), "mxfp8": ((0, 1),), "mxfp8_264": ((256, 8),)}


def random_x(t: int, k: int, seed: int = 1) -> np.ndarray:
    """Activations with an outlier, zeros of both signs and a block of zeros."""
    rng = np.random.default_rng([seed, t, k])
    x = rng.standard_normal((t, k)).astype(np.float32)
    x[rng.random(x.shape) < 0.02] *= 50
    x[rng.random(x.shape) < 0.02] = -0.0
    if k >= 96:
        x[-1, 32:64] = 0
    return x
