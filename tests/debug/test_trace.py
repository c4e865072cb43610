"""Traces: what they hold, that NumPy alone reads them, and that damage is seen."""

import json
import struct

import numpy as np
import pytest

from pnrt import reference
from pnrt.debug.trace import HEAD, Trace, is_trace, record
from pnrt.errors import FileError, ModelError
from pnrt.testing import assert_bits_equal

from ..commands import pnrt
from ..golden_models import load_golden, path_of

TOKENS = tuple(range(1, 20))
MODEL = path_of("llama_m.q4_0")


@pytest.fixture(scope="module")
def model():
    with load_golden("llama_m.q4_0") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def full(model, tmp_path_factory):
    """A full trace of the model on TOKENS."""
    path = tmp_path_factory.mktemp("traces") / "full.trace"
    record(model, TOKENS, path, full=True, about={"text": "é"})
    return path


def test_numpy_alone_reads_a_trace(full, model):
    # the six lines of the module's docstring
    raw = np.memmap(full, np.uint8, "r")
    at, size = map(int, raw[8:24].view("<u8"))
    index = json.loads(raw[at : at + size].tobytes())
    assert [s["name"] for s in index["steps"]] == [s.name for s in model.program.steps]
    found = {}
    for step in index["steps"]:
        T, W = step["shape"]
        found[step["name"]] = raw[step["values"] :][: 4 * T * W].view("<f4").reshape(T, W)
    file = model.file
    table = file.tensors["token_embd.weight"].format.name
    x = reference.embedding(table, file.rows("token_embd.weight"), TOKENS)
    assert_bits_equal("embedding", x, found["token_embd"])
    normed = reference.rms_norm(x, file.values("blk.0.attn_norm.weight")[0], model.config.eps)
    assert_bits_equal("norm", normed, found["blk.0.attn_norm"])
    assert_bits_equal("logits", model.logits(TOKENS)[-1:], found["output"])
    assert index["text"] == "é"
    assert index["tokens"] == list(TOKENS)
    assert index["model"]["bytes"] == MODEL.stat().st_size
    assert index["activations"] == "q8_0"


def test_statistics(full):
    with Trace(full) as trace:
        assert trace.full
        for name, step in trace.steps.items():
            x = trace.values(name).astype(np.float64)
            assert (step["min"], step["max"]) == (x.min(), x.max()), name
            assert step["mean"] == pytest.approx(x.mean(), rel=1e-9, abs=1e-12)
            assert step["rms"] == pytest.approx(np.sqrt((x * x).mean()), rel=1e-9)
            assert step["nan"] == step["inf"] == 0
            assert len(trace.rows(name)) == step["shape"][0]
        assert trace.steps["output"]["start"] == len(TOKENS) - 1


def test_a_digest_hashes_what_a_full_trace_holds_in_any_chunks(full, model, tmp_path):
    path = tmp_path / "digest.trace"
    record(model, TOKENS, path, chunk=8)
    assert path.stat().st_size < full.stat().st_size / 5
    with Trace(full) as a, Trace(path) as b:
        assert not b.full
        for name, step in a.steps.items():
            assert step["sha256"] == b.steps[name]["sha256"], name
            np.testing.assert_array_equal(a.rows(name), b.rows(name))
        with pytest.raises(ValueError, match="a digest has no values"):
            b.values("output")


