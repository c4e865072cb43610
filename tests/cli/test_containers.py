"""Commands on files that need a word from the user: e4m3's id, `.model` files and their scales."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from pnrt.container.gguf import open_gguf
from pnrt.demo import write_tiny_model
from pnrt.formats import FORMATS
from tests.builders import entry, tiny
from tests.commands import pnrt
from tests.container.test_convert import build

K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny.gguf (f32), e4.gguf (e4m3 under id 42), a.model (a ternary tensor with a u32 scale)."""
    folder = tmp_path_factory.mktemp("containers")
    write_tiny_model(folder / "tiny.gguf", layers=1)
    args = ("--mix", "e4m3", "--e4m3-id", "42")
    assert pnrt("quantize", folder / "tiny.gguf", folder / "e4.gguf", *args).exit_code == 0
    build(folder / "a.model")
    return folder


def test_e4m3_is_written_under_the_id_that_was_given(folder):
    with open_gguf(folder / "e4.gguf") as plain:
        info = plain.tensors["blk.0.ffn_up.weight"]
        assert (info.type_id, info.format) == (42, None)
        with open_gguf(folder / "tiny.gguf") as source:
            x = source.values("blk.0.ffn_up.weight")
        expected = FORMATS["e4m3"].quantize(x)
        assert plain.data("blk.0.ffn_up.weight").tobytes() == expected.tobytes()
    refused = pnrt("quantize", folder / "tiny.gguf", folder / "o.gguf", "--mix", "e4m3")
    assert refused.exit_code == 2
    assert "--e4m3-id 42" in refused.stderr
    rule = ("--mix", "pn4", "--tensor-type", "ffn_up=e4m3")
    refused = pnrt("quantize", folder / "tiny.gguf", folder / "o.gguf", *rule)
    assert "--e4m3-id 42" in refused.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["inspect", "e4.gguf", "--tensor", "blk.0.ffn_up.weight"],
        ["quantize", "e4.gguf", "o.gguf", "--mix", "pn4", "--dry-run"],
        ["run", "e4.gguf", "-p", "x"],
        ["bench", "e4.gguf", "-p", "4", "-n", "0", "-r", "1"],
        ["logits", "e4.gguf", "--tokens", "1", "-o", "o.npz"],
        ["compare", "tiny.gguf", "e4.gguf"],
        ["check", "e4.gguf"],
        ["formats", "--error", "e4.gguf"],
    ],
    ids=lambda args: args[0],
)
def test_id_42_is_never_guessed(folder, monkeypatch, args):
    """Without the option the message says what the bytes could be; with it the id is read."""
    monkeypatch.chdir(folder)
    plain = pnrt(*args)
    told = pnrt(*args, "--e4m3-id", "42")
    if args[0] == "inspect":
        assert plain.exit_code == 0
        assert "would fit e4m3, q8_0" in " ".join(plain.stdout.split())
    elif args[0] in ("quantize", "run", "bench", "logits"):
        assert plain.exit_code == 2
        assert "would fit e4m3, q8_0" in plain.stderr
        assert "--e4m3-id 42" in plain.stderr
        assert "would fit" not in told.output
    elif args[0] == "check":
        assert "would fit e4m3, q8_0" in " ".join(plain.stdout.split())
        assert "not known" not in told.stdout
    elif args[0] == "compare":
        assert "unknown type" in plain.stdout
        assert "would fit e4m3, q8_0" in " ".join(plain.stdout.split())
        assert "unknown type" not in told.stdout
    if args[0] in ("inspect", "quantize", "check", "formats"):
        assert told.exit_code == 0


