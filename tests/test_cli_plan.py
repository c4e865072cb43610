"""The commands around large models: quantize --rotate, synth."""

from __future__ import annotations

import json

import pytest

from pnrt.container.gguf import open_gguf
from pnrt.demo import write_tiny_model
from pnrt.errors import DeviceError
from tests.test_cli import pnrt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    write_tiny_model(path, layers=1)
    return path


def test_quantize_rotate(tiny, tmp_path):
    out = tmp_path / "r.gguf"
    args = ("quantize", tiny, out, "--mix", "pn3", "--rotate", "auto")
    shown = pnrt(*args, "--dry-run", "--json")
    plan = {d["name"]: d for d in json.loads(shown.stdout)}
    assert plan["blk.0.ffn_up.weight"]["block"] == 64
    assert plan["token_embd.weight"]["block"] == 0
    assert not out.exists()
    assert pnrt(*args).exit_code == 0
    with open_gguf(out) as file:
        assert file.metadata["pnrt.rotation.block_sizes"][0] == 64
        assert file.metadata["prism.hadamard.block_size"] == 64
    again = pnrt("quantize", out, tmp_path / "x.gguf", "--mix", "pn4", "--rotate", "64")
    assert again.exit_code == 2
    assert "rotated already" in again.stderr


@pytest.mark.parametrize("block", ["128", "3", "yes"])
def test_quantize_rotate_refuses(tiny, tmp_path, block):
    out = tmp_path / "x.gguf"
    result = pnrt("quantize", tiny, out, "--mix", "pn4", "--rotate", block)
    assert result.exit_code == 2
    assert "--rotate" in result.stderr
    assert not list(tmp_path.iterdir())


def test_synth(tmp_path):
    out = tmp_path / "s.gguf"
    done = pnrt("synth", out, "--preset", "tiny-qwen35", "--layers", "1", "--json")
    result = json.loads(done.stdout)
    assert result["bytes"] == out.stat().st_size
    assert result["layers"] == 1
    again = pnrt("synth", tmp_path / "t.gguf", "--preset", "tiny-qwen35", "--layers", "1")
    assert "random weights" in again.stdout
    assert (tmp_path / "t.gguf").read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--preset", "qwen9"], "there are qwen3.8-27b-pn3"),
        (["--preset", "tiny-qwen35", "--layers", "0"], "--layers 0"),
        (["--preset", "tiny-qwen35", "--seed", "-1"], "--seed"),
        ([], "--preset"),
    ],
)
def test_synth_refuses(tmp_path, args, words):
    result = pnrt("synth", tmp_path / "s.gguf", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(tmp_path.iterdir())


def test_plan(tiny):
    shown = pnrt("plan", "--preset", "qwen3.8-27b-pn3", "--vram", "16280MiB").stdout
    for words in ("12,473,886,720", "65,536 bytes per token", "59.8", "note:"):
        assert words in shown
    args = ("plan", tiny, "--ram", "1GiB", "--bandwidth", "20", "--json")
    result = json.loads(pnrt(*args).stdout)
    assert result["places"][0]["fits"] is True
    assert result["bound"][0]["bandwidth"] == 20
    own = json.loads(pnrt("plan", tiny, "--json").stdout)
    assert [p["name"] for p in own["places"]] == ["CPU"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["FILE", "--preset", "tiny-qwen35"],
        ["FILE", "--layers", "2"],
        ["FILE", "--vram", "much"],
        ["FILE", "--ram", ""],
        ["--preset", "gpt"],
        ["FILE", "--context", "999999"],
        ["FILE", "--kv", "q8_0"],
        ["FILE", "--bandwidth", "-1"],
    ],
)
def test_plan_refuses(tiny, args):
    result = pnrt("plan", *(tiny if a == "FILE" else a for a in args))
    assert result.exit_code == 2
    assert result.stderr
    assert not result.stdout


def test_plan_asks_the_device(monkeypatch):
    class Device:
        name = "Tesla P100"

        def memory(self):
            return 16_000_000_000, 17_070_817_280

    def missing():
        raise DeviceError("no GPU here")

    args = ("plan", "--preset", "qwen3.8-27b-pn3", "--vram", "device")
    monkeypatch.setattr("pnrt.cuda.launch.open_device", Device)
    result = json.loads(pnrt(*args, "--json").stdout)
    assert result["places"][0]["budget"] == 17_070_817_280
    assert "Tesla P100: 16000000000 of" in result["notes"][-1]
    monkeypatch.setattr("pnrt.cuda.launch.open_device", missing)
    refused = pnrt(*args)
    assert refused.exit_code == 2
    assert "no GPU here" in refused.stderr
