"""Products: golden dots, scalar loops, the truth and its derived bound, one-hot, integers."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from pnrt import reference
from pnrt.errors import FormatError
from pnrt.formats import FORMATS

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
FLOATS = [n for n, f in FORMATS.items() if f.group == 0]
QUANTIZED = [n for n, f in FORMATS.items() if f.group and f.weight]
# file, and what stands for "q", "dot_exact", "dot_mag" in its array names
GOLDEN_NAMES = {
    "e4m3": ("e4m3", "q_away", "dot_exact", "dot_mag"),
    "mxfp8": ("mxfp8", "q33_ceil", "dot_exact_ceil", "dot_mag_ceil"),
    "mxfp8_264": ("mxfp8", "q264_floor", "dot_exact_floor", "dot_mag_floor"),
    "pn3t": ("pn3t", "q", "dot_exact", "dot_mag"),
    "pn4t": ("pn4t", "q", "dot_exact", "dot_mag"),
    "cyb_q8": ("cyb", "q8", "q8_dot_exact", "q8_dot_mag"),
    "cyb_q4": ("cyb", "q4", "q4_dot_exact", "q4_dot_mag"),
    "cyb_ternary": ("cyb", "ternary", "ternary_dot_exact", "ternary_dot_mag"),
}
for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4"):
    GOLDEN_NAMES[name] = (f"ggml_{name.upper()}", "q", "dot_exact", "dot_mag")
for name in ("f32", "f16", "bf16"):
    GOLDEN_NAMES[name] = (f"ggml_{name.upper()}", "q", "dot_f32act", "dot_mag")
f32 = np.float32


def bits(x) -> np.ndarray:
    return np.asarray(x, f32).view(np.uint32)


def random_rows(name: str, n: int, columns: int, scale: str = "normal") -> np.ndarray:
    """Valid rows of random bytes: [n, row bytes]; fp16 fields replaced, reserved bits cleared."""
    fmt = FORMATS[name]
    rng = np.random.default_rng([columns, *name.encode()])
    if name in FLOATS or (not fmt.halves and fmt.block >= 32):
        return fmt.quantize(rng.standard_normal((n, columns)).astype(f32))
    blocks = rng.integers(0, 256, (n * columns // fmt.block, fmt.nbytes), dtype=np.uint8)
    for at, _ in fmt.halves:
        d = rng.standard_normal(len(blocks)) * 0.02
        if scale == "power of two":
            d = 2.0 ** -rng.integers(1, 4, len(blocks))
        blocks[:, at : at + 2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    rows = blocks.reshape(n, -1)
    if name == "pn3t":
        blocks[:, 3::2] &= 0x7F
    if FORMATS[name].findings(rows):
        return fmt.quantize(rng.standard_normal((n, columns)).astype(f32))
    return rows


def columns_of(name: str, about: int) -> int:
    """The multiple of the format's block that is nearest below `about` (at least one block)."""
    block = FORMATS[name].block
    return max(1, about // block) * block


# activations


def test_quantize_q8_0_is_the_q8_0_format():
    x = np.random.default_rng(2).standard_normal((7, 96)).astype(f32) * f32(3)
    x[0, :32], x[1, 5:40] = 0, -0.0
    x[2, :32] = np.arange(32) * 0.5 - 8
    x[2, 0] = 127  # scale 1: every other element is an exact half
    # halves of steps that are no powers of two, where ggml's vector rule codes differently
    top = np.random.default_rng(3).uniform(1, 2, (4, 3, 1)).astype(f32)
    x[3:] = ((np.arange(32, dtype=f32) + f32(0.5)) * (top / f32(127))).reshape(4, 96)
    x[3:, 31::32] = top[..., 0]
    inverse, other = f32(1) / (top / f32(127)), f32(127) / top
    steps = x[3:].reshape(4, 3, 32)
    assert (np.rint(steps * other) != np.floor(steps * inverse + f32(0.5))).any()
    q, dx = reference.quantize_q8_0(x)
    parts = FORMATS["q8_0"].parts(FORMATS["q8_0"].quantize(x))
    np.testing.assert_array_equal(q, parts.codes)
    np.testing.assert_array_equal(bits(dx), bits(parts.scale))
    assert (q[2, 1:4] == [-8, -7, -7]).all()  # -7.5, -7, -6.5: halves away from zero


def test_quantize_q8_0_pads_with_zeros_and_keeps_tiny_blocks_defined():
    x = np.full((1, 40), 1e-40, f32)
    x[0, :32] = 2
    q, dx = reference.quantize_q8_0(x)
    assert q.shape == (1, 64)
    assert dx.shape == (1, 2)
    assert (q[0, :32] == 127).all()
    assert not q[0, 40:].any()
    assert dx[0, 1] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e7])
