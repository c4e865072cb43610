"""Properties every format has, on drawn weights and drawn bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pnrt.errors import FormatError
from pnrt.formats import FORMATS, base
from tests.formats.report import assert_blocks_equal

FEW = settings(max_examples=12)
SEEDS = st.integers(0, 2**32 - 1)
EXPONENTS = st.floats(-3, 1)
# bits of error a weight may have, relative to the largest of its group (FORMATS 7)
HALF_ULP = 2.0**-11
BOUNDS = {
    "f16": HALF_ULP,
    "bf16": 2.0**-8,
    "q8_0": 1 / 254 + HALF_ULP,
    "q4_0": 1 / 8 + HALF_ULP,
    "q5_0": 1 / 16 + HALF_ULP,
    "q4_1": 2 * (1 / 30 + 3 * HALF_ULP),
    "q5_1": 2 * (1 / 62 + 3 * HALF_ULP),
    "tq1_0": 1 / 2 + HALF_ULP,
    "tq2_0": 1 / 2 + HALF_ULP,
    "mxfp4": 1 / 4,
    "e4m3": 1 / 28 + HALF_ULP,
    "mxfp8": 1 / 16,
    "mxfp8_264": 1 / 16,
}
# quantizing what was decoded gives the bytes back
STABLE = ["f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "cyb_u32"]
STABLE += ["cyb_u16", "cyb_ternary", "bitnet_ternary"]


def draw(form, seed, exponent, rows=4):
    rng = np.random.default_rng(seed)
    columns = 2 * max(form.block, form.group, 32)
    x = rng.standard_t(3, (rows, columns)) * 10.0**exponent
    return x.astype(np.float32)


@pytest.mark.parametrize("name", STABLE)
def test_round_trip(name):
    form = FORMATS[name]

    @FEW
    @given(SEEDS, EXPONENTS)
    def check(seed, exponent):
        rows = form.quantize(draw(form, seed, exponent))
        assert_blocks_equal(name, rows, form.quantize(form.decode(rows)), form.nbytes)

    check()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_order_within_a_group_is_kept(form):
    """Of two weights with one scale the larger never decodes to the smaller value."""

    @FEW
    @given(SEEDS, EXPONENTS)
    def check(seed, exponent):
        x = draw(form, seed, exponent)
        group = form.group or x.shape[1]
        order = np.argsort(x.reshape(-1, group), axis=1)
        decoded = form.decode(form.quantize(x)).reshape(-1, group)
        assert (np.diff(np.take_along_axis(decoded, order, axis=1), axis=1) >= 0).all()

    check()


@pytest.mark.parametrize("name", BOUNDS)
def test_error_bound(name):
    form = FORMATS[name]

    @FEW
    @given(SEEDS, EXPONENTS)
    def check(seed, exponent):
        x = draw(form, seed, exponent)
        error = np.abs(form.decode(form.quantize(x)) - x.astype(np.float64))
        group = form.group or 1
        most = np.abs(x).reshape(-1, group).max(axis=1, keepdims=True)
        slack = 2.0**-24 if name == "f16" else 0
        assert (error.reshape(-1, group) <= BOUNDS[name] * most + slack).all()

    check()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_same_bytes_for_any_thread_count_and_chunk(form, monkeypatch):
    """The bytes depend neither on the thread count nor on how rows are cut into chunks."""
    x = draw(form, 1, 0, rows=9)
    expected = form.quantize(x, threads=1)
    monkeypatch.setattr(base, "CHUNK", x.shape[1])
    for threads in (1, 2):
        got = form.quantize(x, threads=threads)
        assert_blocks_equal(f"{threads} threads", expected, got, form.nbytes)
    np.testing.assert_array_equal(form.decode(expected)[7:], form.decode(expected[7:]))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_any_bytes(form):
    """Bytes without a finding decode to finite weights; findings point into their rows."""
    wide_scale = {"mxfp4", "mxfp8", "mxfp8_264", "q8_K"}

    @FEW
    @given(SEEDS)
    def check(seed):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, 256, (6, 3 * form.nbytes), dtype=np.uint8)
        if form.name == "pn3t":
            rows.reshape(-1, 34)[::2, 3::2] &= 0x7F
        findings = form.findings(rows)
        assert findings == sorted(findings)
        assert form.first_finding(rows) == (findings or [None])[0]
        assert all(
            0 <= f.byte < rows.shape[1] and f.byte // form.nbytes == f.block for f in findings
        )
        finite = np.isfinite(form.decode(rows)).all(axis=1)
        clean = ~np.isin(np.arange(6), [f.row for f in findings])
        # a scale near the top of float32 is valid, and its products may still overflow
        assert finite[clean].all() or form.name in wide_scale

    check()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_name_row_and_element(form, value, monkeypatch):
    x = draw(form, 2, 0, rows=5)
    monkeypatch.setattr(base, "CHUNK", x.shape[1])
    x[3, 7], x[4, 1] = value, value
    with pytest.raises(FormatError, match=f"row 3 element 7 is {value}"):
        form.quantize(x)


SEARCHED = ["pn3t", "pn4t", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
SEARCHED += ["iq4_nl", "iq4_xs", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("name", SEARCHED)
def test_compiled_searches_are_the_plain_ones(name):
    """Byte for byte, on weights of every magnitude, on lattices and on holes."""
    form = FORMATS[name]
    least = -30 if name.startswith("pn") else -130

    @FEW
    @given(SEEDS, st.integers(least, 12), st.integers(0, 4))
    def check(seed, exponent, kind):
        rng = np.random.default_rng(seed)
        x = rng.standard_t(2, (64 if form.block < 256 else 11, form.block))
        if kind == 1:
            # few distinct values: exact halves and equal errors
            x = np.rint(2 * x) / 4
        if kind == 2:
            x = np.abs(x)
        if kind == 3:
            # groups of zeros of either sign, of one value, of one weight
            x[:, : form.block // 2] = rng.choice([0.0, -0.0, 1.0], (len(x), 1))
            x[0] = np.eye(form.block)[3]
        x = np.ldexp(x, exponent).clip(-60000, 60000).astype(np.float32)
        assert_blocks_equal(name, form.quantize_reference(x), form.quantize(x), form.nbytes)

    check()
