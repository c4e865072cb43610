"""cyb encodings and the bitnet table against their goldens."""

from pathlib import Path

import numpy as np
import pytest

from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal
from tests.formats.report import assert_blocks_equal

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "formats" / "cyb.npz"))


@pytest.mark.parametrize("kind", ["u32", "u16", "q8", "q4", "ternary"])
@pytest.mark.parametrize("group", ["k32", "k256"])
def test_bytes_and_values(kind, group):
    form, expected = FORMATS[f"cyb_{kind}"], GOLDEN[f"{group}_{kind}"]
    got = form.quantize(GOLDEN[f"{group}_x"])
    assert_blocks_equal(f"{kind} {group}", expected, got, form.nbytes)
    assert_bits_equal(kind, GOLDEN[f"{group}_{kind}_dec"], form.decode(expected))


@pytest.mark.parametrize("kind", ["u32", "u16", "q8", "q4", "ternary"])
def test_raw_bytes(kind):
    decoded = FORMATS[f"cyb_{kind}"].decode(GOLDEN[f"raw128_{kind}"])
    assert_bits_equal(kind, GOLDEN[f"raw128_{kind}_dec"], decoded)


def test_q4_is_split_not_interleaved():
    old = GOLDEN["k256_q4_interleaved_old"]
    assert (FORMATS["cyb_q4"].quantize(GOLDEN["k256_x"]) != old).any()


@pytest.mark.parametrize(("kind", "dtype"), [("u32", "<i4"), ("u16", "<i2")])
def test_saturation_and_halves(kind, dtype):
    x, expected = GOLDEN["special_x"], GOLDEN[f"special_{kind}"]
    finite = np.isfinite(x)
    form = FORMATS[f"cyb_{kind}"]
    np.testing.assert_array_equal(form.quantize(x[finite][None]).view(dtype)[0], expected[finite])
    decoded = form.decode(expected.astype(dtype).view(np.uint8)[None])
    assert_bits_equal(kind, GOLDEN[f"special_{kind}_dec"], decoded[0])


def test_the_two_ternary_tables_differ():
    rows = GOLDEN["raw128_bitnet"]
    codes = FORMATS["bitnet_ternary"].decode(rows)
    assert_bits_equal("bitnet", GOLDEN["raw128_bitnet_codes"], codes)
    scaled = codes * GOLDEN["raw128_bitnet_row_scale"][:, None]
    assert_bits_equal("row scale", GOLDEN["raw128_bitnet_dec_row"], scaled)
    byte = np.array([[0b11100100]], np.uint8)
    np.testing.assert_array_equal(FORMATS["cyb_ternary"].decode(byte), [[0, 1, -1, 0]])
    np.testing.assert_array_equal(FORMATS["bitnet_ternary"].decode(byte), [[-1, 0, 1, 0]])


def test_ternary_rows_of_four_decode_and_rows_of_32_quantize():
    form = FORMATS["bitnet_ternary"]
    codes, scale, _ = form.parts(np.zeros((2, 9), np.uint8))
    assert codes.shape == (2, 36)
    assert scale.shape == (2, 2)
    with pytest.raises(FormatError, match="multiple of 32"):
        form.quantize(np.zeros((1, 36), np.float32))


@pytest.mark.parametrize("name", ["cyb_q8", "cyb_q4"])
def test_a_negative_scale_is_a_finding(name):
    form = FORMATS[name]
    rows = np.zeros((1, 2 * form.nbytes), np.uint8)
    rows[0, form.nbytes + 1] = 0xFF
    (finding,) = form.findings(rows)
    assert finding[:4] == (0, 1, form.nbytes, "the scale S is -256")