def test_quantize_q8_0_refuses(bad):
    x = np.zeros((3, 64), f32)
    x[2, 33] = bad
    with pytest.raises(FormatError, match=r"token 2, element 3\d: found"):
        reference.quantize_q8_0(x)


# products


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_dots(name):
    """Dots by other people's code; q8_1 activations have the codes and scales of q8_0."""
    file, rows, dot, magnitude = GOLDEN_NAMES[name]
    golden = np.load(GOLDEN / f"{file}.npz")
    groups = [k.removesuffix(f"_{dot}") for k in golden if k.endswith(f"_{dot}")]
    groups = [g for g in groups if f"{g}_{rows}" in golden]
    assert len(groups) >= 2
    for group in groups:
        act = golden[f"{group}_act"]
        if name not in FLOATS and str(golden.get(f"{group}_act_type", "Q8_0")) == "Q8_0":
            q, dx = reference.quantize_q8_0(act)
            parts = FORMATS["q8_0"].parts(golden[f"{group}_actq"])
            np.testing.assert_array_equal(q, parts.codes)
            np.testing.assert_array_equal(dx, parts.scale)
        weights = golden[f"{group}_{rows}"]
        error = abs(reference.matmul(name, weights, act).T - golden[f"{group}_{dot}"])
        if f"{group}_{magnitude}" in golden:
            # the yardstick does not cover what leaves float32's normal range
            allowed = 1e-6 * golden[f"{group}_{magnitude}"] + 2.0**-140
        else:
            allowed = reference.exact.bound(name, weights, act).T
        assert (error <= allowed).all(), group


def scalar_product(name: str, row: np.ndarray, x: np.ndarray) -> np.float32:
    """NUMERICS 1 as it is written, one row and one token, nothing vectorized."""
    fmt = FORMATS[name]
    codes, dw, offset = (None if a is None else a[0] for a in fmt.parts(row[None]))
    q, dx = (a[0] for a in reference.quantize_q8_0(x[None]))
    columns, lanes = len(codes), np.zeros(32, f32)
    borders = [0, 32, 64, 80, 96, 128, 160] if name == "pn3t" else [0, 32]
    if fmt.group == 16:
        borders = [0, 16, 32]
    for u in range(-(-columns // borders[-1])):
        for start, stop in itertools.pairwise(borders):
            k = range(u * borders[-1] + start, min(u * borders[-1] + stop, columns))
            if not k:
                continue
            group, scale = k[0] // fmt.group, dx[k[0] // 32]
            total = sum(int(codes[i]) * int(q[i]) for i in k)
            lane = u % 32
            lanes[lane] = reference.fma(f32(total), dw[group] * scale, lanes[lane])
            if offset is not None:
                total = sum(int(q[i]) for i in k)
                lanes[lane] = reference.fma(f32(total), offset[group] * scale, lanes[lane])
    for s in (16, 8, 4, 2, 1):
        lanes = lanes[:s] + lanes[s : 2 * s]
    return lanes[0]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("about", [80, 240, 1360, 5520])
def test_product_is_the_scalar_loop(name, about):
    columns = columns_of(name, about + 4)
    rows = random_rows(name, 1, columns)
    x = np.random.default_rng(about).standard_normal((1, columns)).astype(f32)
    want = scalar_product(name, rows[0], x[0])
    assert bits(reference.matmul(name, rows, x))[0, 0] == bits(want)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "pn3t", "q4_1"])
def test_f32_product_is_the_scalar_loop(name):
    columns = columns_of(name, 1200) if name not in FLOATS else 1203
    rows = random_rows(name, 1, columns)
    x = np.random.default_rng(4).standard_normal((1, columns)).astype(f32)
    w, lanes, unit = FORMATS[name].decode(rows)[0], np.zeros(32, f32), 160 if name == "pn3t" else 32
    for k in range(columns):
        lane = k // unit % 32
        lanes[lane] = reference.fma(w[k], x[0, k], lanes[lane])
    for s in (16, 8, 4, 2, 1):
        lanes = lanes[:s] + lanes[s : 2 * s]
    assert bits(reference.matmul(name, rows, x, activations="f32"))[0, 0] == bits(lanes[0])


@pytest.mark.parametrize("name", [*QUANTIZED, *FLOATS])
@pytest.mark.parametrize("activations", ["q8_0", "f32"])
def test_product_stays_within_its_derived_bound(name, activations):
    columns = columns_of(name, 5120)
    rows = random_rows(name, 4, columns)
    x = np.random.default_rng(5).standard_normal((3, columns)).astype(f32)
    y = reference.matmul(name, rows, x, activations)
    exact = reference.exact.matmul(name, rows, x, activations)
    bound = reference.exact.bound(name, rows, x, activations)
    assert y.dtype == f32
    assert y.shape == (3, 4)
    assert (abs(y - exact) <= bound).all()
    # the bound is sharp enough to notice one weight in 5120 that is not there
    missing = FORMATS[name].decode(rows)
    term = abs(missing[None] * x[:, None]).max(-1)
    assert (bound < term).all()


