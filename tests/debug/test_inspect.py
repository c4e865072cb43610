"""The views of a file: whole, tensor, block; plain data that JSON takes."""

import hashlib
import json

import numpy as np
import pytest

from pnrt.container.gguf import open_gguf
from pnrt.debug import inspect
from pnrt.debug.inspect import block_view, file_view, parse_block, tensor_view
from pnrt.errors import FileError, FormatError
from pnrt.formats import FORMATS
from tests.builders import entry, gguf, info, tiny
from tests.commands import pnrt

WORDS = [f"w{i}" for i in range(100)]


@pytest.fixture
def model(tmp_path):
    """A file with four types, one of them unknown, and the rows by name."""
    rng = np.random.default_rng(0)
    raw = {
        "a": ("pn3t", (4, 160)),
        "b": ("q4_1", (3, 64)),
        "c": ("f32", (8,)),
    }
    rows, plan = {}, {}
    for name, (kind, shape) in raw.items():
        x = rng.standard_normal((int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
        rows[name] = FORMATS[kind].quantize(x)
        plan[name] = (FORMATS[kind].type_id, shape, rows[name])
    plan["d"] = (153, (2, 64), np.zeros(96, np.uint8))
    keys = [
        entry("general.architecture", "string", "llama"),
        entry("x.eps", "float32", float("nan")),
        entry("x.words", "array[string]", WORDS),
    ]
    path = tiny(tmp_path / "m.gguf", keys, plan)
    with open_gguf(path) as file:
        yield file, rows


def strict_json(view):
    """Through JSON without NaN and back."""
    return json.loads(json.dumps(view, allow_nan=False))


def test_file_view(model):
    file, _ = model
    view = strict_json(file_view(file))
    assert view["path"] == str(file.path)
    assert view["version"] == 3
    keys = {row["key"]: row for row in view["metadata"]}
    assert keys["general.architecture"]["value"] == "llama"
    assert keys["x.eps"] == {"key": "x.eps", "type": "float32", "value": "nan"}
    assert keys["x.words"]["length"] == 100
    assert keys["x.words"]["value"] == WORDS[: inspect.SHOWN]
    tensors = {row["name"]: row for row in view["tensors"]}
    assert list(tensors) == ["a", "b", "c", "d"]
    assert tensors["a"]["bits_per_weight"] == 3.4
    assert tensors["a"]["shape"] == [4, 160]
    assert tensors["d"]["type"] == "id 153"
    assert tensors["d"]["known"] is False
    assert tensors["d"]["bytes"] == 96
    assert "sha256" not in tensors["a"]
    types = {row["type"]: row for row in view["types"]}
    assert types["q4_1"] == {
        "type": "q4_1", "tensors": 1, "elements": 192, "bytes": 120, "bits_per_weight": 5.0,
    }  # fmt: skip
    assert view["elements"] == 640 + 192 + 8 + 128
    assert view["bytes"] == 272 + 120 + 32 + 96
    assert view["bits_per_weight"] == 8 * view["bytes"] / view["elements"]
    assert view["notes"] == []


def test_hashes(model, monkeypatch):
    file, rows = model
    # several pieces per tensor
    monkeypatch.setattr(inspect, "STEP", 50)
    calls = []
    view = file_view(file, hashes=True, progress=lambda *step: calls.append(step))
    for row in view["tensors"]:
        raw = rows[row["name"]].tobytes() if row["name"] in rows else bytes(96)
        assert row["sha256"] == hashlib.sha256(raw).hexdigest()
    assert calls[-1] == (view["bytes"], view["bytes"])
    assert calls == sorted(calls)


def test_no_tensors(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf())
    with open_gguf(path) as file:
        view = strict_json(file_view(file, hashes=True))
    assert view["tensors"] == view["types"] == []
    assert view["bits_per_weight"] is None


@pytest.mark.parametrize("step", [1, 1 << 24])
def test_tensor_view(model, monkeypatch, step):
    monkeypatch.setattr(inspect, "STEP", step)
    file, rows = model
    view = strict_json(tensor_view(file, "a"))
    kind = FORMATS["pn3t"]
    x = kind.decode(rows["a"])
    assert (view["min"], view["max"]) == (x.min(), x.max())
    assert view["mean"] == pytest.approx(x.mean(dtype=np.float64), rel=1e-9)
    assert view["rms"] == pytest.approx(np.sqrt(np.square(x.astype(np.float64)).mean()))
    assert view["zeros"] == np.count_nonzero(x == 0)
    assert view["nonfinite"] == view["zero_scales"] == 0
    codes, counts = np.unique(kind.parts(rows["a"]).codes, return_counts=True)
    assert view["codes"] == [[int(c), int(n)] for c, n in zip(codes, counts, strict=True)]
    assert sum(n for _, n in view["codes"]) == 640
    plain = strict_json(tensor_view(file, "c"))
    assert "codes" not in plain
    assert plain["min"] == rows["c"].view(np.float32).min()


def test_tensor_view_of_dead_and_broken_blocks(tmp_path):
    raw = np.zeros((2, 68), np.uint8)
    raw[1, 34:36] = 0x00, 0x7E
    path = tiny(tmp_path / "m.gguf", [], {"t": (8, (2, 64), raw)})
    with open_gguf(path) as file:
        view = strict_json(tensor_view(file, "t"))
    assert (view["nonfinite"], view["zeros"], view["zero_scales"]) == (32, 96, 3)
    assert (view["min"], view["max"], view["rms"]) == (0, 0, 0)
    raw[:] = 0xFF
    with open_gguf(tiny(tmp_path / "m.gguf", [], {"t": (8, (2, 64), raw)})) as file:
        assert strict_json(tensor_view(file, "t"))["min"] is None


def test_block_view(model):
    file, rows = model
    view = strict_json(block_view(file, "a", 2, 1))
    raw = rows["a"][2:3, 34:68]
    assert view["tensor"] == "a"
    assert view["type"] == "pn3t"
    assert (view["row"], view["block"], view["first"], view["group"]) == (2, 1, 80, 80)
    assert bytes.fromhex(view["hex"]) == raw.tobytes()
    assert file.path.read_bytes()[view["offset"] :][:34] == raw.tobytes()
    assert view["scales"] == [float(raw[0, :2].copy().view(np.float16)[0])]
    assert view["offsets"] is None
    assert np.array_equal(np.float32(view["values"]), FORMATS["pn3t"].decode(rows["a"])[2, 80:160])
    assert np.array_equal(np.float32(view["codes"]) * view["scales"][0], view["values"])
    assert view["findings"] == []


def test_block_view_with_offsets_and_of_plain_floats(model):
    file, rows = model
    view = strict_json(block_view(file, "b", 1, 1))
    values = np.float32(view["codes"]) * np.float32(view["scales"]) + np.float32(view["offsets"])
    assert np.array_equal(values, np.float32(view["values"]))
    plain = strict_json(block_view(file, "c", 0, 5))
    assert (plain["scales"], plain["codes"]) == (None, None)
    assert plain["values"] == [float(rows["c"].view(np.float32)[0, 5])]


def test_block_view_of_every_format(tmp_path):
    """The block alone decodes to what it is inside its tensor."""
    rng = np.random.default_rng(3)
    kinds = [k for k in FORMATS.values() if k.type_id is not None and k.weight]
    assert len(kinds) >= 8
    for kind in kinds:
        raw = rng.integers(0, 256, (2, 3 * kind.nbytes), np.uint8)
        plan = {"t": (kind.type_id, (2, 3 * kind.block), raw)}
        with open_gguf(tiny(tmp_path / f"{kind.name}.gguf", [], plan)) as file:
            view = strict_json(block_view(file, "t", 1, 2))
        whole = kind.decode(raw)[1, 2 * kind.block :]
        assert np.array_equal(np.float32(view["values"]), whole, equal_nan=True), kind.name


def test_block_view_shows_findings(tmp_path):
    raw = np.zeros((1, 68), np.uint8)
    raw[0, 34:36] = 0x00, 0x7C
    with open_gguf(tiny(tmp_path / "m.gguf", [], {"t": (8, (1, 64), raw)})) as file:
        view = strict_json(block_view(file, "t", 0, 1))
    assert view["scales"] == ["inf"]
    (finding,) = view["findings"]
    assert finding["byte"] == 0
    assert "finite" in finding["allowed"]


def test_refusals(model):
    file, _ = model
    for name, row, block, words in (
        ("a", 4, 0, "row 4 was asked for; the tensor has 4"),
        ("a", -1, 0, "row -1"),
        ("a", 0, 2, "block 2 was asked for; the tensor has 2"),
        ("d", 0, 0, "type id 153"),
    ):
        with pytest.raises(FormatError) as caught:
            block_view(file, name, row, block)
        assert words in str(caught.value)
        assert str(file.path) in str(caught.value)
    assert tensor_view(file, "d")["known"] is False
    with pytest.raises(FileError):
        tensor_view(file, "absent")


def test_parse_block():
    assert parse_block("12,5") == (12, 5)
    assert parse_block(" 1 , 2 ") == (1, 2)
    for text in ("", "1", "1,", ",1", "-1,2", "a,b", "1,2,3", "1.5,2"):
        with pytest.raises(FormatError, match="ROW,BLOCK"):
            parse_block(text)


def test_texts_that_are_not_utf8_do_not_stop_the_view(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([entry("t", "array[string]", ["a", b"\xff"])]))
    with open_gguf(path) as file:
        [row] = strict_json(file_view(file))["metadata"]
    assert (row["value"], row["length"]) == ([], 2)
    assert "byte 0 of it is 0xff" in row["problem"]
    assert "0xff" in pnrt("inspect", path).stdout


def test_unknown_types_do_not_stop_the_view(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([], [info("t", (1, 256), 2**32 - 1, 0)], bytes(66)))
    with open_gguf(path) as file:
        view = strict_json(file_view(file, hashes=True))
        one = strict_json(tensor_view(file, "t"))
    assert view["tensors"][0]["type"] == f"id {2**32 - 1}"
    assert one == {key: value for key, value in view["tensors"][0].items() if key != "sha256"} | {
        "hex": "00" * 64,
        "advice": one["advice"],
    }
    shown = pnrt("inspect", path, "--tensor", "t")
    assert shown.exit_code == 0
    assert "00 00 00" in shown.stdout