def test_the_same_run_gives_the_same_bytes(model, tmp_path):
    for name in ("a", "b"):
        record(model, TOKENS[:3], tmp_path / name, full=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_taps_choose_steps(model):
    index = record(model, TOKENS[:2], taps=["blk.*.ffn_up", "output"])
    assert [s["name"] for s in index["steps"]] == ["blk.0.ffn_up", "blk.1.ffn_up", "output"]
    with pytest.raises(ModelError, match=r"--taps blk\.9\.\*: matches none of the"):
        record(model, TOKENS[:2], taps=["blk.9.*"])
    assert model.session.observer is None


def damage(path, tmp_path, change):
    copy = tmp_path / "damaged.trace"
    data = bytearray(path.read_bytes())
    copy.write_bytes(change(data) or data)
    return copy


def flip(at):
    def change(data):
        data[at] ^= 1

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "no intact index"),
        (lambda data: data[: len(data) // 2], "no intact index"),
        (lambda data: data[:20], "no intact index"),
        (lambda data: data[:4], "a trace starts with"),
        (lambda data: b"GGUF" + data[4:], "a trace starts with"),
        (flip(-5), "no intact index"),
        (flip(12), "no intact index"),
        (flip(30), "no intact index"),
        (lambda data: data + b"x", "no intact index"),
    ],
    ids=["cut", "half", "head", "magic", "gguf", "index", "offset", "hash", "longer"],
)
def test_damage_is_seen(full, tmp_path, change, words):
    copy = damage(full, tmp_path, change)
    with pytest.raises(FileError, match=words):
        Trace(copy)
    if is_trace(copy):
        assert pnrt("trace", copy).exit_code == 2


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{}",
        b"{",
        b'{"version": 2, "steps": []}',
        b'{"version": 1, "steps": [{"name": "x"}]}',
        b'{"version": 1, "steps": [{"name": "x", "shape": [9, 9], "rows": 64, "values": 64}]}',
        b'{"version": 1, "steps": [{"name": "x", "shape": [-9, 9], "rows": 0, "values": 0}]}',
        b'{"version": 1, "steps": {"x": 1}}',
        b"\xff",
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, index):
    import hashlib

    path = tmp_path / "lies.trace"
    head = b"PNTRACE1" + struct.pack("<QQ", HEAD, len(index)) + hashlib.sha256(index).digest()
    path.write_bytes(head.ljust(HEAD, b"\0") + index)
    with pytest.raises(FileError, match=r"lies\.trace.*Record it again"):
        Trace(path)
    assert pnrt("trace", path).exit_code == 2


def test_changed_values_are_seen_when_read(full, tmp_path):
    with Trace(full) as trace:
        at = trace.steps["blk.1.ffn_up"]["values"]
    with (
        Trace(damage(full, tmp_path, flip(at + 7))) as trace,
        pytest.raises(FileError, match=r"values of blk\.1\.ffn_up do not have their recorded"),
    ):
        trace.values("blk.1.ffn_up")


def test_the_command(tmp_path):
    out = tmp_path / "run.trace"
    done = pnrt("trace", MODEL, "--tokens", "1,2,3", "-o", out, "--full")
    assert done.exit_code == 0
    assert "blk.1.attn_residual" in done.stdout
    assert "values of 36 steps" in done.stdout
    shown = pnrt("trace", out)
    assert shown.exit_code == 0
    assert shown.stdout == done.stdout
    index = json.loads(pnrt("trace", out, "--json").stdout)
    judge = pnrt("trace", MODEL, "--tokens", "1,2,3", "--backend", "reference", "--json")
    hashes = [
        {s["name"]: s["sha256"] for s in i["steps"]} for i in (index, json.loads(judge.stdout))
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tokens", "1", "-p", "x"], "only one of them"),
        ([], "-p TEXT or --tokens"),
        (["--tokens", "1", "--taps", "nothing*"], "matches none"),
        (["--tokens", "1,two"], "whole numbers"),
        (["--tokens", "999999"], "ids are 0 to"),
        (["--tokens", "1", "--backend", "tpu"], "unknown"),
        (["--tokens", "1", "-o", "/nonexistent/x.trace"], "cannot be written"),
    ],
)
def test_the_command_refuses(args, words):
    done = pnrt("trace", MODEL, *args)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_failed_run_leaves_no_file(model, tmp_path):
    def fail(tap):
        if tap.step.name == "blk.1.attn":
            raise ModelError("stop")

    with pytest.raises(ModelError, match="stop"):
        record(model, TOKENS, tmp_path / "x.trace", also=[fail])
    assert not list(tmp_path.iterdir())