@pytest.mark.parametrize("name", [*QUANTIZED, *FLOATS])
def test_one_hot_products_return_the_column(name):
    columns = columns_of(name, 240)
    rows = random_rows(name, 3, columns)
    w = FORMATS[name].decode(rows)
    y = reference.matmul(name, rows, np.eye(columns, dtype=f32), activations="f32")
    np.testing.assert_array_equal(y, w.T)
    # 127 e_k has the scale 1 and one code, 127: the product is 127 w rounded
    x = 127 * np.eye(columns, dtype=f32)
    y, want = reference.matmul(name, rows, x), 127 * w.T.astype(float)
    if is_product(name, rows, w):
        np.testing.assert_array_equal(y, want.astype(f32))
    else:
        assert name not in ("pn3t", "pn4t", "q4_0", "q8_0", *FLOATS)
        assert (abs(y - want) <= reference.exact.bound(name, rows, x)).all()


def is_product(name: str, rows: np.ndarray, w: np.ndarray) -> bool:
    """Whether decoded weights are scale times code without an offset or a rounding."""
    fmt = FORMATS[name]
    if fmt.group == 0:
        return True
    codes, scale, offset = fmt.parts(rows)
    scale = np.repeat(scale.astype(float), fmt.group, axis=1)[:, : w.shape[1]]
    return offset is None and np.array_equal(codes * scale, w)


@pytest.mark.parametrize("name", ["pn3t", "pn4t", "q4_0", "q4_1", "q8_0"])
def test_integer_products_are_exact(name):
    columns = columns_of(name, 1280)
    rows = random_rows(name, 5, columns, scale="power of two")
    x = np.random.default_rng(6).integers(-127, 128, (4, columns)).astype(f32)
    x[:, ::32] = 127  # the scale of each block of activations is 1
    exact = x.astype(float) @ FORMATS[name].decode(rows).astype(float).T
    for activations in ("q8_0", "f32"):
        y = reference.matmul(name, rows, x, activations)
        np.testing.assert_array_equal(y, exact)


@pytest.mark.parametrize(
    ("name", "word", "rest", "right", "wrong"),
    [
        ("pn3t", 0x6F591D10, 0x49244924, 17, (-34, 8)),
        ("pn4t", 0xFD31EC20, 0x88888888, 88, (34, 42)),
    ],
)
def test_historical_bug(name, word, rest, right, wrong):
    """The product that went wrong where an element index stood for a pair index."""
    fmt = FORMATS[name]
    words = np.array([word, *[rest] * 7], "<u4").view(np.uint8)
    row = np.concatenate([np.array([1], "<f2").view(np.uint8), words])[None]
    used = {"pn3t": 10, "pn4t": 8}[name]
    x = np.zeros((1, fmt.block), f32)
    x[0, :used] = np.arange(1, used + 1)
    x[0, 31] = 127  # meets a weight of zero and makes the activation scale 1
    for activations in ("q8_0", "f32"):
        y = reference.matmul(name, row, x, activations)
        assert y[0, 0] == right
        assert y[0, 0] not in wrong


@pytest.mark.parametrize("name", ["pn3t", "q4_1"])
def test_tokens_and_rows_are_independent(name):
    columns = columns_of(name, 640)
    rows = random_rows(name, 6, columns)
    x = np.random.default_rng(7).standard_normal((5, columns)).astype(f32)
    y = bits(reference.matmul(name, rows, x))
    for t in range(5):
        np.testing.assert_array_equal(
            bits(reference.matmul(name, rows, x[t : t + 1])), y[t : t + 1]
        )
    np.testing.assert_array_equal(bits(reference.matmul(name, rows[4:], x)), y[:, 4:])
    assert reference.matmul(name, rows, x[:0]).shape == (0, 6)


def test_matmul_refuses():
    rows, x = random_rows("pn4t", 2, 64), np.zeros((1, 64), f32)
    with pytest.raises(FormatError, match=r"'q9_9': unknown; known are"):
        reference.matmul("q9_9", rows, x)
    with pytest.raises(FormatError, match=r"activations 'f16': unknown; choose one of"):
        reference.matmul("pn4t", rows, x, activations="f16")
    with pytest.raises(FormatError, match=r"rows of 64 weights: activations have shape \(1, 32\)"):
        reference.matmul("pn4t", rows, x[:, :32])


def test_embedding_is_decoded_rows():
    rows = random_rows("pn4t", 9, 128)
    got = reference.embedding("pn4t", rows, [8, 0, 8])
    np.testing.assert_array_equal(bits(got), bits(FORMATS["pn4t"].decode(rows)[[8, 0, 8]]))
