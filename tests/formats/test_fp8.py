"""8-bit floats: every code, both roundings, both scale rules, both layouts."""

from pathlib import Path

import numpy as np
import pytest

from pnrt.errors import FormatError
from pnrt.formats import FORMATS, fp8
from pnrt.testing import assert_bits_equal
from tests.formats.report import assert_blocks_equal

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / f"{name}.npz"))


def test_every_code_and_every_exponent():
    data = golden("fp8_elements")
    assert_bits_equal("e4m3", data["e4m3_decode"], fp8.VALUES)
    assert_bits_equal("e8m0", data["e8m0_decode"], fp8.exponent_scale(np.arange(256)))
    finite = np.isfinite(fp8.VALUES)
    assert finite.sum() == 254
    np.testing.assert_array_equal(fp8.INTEGERS[finite], 512 * fp8.VALUES[finite])


@pytest.mark.parametrize(
    ("encode", "expected"), [(fp8.encode_away, "enc_away"), (fp8.encode_even, "enc_rne")]
)
def test_rounding(encode, expected):
    data = golden("fp8_elements")
    assert_blocks_equal(expected, data[expected][:, None], encode(data["enc_x"])[:, None], 1)


def test_every_finite_code_comes_back():
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    np.testing.assert_array_equal(fp8.encode_even(fp8.VALUES[codes]), codes)
    # the proposal's rule knows no -0
    expected = np.where(codes == 0x80, 0, codes)
    np.testing.assert_array_equal(fp8.encode_away(fp8.VALUES[codes]), expected)


@pytest.mark.parametrize("group", ["k32", "k96", "k256", "k1024"])
def test_e4m3(group):
    data, form = golden("e4m3"), FORMATS["e4m3"]
    got = form.quantize(data[f"{group}_x"])
    assert_blocks_equal(f"e4m3 {group}", data[f"{group}_q_away"], got, 34)
    for rule in ("away", "rne"):
        decoded = form.decode(data[f"{group}_q_{rule}"])
        assert_bits_equal(f"{group} {rule}", data[f"{group}_deq_{rule}"], decoded)


def test_e4m3_raw_bytes_and_findings():
    data, form = golden("e4m3"), FORMATS["e4m3"]
    assert_bits_equal("raw", data["raw128_deq"], form.decode(data["raw128_q"]))
    bad = {finding.row for finding in form.findings(data["val_q"])}
    assert bad == set(np.flatnonzero(~data["val_ok"]))
    places = [(f.row, f.block, f.byte, f.found) for f in form.findings(data["val_q"])]
    assert (2, 1, 40, "code 0xff is a NaN") in places


@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize(("name", "layout"), [("mxfp8", "q33"), ("mxfp8_264", "q264")])
def test_mxfp8(name, layout, rule):
    data, form = golden("mxfp8"), FORMATS[name].with_rule(rule)
    for group in ("k256", "k768"):
        expected = data[f"{group}_{layout}_{rule}"]
        got = form.quantize(data[f"{group}_x"])
        assert_blocks_equal(f"{name} {rule} {group}", expected, got, form.nbytes)
        assert_bits_equal(name, data[f"{group}_deq_{rule}"], form.decode(expected))
    raw = form.decode(data[f"raw256_{layout}"])
    assert_bits_equal(name, data["raw256_deq"], raw)
    assert FORMATS[name].rule == "ceil"


def test_unknown_scale_rule():
    with pytest.raises(FormatError, match="ceil and floor"):
        FORMATS["mxfp8"].with_rule("nearest")


@pytest.mark.parametrize(("name", "exponent"), [("mxfp8", 33), ("mxfp8_264", 257)])
def test_mxfp8_findings(name, exponent):
    form = FORMATS[name]
    rows = np.zeros((2, form.row_bytes(256)), np.uint8)
    rows[1, exponent] = 255
    rows[1, 5] = 0xFF
    found = [(f.row, f.block, f.byte) for f in form.findings(rows)]
    assert found == [(1, 0, 5), (1, exponent // form.nbytes, exponent)]


@pytest.mark.parametrize("name", ["e4m3", "mxfp8", "mxfp8_264"])
def test_integer_codes_give_the_decoded_weights(name):
    form, rng = FORMATS[name], np.random.default_rng(3)
    rows = form.quantize(rng.standard_normal((4, 512), dtype=np.float32))
    codes, scale, offset = form.parts(rows)
    assert offset is None
    assert np.abs(codes).max() == 512 * 448 or name != "e4m3"
    product = codes.reshape(4, -1, 32).astype(np.float32) * scale[:, :, None]
    np.testing.assert_array_equal(product.reshape(4, -1), form.decode(rows))
