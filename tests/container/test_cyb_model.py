"""The `.model` container: read, refused, written."""

import os
import struct

import numpy as np
import pytest

from pnrt.container.cyb_model import open_model, write_model
from pnrt.container.gguf import TensorPlan
from pnrt.container.kinds import open_any
from pnrt.debug.check import check_file
from pnrt.debug.inspect import block_view, file_view, tensor_view
from pnrt.errors import FileError, FormatError, PnrtError
from pnrt.formats import FORMATS
from tests.builders import gguf
from tests.container.test_gguf import four_parts

FRONT = """[cyb]
types = ["model"]
name = "tiny"
format_version = 2

[[files]]
name = "card"
format = "md"

[[files]]
name = "config"
format = "toml"

[[files]]
name = "tensors"
format = "toml"
"""
CARD = "# tiny\n\n~~~python\nprint(1)\n~~~\n"
CONFIG = """model_type = "qwen3"

[architecture]
hidden_size = 64
rms_norm_eps = 1e-6
layer_types = ["full", "full"]
"""


def index(**tensors) -> str:
    """tensors: name -> (shape, encoding, offset, size)."""
    keys = ("shape", "encoding", "offset", "size")
    return "\n".join(
        f'["{name}"]\n' + "".join(f"{k} = {v!r}\n" for k, v in zip(keys, spec, strict=True))
        for name, spec in tensors.items()
    )


def text(tensors="", front=FRONT, config=CONFIG, card=CARD) -> str:
    return f"{front}~~~card\n{card}~~~config\n{config}~~~tensors\n{tensors}~~~weights\n"


@pytest.fixture
def make(tmp_path):
    def build(tensors="", weights=b"", **parts):
        path = tmp_path / "m.model"
        path.write_bytes(text(tensors, **parts).encode() + weights)
        return path

    return build


@pytest.fixture
def refused(make):
    def check(*words, tensors="", weights=b"", **parts):
        path = make(tensors, weights, **parts)
        with pytest.raises(PnrtError) as caught:
            open_model(path)
        four_parts(str(caught.value), path, *words)

    return check


def test_reads_text_and_tensors(make):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (3, 64)).astype(np.float32)
    raw = {name: FORMATS[f"cyb_{name}"].quantize(x) for name in ("u32", "u16", "q8", "q4")}
    raw["q4k"] = FORMATS["q4_K"].quantize(rng.standard_normal((3, 256)).astype(np.float32))
    specs, data = {}, b""
    for name, rows in raw.items():
        specs[f"w_{name}"] = ([3, 256 if name == "q4k" else 64], name, len(data), rows.nbytes)
        data += rows.tobytes()
    path = make(index(**specs), data)
    with open_any(path) as file:
        assert file.container == "cyb"
        assert file.metadata["cyb.name"] == "tiny"
        assert file.metadata["config.model_type"] == "qwen3"
        assert file.metadata["config.architecture.rms_norm_eps"] == 1e-6
        assert file.metadata["config.architecture.layer_types"] == ["full", "full"]
        assert file.metadata_type("config.architecture.layer_types") == "array"
        assert file.metadata_type("config.architecture.hidden_size") == "int"
        # a fence in the card does not divide it
        assert file.sections["card"] == CARD.rstrip("\n")
        assert list(file.tensors) == [f"w_{name}" for name in raw]
        for name, rows in raw.items():
            tensor = file.tensors[f"w_{name}"]
            assert tensor.type_id is None
            assert tensor.format.name == ("q4_K" if name == "q4k" else f"cyb_{name}")
            assert np.array_equal(file.rows(f"w_{name}"), rows)
            decoded = tensor.format.decode(rows)
            assert np.array_equal(file.values(f"w_{name}", 1, 3), decoded[1:3])
        view = file_view(file, hashes=True)
        assert view["container"] == "cyb"
        assert {"key": "cyb.format_version", "type": "int", "value": 2} in view["metadata"]
        assert {row["type"] for row in view["types"]} >= {"cyb_q8", "q4_K"}
        assert block_view(file, "w_q8", 2, 1)["values"] == file.values("w_q8")[2, 32:].tolist()
        with pytest.raises(FileError, match="no section vocab"):
            file.toml("vocab")
    assert check_file(path) == []


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("table", ["cyb_ternary", "bitnet_ternary"])
def test_ternary_is_scaled_by_its_sibling(make, per_row, table):
    codes = np.random.default_rng(1).integers(0, 256, (3, 8), np.uint8)
    scale = np.float32([0.0123, 0.5, 2])[: 3 if per_row else 1]
    specs = {"t": ([3, 32], "ternary", 0, 24)}
    specs["t.scale"] = ([len(scale)], "u32", 24, 4 * len(scale))
    path = make(index(**specs), codes.tobytes() + scale.tobytes())
    with open_model(path, scale_encoding="f32", ternary=table) as file:
        expected = FORMATS[table].decode(codes) * (scale[:, None] if per_row else scale)
        assert np.array_equal(file.values("t"), expected)
        assert np.array_equal(file.values("t", 1, 2), expected[1:2])
        assert np.array_equal(file.values("t.scale")[0], scale)
        assert block_view(file, "t", 2, 1)["values"] == expected[2, 4:8].tolist()
        assert tensor_view(file, "t")["max"] == expected.max()
    fixed = np.round(scale * 65536).astype("<i4")
    path = make(index(**specs), codes.tobytes() + fixed.tobytes())
    with open_model(path, scale_encoding="u32", ternary=table) as file:
        exact = (fixed / 65536).astype(np.float32)
        expected = FORMATS[table].decode(codes) * (exact[:, None] if per_row else exact)
        assert np.array_equal(file.values("t"), expected)