def test_the_extent_decides_against_a_wrong_word(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, 64 * 256 // 64 * 18, dtype=np.uint8)
    tensors = dict.fromkeys(("a.weight", "b.weight"), (42, (64, 256), rows))
    path = tiny(tmp_path / "q2.gguf", [entry("general.architecture", "string", "x")], tensors)
    assert "id 42 (q2_0)" in pnrt("inspect", path).stdout
    wrong = pnrt("inspect", path, "--e4m3-id", "42")
    assert wrong.exit_code == 2
    assert "fit q2_0, which released ggml means by id 42" in wrong.stderr
    taken = pnrt("inspect", path, "--e4m3-id", "8")
    assert taken.exit_code == 2
    assert "8 means q8_0" in taken.stderr


def test_a_model_file_in_every_depth(folder):
    path = folder / "a.model"
    whole = pnrt("inspect", path)
    assert "cyb 2" in whole.stdout
    assert "--scale-encoding f32 or u32" in " ".join(whole.stdout.split())
    undecided = pnrt("inspect", path, "--tensor", K_PROJ)
    assert undecided.exit_code == 2
    assert "raw float32" in undecided.stderr
    args = ("inspect", path, "--tensor", K_PROJ, "--json", "--scale-encoding")
    small, large = (json.loads(pnrt(*args, each).stdout)["max"] for each in ("f32", "u32"))
    # the four bytes of 0.125, and the same as 16.16 fixed point
    assert (small, large) == (0.125, 15872)
    assert pnrt("inspect", path, "--scale-encoding", "f64").exit_code == 2
    assert pnrt("check", path, "--scale-encoding", "f32").exit_code == 0


def test_convert(folder, tmp_path):
    source, out = folder / "a.model", tmp_path / "o.gguf"
    undecided = pnrt("convert", source, out)
    assert undecided.exit_code == 2
    assert undecided.stderr.count(str(source)) == 1
    assert list(tmp_path.iterdir()) == []
    args = ("--scale-encoding", "f32", "--to", "q8_0")
    rows = json.loads(pnrt("convert", source, out, *args, "--json").stdout)["tensors"]
    assert {r["to"]: r["target"] for r in rows}["blk.0.attn_k.weight"] == "q8_0"
    with open_gguf(out) as file:
        assert file.tensors["output_norm.weight"].type_name == "f32"
    assert "blk.0.attn_k.weight" in pnrt("convert", source, out, *args).stdout


def test_convert_refuses(folder, tmp_path):
    source, out = folder / "a.model", tmp_path / "o.gguf"
    for args, words in (
        ((folder / "tiny.gguf", out), "pnrt quantize"),
        ((source, source, "--scale-encoding", "f32"), "source itself"),
        ((source, out, "--scale-encoding", "f32", "--to", "pn9"), "pn4t"),
        ((tmp_path / "no.model", out), "no.model"),
        ((source, tmp_path / "no" / "o.gguf", "--scale-encoding", "f32"), "cannot be written"),
    ):
        refused = pnrt("convert", *args)
        assert refused.exit_code == 2, args
        assert words in refused.stderr
    assert list(tmp_path.iterdir()) == []
    for place, words in ((tmp_path / "o.model", "writes GGUF"), (tmp_path, "is a directory")):
        refused = pnrt("quantize", folder / "tiny.gguf", place, "--mix", "pn4")
        assert (refused.exit_code, words in refused.stderr) == (2, True)
    for args in (("run", source, "-p", "x"), ("quantize", source, out, "--mix", "pn4")):
        refused = pnrt(*args)
        assert refused.exit_code == 2
        assert "pnrt convert" in refused.stderr


def test_compare_shows_the_first_block_in_bytes(folder, tmp_path):
    other = tmp_path / "other.gguf"
    shutil.copy(folder / "e4.gguf", other)
    with open_gguf(other, extra_types={42: "e4m3"}) as file:
        info = file.tensors["blk.0.ffn_up.weight"]
        at = info.offset + 34 * (320 // 32 * 5 + 3)
        old = file.rows(info.name)[5, 102:136].tobytes()
    with open(other, "r+b") as stream:
        stream.seek(at + 2)
        stream.write(bytes([old[2] ^ 1]))
    args = ("compare", folder / "e4.gguf", other, "--e4m3-id", "42")
    shown = pnrt(*args)
    assert shown.exit_code == 1
    assert "blk.0.ffn_up.weight row 5 block 3:" in shown.stdout
    new = bytes([*old[:2], old[2] ^ 1, *old[3:]])
    for title, raw in (("A e4m3", old), ("B e4m3", new)):
        assert f"{title}  {raw[:32].hex(' ')}" in shown.stdout
    found = json.loads(pnrt(*args, "--json").stdout)
    (tensor,) = [t for t in found["tensors"] if t["kind"] == "differs"]
    assert (tensor["first"], tensor["blocks"]) == ([5, 3], 1)
    assert (tensor["a_hex"], tensor["b_hex"]) == (old.hex(), new.hex())


def test_a_hostile_file_cannot_drive_the_terminal(tmp_path):
    name = "a\x1b[2J[bold]b"
    rows = np.zeros((1, 128), np.uint8)
    rows[0, 3] = 0x7F
    rows[0, 2] = 0xC0
    path = tiny(tmp_path / "h.gguf", [entry(name, "string", name)], {name: (0, (1, 32), rows)})
    other = tiny(tmp_path / "o.gguf", [], {name: (1, (1, 32), np.zeros((1, 64), np.uint8))})
    for args in (
        ["inspect", path],
        ["inspect", path, "--tensor", name],
        ["inspect", path, "--tensor", name, "--block", "0,0"],
        ["check", path],
        ["compare", path, other],
        ["run", path, "-p", "x"],
        ["quantize", path, tmp_path / "q.gguf", "--mix", "pn4", "--dry-run"],
    ):
        output = pnrt(*args).output
        assert "\x1b[2J" not in output, args
        assert "\\x1b[2J[bold]b" in output or args[0] == "run", args


def test_repacking_says_its_cost(folder):
    args = ("run", folder / "e4.gguf", "--e4m3-id", "42", "-p", "hi", "-n", "2", "--seed", "1")
    costs = []
    for rule in ("mxfp8", "mxfp8:floor"):
        result = pnrt(*args, "--repack", rule, "--json")
        assert result.exit_code == 0
        (note,) = json.loads(result.stdout)["notes"]
        assert note in result.stderr
        costs.append(float(note.split("stored weights ")[1].split(",")[0]))
    # the OCP rule lets the largest weights of a block saturate
    assert 0.01 < costs[0] < costs[1] < 0.1
    assert json.loads(pnrt(*args, "--json").stdout)["notes"] == []
    refused = pnrt(*args, "--repack", "mxfp4")
    assert refused.exit_code == 2
    assert "mxfp8:floor" in refused.stderr
