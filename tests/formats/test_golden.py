"""Decode, quantize and findings against bytes made by other people's code."""

from pathlib import Path

import numpy as np
import pytest

from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal

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
SEARCHED = ["q2_K", "q3_K", "q6_K", "iq4_xs"]
DECODED = [*EXACT, "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "q8_1"]


def golden(name: str) -> dict[str, np.ndarray]:
    stem = name if name.startswith("pn") else "ggml_" + name.upper()
    return dict(np.load(GOLDEN / f"{stem}.npz"))


def groups(data, suffix):
    return sorted(key.removesuffix(suffix) for key in data if key.endswith(suffix))


def assert_blocks_equal(name, expected, got, nbytes):
    """Equality of rows that reports the count of bad blocks, the worst one and its bits."""
    a, b = (rows.reshape(-1, nbytes) for rows in (expected, got))
    wrong = np.bitwise_count(a ^ b).sum(1)
    if wrong.any():
        i = int(wrong.argmax())
        pytest.fail(
            f"{name}: {np.count_nonzero(wrong)} of {len(a)} blocks differ; worst is block {i}, "
            f"{wrong[i]} bits: expected {a[i].tobytes().hex()}, got {b[i].tobytes().hex()}"
        )


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


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_error(name):
    """RMSE at most 1.02 times ggml's own on the same rows."""
    data, form = golden(name), FORMATS[name]
    ours = theirs = 0.0
    for group in groups(data, "_deq"):
        if f"{group}_x" in data:
            x = data[f"{group}_x"].astype(np.float64)
            scale = np.maximum(np.sqrt((x**2).mean(1)), 1e-30)
            ours += (
                np.sqrt(((form.decode(form.quantize(data[f"{group}_x"])) - x) ** 2).mean(1)) / scale
            ).sum()
            theirs += (np.sqrt(((data[f"{group}_deq"] - x) ** 2).mean(1)) / scale).sum()
    assert theirs > 0
    assert ours <= 1.02 * theirs


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
