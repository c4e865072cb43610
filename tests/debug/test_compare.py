"""Two files side by side: what differs, how far, and where first."""

import dataclasses
import json
import struct

import numpy as np
import pytest

from pnrt.container.cyb_model import write_model
from pnrt.container.gguf import TensorPlan
from pnrt.debug import compare
from pnrt.debug.compare import compare_files
from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from tests.builders import entry, tiny


def weights(rows=6, columns=320, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def write(path, x, kind="pn3t", keys=(), name="t"):
    """A file with one tensor of that format; x: float32 to quantize, or uint8 rows."""
    rows = FORMATS[kind].quantize(x) if x.dtype == np.float32 else x
    shape = (len(rows), FORMATS[kind].columns(rows.shape[1]))
    return tiny(path, list(keys), {name: (FORMATS[kind].type_id, shape, rows)})


def one(a, b):
    (tensor,) = compare_files(a, b)["tensors"]
    return tensor


def test_the_same(tmp_path):
    a, b = (write(tmp_path / name, weights()) for name in "ab")
    calls = []
    result = compare_files(a, b, lambda *step: calls.append(step))
    assert result["equal"]
    assert result["metadata"] == []
    assert result["tensors"][0].kind == "same"
    assert calls == [("t", 0, 1)]
    json.dumps([dataclasses.asdict(t) for t in result["tensors"]])


# all rows at once, and two at a time
@pytest.mark.parametrize("chunk", [1 << 22, 640])
def test_the_first_block_that_differs(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(compare, "CHUNK", chunk)
    rows = FORMATS["pn3t"].quantize(weights())
    changed = rows.copy()
    # one code of block 2 of row 3, and the scale of block 0 of row 5
    changed[3, 2 * 34 + 2] ^= 1
    changed[5, 1] ^= 0x40
    a, b = write(tmp_path / "a", rows), write(tmp_path / "b", changed)
    found = one(a, b)
    assert found.kind == "differs"
    assert found.first == (3, 2)
    assert found.blocks == 2
    assert bytes.fromhex(found.a_hex) == rows[3, 68:102].tobytes()
    assert bytes.fromhex(found.b_hex) == changed[3, 68:102].tobytes()
    x, y = FORMATS["pn3t"].decode(rows), FORMATS["pn3t"].decode(changed)
    difference = y.astype(np.float64) - x
    assert found.max_error == np.abs(difference).max()
    energy = np.square(x.astype(np.float64)).sum()
    assert found.relative_rms == pytest.approx((np.square(difference).sum() / energy) ** 0.5)


def test_ulp(tmp_path):
    x = np.float32([[1, -1, 0, 3]])
    y = x.copy()
    y[0, 1] = np.nextafter(x[0, 1], np.float32(-2))
    found = one(write(tmp_path / "a", x, "f32"), write(tmp_path / "b", y, "f32"))
    assert (found.ulp, found.first, found.blocks) == (1, (0, 1), 1)
    y = -x
    found = one(write(tmp_path / "a", x, "f32"), write(tmp_path / "b", y, "f32"))
    assert found.ulp == 2 * int(np.float32(3).view(np.int32))


def test_other_bytes_equal_values(tmp_path):
    x = np.float32([[1, 2, 0, -4] * 8])
    found = one(write(tmp_path / "a", x, "f32"), write(tmp_path / "b", x, "f16"))
    assert (found.kind, found.a, found.b, found.first, found.ulp) == (
        "equal",
        "f32",
        "f16",
        None,
        0,
    )


def test_two_formats_in_blocks_of_the_first(tmp_path):
    x = weights(2, 320)
    a, b = write(tmp_path / "a", x, "pn3t"), write(tmp_path / "b", x, "q8_0")
    found = one(a, b)
    assert (found.kind, found.a, found.b) == ("differs", "pn3t", "q8_0")
    assert len(found.a_hex) == len(found.b_hex) == 68
    assert found.blocks == 8
    assert 0.05 < found.relative_rms < 0.3


def test_a_nan_shows(tmp_path):
    x = np.float32([[1, 2, 3, 4]])
    y = x.copy()
    y[0, 2] = np.nan
    found = one(write(tmp_path / "a", x, "f32"), write(tmp_path / "b", y.view(np.uint8), "f32"))
    assert found.kind == "differs"
    assert np.isnan(found.max_error)
    assert found.first == (0, 2)


def test_names_shapes_and_unknown_types(tmp_path):
    x = weights(2, 320)
    a, b = write(tmp_path / "a", x, name="a"), write(tmp_path / "b", x, name="b")
    assert [t.kind for t in compare_files(a, b)["tensors"]] == ["only in A", "only in B"]
    found = one(write(tmp_path / "a", x), write(tmp_path / "b", weights(3, 320)))
    assert (found.kind, found.a, found.b) == ("shape", "(2, 320)", "(3, 320)")
    raw = np.zeros(96, np.uint8)
    a = tiny(tmp_path / "a", [], {"t": (153, (2, 64), raw)})
    assert compare_files(a, tiny(tmp_path / "b", [], {"t": (153, (2, 64), raw)}))["equal"]
    found = one(a, tiny(tmp_path / "b", [], {"t": (153, (2, 64), raw + 1)}))
    assert found.kind == "unknown type"


def test_metadata(tmp_path):
    x = weights(1, 320)
    a = [entry("k", "uint32", 1), entry("w", "array[string]", ["a"]), entry("only", "uint8", 1)]
    b = [entry("k", "uint64", 1), entry("w", "array[string]", ["a", "b"])]
    result = compare_files(write(tmp_path / "a", x, keys=a), write(tmp_path / "b", x, keys=b))
    assert result["metadata"] == [
        {"key": "k", "a": "1", "b": "1"},
        {"key": "w", "a": "1 values", "b": "2 values"},
        {"key": "only", "a": "1", "b": None},
    ]
    assert not result["equal"]


def model(path, codes, scale):
    """A .model file: a q8 matrix `t`, a ternary matrix `u` and its scale."""
    q8 = FORMATS["cyb_q8"].quantize(weights(2, 64))
    scale = struct.pack("<f", scale)
    tensors = [
        TensorPlan("t", (2, 64), 0, q8.nbytes, lambda: [q8]),
        TensorPlan("u", (2, 32), 0, codes.nbytes, lambda: [codes]),
        TensorPlan("u.scale", (1,), 0, 4, lambda: [scale]),
    ]
    encodings = {"t": "q8", "u": "ternary", "u.scale": "u32"}
    write_model(path, "m", {"config": 'model_type = "qwen3"\n'}, tensors, encodings)
    return path


def test_two_containers(tmp_path):
    codes = np.full(16, 0b01_00_10_01, np.uint8)
    a = model(tmp_path / "a.model", codes, 0.5)
    values = FORMATS["cyb_q8"].decode(FORMATS["cyb_q8"].quantize(weights(2, 64)))
    b = write(tmp_path / "b.gguf", values, "f32")
    result = compare_files(a, b)
    kinds = {t.name: t.kind for t in result["tensors"]}
    assert kinds == {"t": "equal", "u": "only in A", "u.scale": "only in A"}
    assert {row["key"] for row in result["metadata"]} >= {"cyb.name", "config.model_type"}


def test_ternary_tensors_differ_by_their_scale(tmp_path):
    codes = np.full(16, 0b01_00_10_01, np.uint8)
    a, b = (model(tmp_path / f"{s}.model", codes, s) for s in (0.5, 0.25))
    with pytest.raises(FormatError, match="scale-encoding"):
        compare_files(a, b)
    result = compare_files(a, b, scale_encoding="f32")
    found = {t.name: t for t in result["tensors"]}
    assert found["t"].kind == "same"
    assert (found["u"].kind, found["u"].max_error) == ("differs", 0.25)
    assert found["u.scale"].max_error == 0.25
    assert compare_files(a, a)["equal"]


def test_equal_nans_and_infinities_are_no_difference(tmp_path):
    x = np.float32([[np.nan, np.inf, 2, 1]])
    y = np.float32([[np.nan, np.inf, 2, 1.5]])
    found = one(write_f32(tmp_path / "a", x), write_f32(tmp_path / "b", y))
    assert (found.first, found.blocks, found.max_error) == ((0, 3), 1, 0.5)
    assert found.relative_rms == 0.5 / 5**0.5
    zero = write_f32(tmp_path / "z", 0 * y[:, 2:])
    assert one(zero, write_f32(tmp_path / "b", y[:, 2:])).relative_rms == np.inf
    lost = one(zero, write_f32(tmp_path / "b", np.nan * y[:, 2:]))
    assert np.isnan([lost.relative_rms, lost.max_error]).all()


def write_f32(path, x):
    return write(path, np.ascontiguousarray(x).view(np.uint8), "f32")