def test_a_u32_scale_is_not_guessed(make):
    specs = {"t": ([1, 32], "ternary", 0, 8), "t.scale": ([1], "u32", 8, 4)}
    path = make(index(**specs), bytes(8) + struct.pack("<f", 0.0123))
    with open_model(path) as file:
        assert "--scale-encoding" in str(file.notes[0])
        four_parts(str(file.notes[0]), path)
        with pytest.raises(FormatError) as caught:
            file.values("t")
    four_parts(str(caught.value), path, "0.0123", "15433.5", "--scale-encoding f32")
    with pytest.raises(FormatError, match="scale_encoding"):
        open_model(path, scale_encoding="f64")
    with pytest.raises(FormatError, match="ternary"):
        open_model(path, ternary="q4")


def test_a_fixed_point_u16_scale_needs_no_choice(make):
    specs = {"t": ([1, 32], "ternary", 0, 8), "t.scale": ([1], "u16", 8, 2)}
    with open_model(make(index(**specs), b"\x55" * 8 + struct.pack("<h", 384))) as file:
        assert (file.values("t") == 1.5).all()


def test_ternary_needs_its_scale(refused):
    specs = {"t": ([2, 32], "ternary", 0, 16)}
    refused("tensor t", ".scale", "[1] or [2]", tensors=index(**specs), weights=bytes(16))
    specs["t.scale"] = ([3], "u32", 16, 12)
    refused("tensor t", "shape [3]", "[1] or [2]", tensors=index(**specs), weights=bytes(28))


def test_unknown_encodings_survive(make):
    path = make(index(t=([2, 32], "q7", 0, 60)), bytes(60))
    with open_model(path) as file:
        assert file.tensors["t"].type_name == "q7"
        assert file.data("t").nbytes == 60
        with pytest.raises(FormatError) as caught:
            file.rows("t")
        four_parts(str(caught.value), path, "type q7")
    notes = []
    assert check_file(path, notes=notes) == []
    assert "q7" in notes[0].found


@pytest.mark.parametrize(
    "version", ["", "format_version = 1\n", 'format_version = "2"\n', "format_version = true\n"]
)
def test_only_version_2(refused, version):
    front = FRONT.replace("format_version = 2\n", version)
    refused("format_version", "2 is read", "Import", front=front)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ((None, "q8", 0, 34), ("shape is 'None'",)),
        (([0, 32], "q8", 0, 34), ("shape is [0, 32]", "at least 1")),
        (([-1], "q8", 0, 34), ("shape is [-1]",)),
        (([1, 1, 1, 1, 32], "q8", 0, 34), ("up to 4",)),
        (([1, 32], 8, 0, 34), ("encoding is 8",)),
        (([1, 32], "q8", -1, 34), ("offset -1",)),
        (([1, 32], "q8", 0, 1.5), ("size 1.5",)),
        (([1, 32], "q8", 0, 33), ("size is 33", "takes 34 bytes")),
        (([1, 48], "q8", 0, 34), ("rows of 48", "multiples of 32")),
        (([2, 32], "q8", 0, 68), ("4 are missing", "truncated")),
        (([1 << 70, 32], "q8", 0, 34), (f"takes {34 << 70} bytes",)),
        (([1, 32], "q8", 1 << 70, 34), ("are missing",)),
    ],
)
def test_bad_entries(refused, spec, words):
    shape = "'None'" if spec[0] is None else spec[0]
    lines = f"shape = {shape}\nencoding = {spec[1]!r}\noffset = {spec[2]}\nsize = {spec[3]}\n"
    refused("tensor t", *words, tensors=f"[t]\n{lines}", weights=bytes(64))


