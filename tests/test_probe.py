"""The rotation probe: a text a model wrote itself makes sense under its own rotation only."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pnrt
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.demo import write_tiny_model
from pnrt.errors import ModelError
from pnrt.models.rotation import Rotation, read_rotation
from pnrt.probe import Probe, candidates, probe, under, verdict
from pnrt.quantize import quantize_file
from pnrt.score import Estimate
from tests.test_cli import pnrt as command


def without_keys(source, target):
    """A copy that does not say how it is rotated."""
    with open_gguf(source) as file:
        keys = [e for e in file.raw_metadata() if not e[0].startswith(("pnrt.", "prism."))]
        plans = [
            TensorPlan(t.name, t.shape, t.type_id, t.nbytes, lambda t=t: iter([file.data(t.name)]))
            for t in file.tensors.values()
        ]
        write_gguf(target, keys, plans)
    return target


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """tiny (f32), rotated (pn4t, declared), silent (the same without keys)."""
    folder = tmp_path_factory.mktemp("probe")
    write_tiny_model(folder / "tiny.gguf", layers=1)
    quantize_file(folder / "tiny.gguf", folder / "rotated.gguf", "pn4", rotate=32)
    without_keys(folder / "rotated.gguf", folder / "silent.gguf")
    return folder


@pytest.fixture(scope="module")
def written(files):
    """[2, 96] tokens, sampled from the rotated model."""
    draw = np.random.default_rng(3)
    with pnrt.load(files / "rotated.gguf", context=96) as model:
        windows = []
        for first in (5, 80):
            model.reset()
            tokens = [first]
            while len(tokens) < 96:
                # sharper than the model's own distribution: a text it finds likely
                logits = 2.0 * model.eval(tokens[-1:]).astype(np.float64)
                p = np.exp(logits - logits.max())
                tokens.append(int(draw.choice(len(p), p=p / p.sum())))
            windows.append(tokens)
    return np.array(windows, np.int32)


def test_the_right_rotation_stands_out(files, written):
    with pnrt.load(files / "silent.gguf", rotation="none", context=96) as model:
        results = list(probe(model, candidates(model.file, None), written))
    names = [r.name for r in results]
    assert names == ["none", "hadamard:32", "hadamard:64"]
    best = min(results, key=lambda r: r.perplexity.value)
    assert best.name == "hadamard:32"
    assert "Say `--rotation hadamard:32`" in verdict(results)


def test_under_another_rotation_is_a_load_with_it(files):
    tokens = [1, 2, 3, 250, 7]
    with pnrt.load(files / "silent.gguf", rotation="hadamard:32") as model:
        expected = model.logits(tokens)
    with pnrt.load(files / "silent.gguf", rotation="none") as model:
        plain = model.logits(tokens)
        other = under(model, read_rotation(model.file, "hadamard:32"))
        np.testing.assert_array_equal(other.logits(tokens), expected)
        other.session.close()
        np.testing.assert_array_equal(model.logits(tokens), plain)
    assert not np.array_equal(plain, expected)


def test_signs_are_part_of_a_declaration(files):
    signs = {w: np.where(np.arange(w) % 3, 1, -1).astype(np.int8) for w in (320, 576)}
    with pnrt.load(files / "rotated.gguf") as model:
        same = dict.fromkeys((320, 576), 32)
        signed = Rotation("hadamard", same, signs, model.rotation.tensors)
        other = under(model, signed)
        assert not np.array_equal(other.logits([1, 2]), model.logits([1, 2]))
        other.session.close()
        names = [name for name, _ in candidates(model.file, signed)]
    assert names == ["declared", "none", "hadamard:32", "hadamard:64"]


def test_the_declared_one_comes_first_and_once(files):
    with open_gguf(files / "rotated.gguf") as file:
        names = [name for name, _ in candidates(file, read_rotation(file))]
    assert names == ["declared", "none", "hadamard:64"]
    with open_gguf(files / "silent.gguf") as file:
        names = [name for name, _ in candidates(file, Rotation())]
    assert names == ["declared", "hadamard:32", "hadamard:64"]


def test_nothing_to_probe(files):
    with open_gguf(files / "tiny.gguf") as file, pytest.raises(ModelError, match="no PN matrices"):
        candidates(file, None)


def results(**values):
    return [
        Probe(name, {}, name == "declared", 10, Estimate(value, 0.1))
        for name, value in values.items()
    ]


def test_verdicts():
    assert "declared fits" in verdict(results(declared=10.0, none=900.0))
    assert "declares is wrong" in verdict(results(declared=900.0, none=10.0))
    assert "no rotation stands out" in verdict(results(declared=900.0, none=800.0))
    assert "Say `--rotation none`" in verdict(results(none=8.0, auto=900.0))
    assert "no rotation stands out" in verdict(results(none=float("inf"), auto=float("inf")))
    assert verdict(results(none=1.0)) == "only none is possible"


def test_the_command(files, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a short text, but long enough for two windows")
    for source in ("rotated", "silent"):
        args = ("doctor", files / f"{source}.gguf", "--rotation-probe", text, "--ctx", "16")
        shown = json.loads(command(*args, "--json").stdout)
        names = [p["name"] for p in shown["probes"]]
        assert names[-1] == "hadamard:64"
        assert names[0] == ("declared" if source == "rotated" else "none")
        assert shown["probes"][0]["tokens"] == 2 * 7
        assert shown["verdict"]
    literal = command("doctor", files / "silent.gguf", "--rotation-probe", "x = 1; y = 2")
    assert literal.exit_code == 0
    assert "hadamard:32" in literal.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["rotated.gguf"],
        ["--rotation-probe", "some text"],
        ["tiny.gguf", "--rotation-probe", "some text"],
        ["rotated.gguf", "--rotation-probe", "abc"],
        ["rotated.gguf", "--rotation-probe", "some text", "--ctx", "2"],
    ],
)
def test_the_command_refuses(files, args):
    result = command("doctor", *(files / a if a.endswith(".gguf") else a for a in args))
    assert result.exit_code == 2
    assert result.stderr
