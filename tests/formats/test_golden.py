"""Decode, quantize and findings against bytes made by other people's code."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.formats.floats import bf16_bits
from pnrt.testing import assert_bits_equal
from tests.formats.report import assert_blocks_equal

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
EXACT = [
    "f32",
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q8_K",
    "tq1_0",
    "tq2_0",
    "mxfp4",
    "nvfp4",
    "pn3t",
    "pn4t",
]
SEARCHED = ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"]
OVERFLOWING = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_K", "iq4_nl", "tq2_0"]
DECODED = [*EXACT, *SEARCHED, "q8_1"]


def golden(name: str) -> dict[str, np.ndarray]:
    stem = name if name.startswith("pn") else "ggml_" + name.upper()
    return dict(np.load(GOLDEN / f"{stem}.npz"))


def groups(data, suffix):
    return sorted(key.removesuffix(suffix) for key in data if key.endswith(suffix))


@pytest.mark.parametrize("name", DECODED)
def test_decode(name):
    data = golden(name)
    found = groups(data, "_deq")
    assert found
    for group in found:
        got = FORMATS[name].decode(data[f"{group}_q"])
        assert_bits_equal(f"{name} {group}", data[f"{group}_deq"], got)


@pytest.mark.parametrize("name", EXACT)
def test_quantize_bytes(name):
    data, form, compared = golden(name), FORMATS[name], 0
    for group in groups(data, "_deq"):
        if f"{group}_x" not in data:
            continue
        q = data[f"{group}_q"]
        good = data.get(f"{group}_bytes_ok", np.ones(len(q), bool))
        got = form.quantize(data[f"{group}_x"])
        assert_blocks_equal(f"{name} {group}", q[good], got[good], form.nbytes)
        compared += int(good.sum())
    assert compared > 20


def rmse(x, decoded):
    return np.sqrt(((decoded.astype(np.float64) - x) ** 2).mean(axis=1))


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_error_of_every_row(name):
    """RMSE at most 1.02 times ggml's own on the same row, and ggml's bytes."""
    data, form = golden(name), FORMATS[name]
    same = rows = 0
    for group in groups(data, "_deq"):
        if f"{group}_x" in data:
            x, q = data[f"{group}_x"], data[f"{group}_q"]
            got = form.quantize(x)
            ours, theirs = rmse(x, form.decode(got)), rmse(x, data[f"{group}_deq"])
            assert (ours <= 1.02 * theirs).all(), data[f"{group}_cls"][ours > 1.02 * theirs]
            same, rows = same + np.count_nonzero((got == q).all(axis=1)), rows + len(q)
    assert rows > 20
    # where ggml minimizes absolute errors, pnrt minimizes squared ones as well
    assert same >= rows - 2 or name == "q2_K"


def test_q2_K_is_clearly_nearer_than_ggml():
    data, form = golden("q2_K"), FORMATS["q2_K"]
    x = data["k1280_x"]
    theirs, ours = rmse(x, data["k1280_deq"]), rmse(x, form.decode(form.quantize(x)))
    assert (ours <= theirs).all()
    assert ours.sum() < 0.95 * theirs.sum()


# what ggml_quantize_chunk of llama.cpp b11434 wrote for inputs where one rounding more or less,
# or in another order, picks another scale
ONE_ROUNDING = [
    ("iq4_nl", np.full(32, 0.21), "c696" + "00" * 16),
    ("iq4_nl", 0.35 * np.eye(32)[5], "581a" + "88" * 5 + "8f" + "88" * 10),
    ("iq4_xs", np.full(256, 0.21), "6303" + "00" * 134),
    ("nvfp4", np.full(64, 1488.0), "7e" * 4 + "55" * 32),
    ("nvfp4", np.full(64, 1487.0), "77" * 36),
]


@pytest.mark.parametrize(("name", "x", "expected"), ONE_ROUNDING)
def test_bytes_that_hang_on_one_rounding(name, x, expected):
    form, x = FORMATS[name], x.astype(np.float32)[None]
    assert form.quantize(x)[0].tobytes().hex() == expected
    if name.startswith("iq4"):
        assert form.quantize_reference(x)[0].tobytes().hex() == expected


@pytest.mark.parametrize("name", ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"])
@pytest.mark.parametrize("large", [1e13, 1e16, 3e38])
def test_searches_that_overflow_raise(name, large):
    """The sums of a search overflow long before the weights: no scale must come out as zero."""
    for sign in (1, -1):
        x = np.full((1, FORMATS[name].block), sign * large, np.float32)
        with pytest.raises(FormatError, match="too large for this format"):
            FORMATS[name].quantize(x)


def test_q8_1_bytes_and_its_overflowing_sum():
    data, form = golden("q8_1"), FORMATS["q8_1"]
    for group in groups(data, "_deq"):
        x, q, good = data[f"{group}_x"], data[f"{group}_q"], data[f"{group}_bytes_ok"]
        # the sum of a row of large weights may not fit a half: ggml stores infinity, pnrt raises
        overflow = np.isin(np.arange(len(q)), [f.row for f in form.findings(q)])
        for row in x[overflow]:
            with pytest.raises(FormatError, match=r"scale s is -?inf"):
                form.quantize(row[None])
        good = good & ~overflow
        assert_blocks_equal(f"q8_1 {group}", q[good], form.quantize(x[good]), 36)


@pytest.mark.parametrize("name", OVERFLOWING)
def test_weights_too_large_for_the_scale_raise(name):
    data, form = golden(name), FORMATS[name]
    for x in data["ovf_x"]:
        with pytest.raises(FormatError, match="too large for this format"):
            form.quantize(x[None])


def test_q6_K_raises_where_ggml_writes_zeros():
    data, form = golden("q6_K"), FORMATS["q6_K"]
    lost = ~data["ovf_q"].any(axis=1)
    assert lost.any()
    for x in data["ovf_x"][lost]:
        with pytest.raises(FormatError, match="too large for this format"):
            form.quantize(x[None])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_clipping_formats_clip_as_ggml(name):
    data = golden(name)
    got = FORMATS[name].quantize(data["ovf_x"])
    assert_blocks_equal(name, data["ovf_q"], got, FORMATS[name].nbytes)


@pytest.mark.parametrize("name", ["pn3t", "pn4t"])
def test_pn_cases_the_page_leaves_open(name):
    data, form = golden(name), FORMATS[name]
    assert_blocks_equal("ties go to the larger m", data["tie_q"], form.quantize(data["tie_x"]), 34)
    assert not np.array_equal(data["tie_q"], data["tie_q_if_tie_went_to_smaller_m"])
    assert_blocks_equal("gaps", data["gap_q"], form.quantize(data["gap_x"]), 34)
    with pytest.raises(FormatError, match="no fp16 scale reaches it"):
        form.quantize(np.full((1, form.block), 3e38, np.float32))


@pytest.mark.parametrize("name", ["pn3t", "pn4t"])
def test_pn_search_has_the_plain_versions_bytes_for_any_thread_count(name):
    form, rng = FORMATS[name], np.random.default_rng(5)
    x = (rng.standard_t(3, (37, 4 * form.block)) * 0.02).astype(np.float32)
    x[3, : form.block] = 0
    expected = form.quantize_reference(x)
    for threads in (1, 2):
        got = form.quantize(x, threads=threads)
        assert_blocks_equal(f"{threads} threads", expected, got, 34)


@pytest.mark.parametrize("name", ["pn3t", "pn4t"])
def test_historical_bug_words(name):
    """FORMATS 1.2: 41 words, what they hold, and what two wrong shifts would read."""
    data, form = golden(name), FORMATS[name]
    count = data["bug_right"].shape[1]
    rows = np.zeros((len(data["bug_word"]), 34), np.uint8)
    rows[:, :2] = np.array([1.0], np.float16).view(np.uint8)
    rows[:, 2:6] = data["bug_word"].astype("<u4").view(np.uint8).reshape(-1, 4)
    zero = 1 << (2 if name == "pn3t" else 3)
    codes = form.decode(rows)[:, :count] + zero
    np.testing.assert_array_equal(codes, data["bug_right"])
    for wrong in ("bug_wrong_pairshift", "bug_wrong_contiguous"):
        assert (codes != data[wrong]).any()
    # and packing the codes gives the word back
    encoded = form.pack(np.ones(len(codes), np.float16), form.parts(rows).codes + zero)
    np.testing.assert_array_equal(encoded[:, 2:6], rows[:, 2:6])


@pytest.mark.parametrize("name", DECODED)
def test_findings_agree_with_the_row_check(name):
    data, form = golden(name), FORMATS[name]
    if "val_q" not in data:
        pytest.skip(f"no validity cases were recorded for {name}")
    bad = {finding.row for finding in form.findings(data["val_q"])}
    expected = set(np.flatnonzero(~data["val_ok"].astype(bool)))
    assert bad == expected, [data["val_why"][i] for i in bad ^ expected]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_input_raises(name, value):
    form = FORMATS[name]
    k = max(form.block, 2) * 2
    x = np.zeros((3, k), np.float32)
    x[2, k - 1] = value
    with pytest.raises(FormatError, match="row 2") as caught:
        form.quantize(x)
    assert str(k - 1) in str(caught.value)


@pytest.mark.parametrize(("name", "element"), [("nvfp4", 4), ("mxfp4", 1)])
def test_every_scale_byte(name, element):
    data, form = golden(name), FORMATS[name]
    rows = np.zeros((256, form.nbytes), np.uint8)
    rows[:, 0] = np.arange(256)
    # code 2 is the value one
    rows[:, element] = 2
    assert_bits_equal(name, data["scale_table"], form.decode(rows)[:, 0])


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_conversions_of_corner_cases(name):
    data = golden(name)
    x, expected = data["conv_x"], data["conv_bits"]
    with np.errstate(over="ignore"):
        got = bf16_bits(x) if name == "bf16" else x.astype(np.float16).view(np.uint16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got[number], expected[number])
    values = FORMATS[name].decode(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[None])
    assert np.isnan(values[0, got[~number]]).all()
    known = np.where(np.isnan(values), np.float32(0), values)
    assert hashlib.sha256(known.tobytes()).hexdigest() == str(data["all_decode_sha256"])


def test_every_half():
    bits = np.arange(1 << 16, dtype=np.uint16)
    rows = bits.view(np.uint8).reshape(1, -1)
    assert_bits_equal(
        "f16", bits.view(np.float16).astype(np.float32)[None], FORMATS["f16"].decode(rows)
    )


@pytest.mark.parametrize("name", DECODED)
def test_row_length_is_checked(name):
    form = FORMATS[name]
    if form.block > 1:
        with pytest.raises(FormatError):
            form.row_bytes(form.block + 1)
    with pytest.raises(FormatError):
        form.decode(np.zeros((1, form.nbytes * 2 + 1), np.uint8))