def test_overlap(refused):
    specs = {"a": ([1, 32], "q8", 0, 34), "b": ([1, 32], "q8", 33, 34)}
    refused("tensor b", "1 bytes before a ends", tensors=index(**specs), weights=bytes(67))


def test_broken_text(refused, tmp_path):
    refused("section tensors", "not TOML", tensors="[t\n")
    refused("section frontmatter", "not TOML", front="[cyb\n")
    refused("section config", "not TOML", config="a = " + "[" * 100_000 + "\n")
    refused("section config", "not TOML", config="a = " + "9" * 5000 + "\n")
    path = tmp_path / "x.model"
    for data, words in (
        (b"", "is empty"),
        (b"text only\n", "no line ~~~weights"),
        (b"~~~weights\n", "format_version is absent"),
        (FRONT.encode() + b"\xff\n~~~weights\n", "0xff is not UTF-8"),
        (FRONT.encode() + b"~~~card\n# no index\n~~~weights\n", "no section tensors"),
    ):
        path.write_bytes(data)
        with pytest.raises(FileError) as caught:
            open_any(path)
        four_parts(str(caught.value), path, words)
        assert len(check_file(path)) == 1
    for path in (tmp_path, tmp_path / "absent.model"):
        with pytest.raises(FileError) as caught:
            open_model(path)
        four_parts(str(caught.value), path)


def test_truncated_weights(refused):
    front = FRONT + '\n[[files]]\nname = "weights"\nsize = 100\n'
    refused("weights is given as 100", "holds 34 bytes", front=front, weights=bytes(34))


def test_check_finds_everything(make):
    bad = FORMATS["cyb_q8"].quantize(np.ones((2, 64), np.float32))
    # a negative scale in row 1, block 1
    bad[1, 35] = 0x80
    specs = {
        "a": ([2, 64], "q8", 0, 136),
        "b": ([1, 32], "q8", 0, 33),
        "t": ([1, 32], "ternary", 136, 8),
    }
    path = make(index(**specs), bad.tobytes() + bytes(8) + bytes(4096))
    notes = []
    found = check_file(path, notes=notes)
    assert "4096 unused bytes follow t" in notes[0].found
    assert [f.tensor for f in found] == ["b", "t", "a"]
    assert (found[2].row, found[2].block) == (1, 1)
    assert path.read_bytes()[found[2].byte + 1] == 0x80


def test_round_trip(tmp_path):
    path = tmp_path / "m.model"
    x = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    rows = {kind: FORMATS[f"cyb_{kind}"].quantize(x) for kind in ("u16", "q8", "q4")}
    plans = [
        TensorPlan(f'w "{kind}" é', (4, 64), 0, raw.nbytes, lambda raw=raw: [raw[:1], raw[1:]])
        for kind, raw in rows.items()
    ]
    encodings = {plan.name: kind for plan, kind in zip(plans, rows, strict=True)}
    sections = {"card": CARD, "config": CONFIG, "vocab": '[tokens]\n0 = "a"'}
    calls = []
    write_model(path, "tiny", sections, plans, encodings, lambda *step: calls.append(step))
    assert os.listdir(tmp_path) == ["m.model"]
    assert calls[-1] == (sum(raw.nbytes for raw in rows.values()),) * 2
    with open_model(path) as file:
        assert file.notes == []
        assert file.toml("vocab") == {"tokens": {"0": "a"}}
        assert file.sections["card"] == CARD.rstrip("\n")
        for plan, raw in zip(plans, rows.values(), strict=True):
            assert np.array_equal(file.rows(plan.name), raw)
    again = tmp_path / "again.model"
    write_model(again, "tiny", sections, plans, encodings)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("sections", "name", "word"),
    [
        ({"card": "~~~config\n", "config": ""}, "t", "divides sections"),
        ({"card": "a\n~~~weights\n"}, "t", "divides sections"),
        ({"other": ""}, "t", "unknown"),
        ({}, "a\nb", "control characters"),
    ],
)
def test_what_cannot_be_written(tmp_path, sections, name, word):
    plan = TensorPlan(name, (1,), 0, 4, lambda: [bytes(4)])
    with pytest.raises(FileError) as caught:
        write_model(tmp_path / "m.model", "m", sections, [plan], {name: "u32"})
    four_parts(str(caught.value), tmp_path, word)
    assert os.listdir(tmp_path) == []


def test_first_bytes_decide_the_container(tmp_path):
    path = tmp_path / "gguf-by-content.model"
    path.write_bytes(gguf())
    with open_any(path) as file:
        assert file.container == "gguf"
