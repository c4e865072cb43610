"""Synthetic models: valid, of the right shapes, the same bytes for the same seed, and atomic."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pnrt.container.gguf import open_gguf
from pnrt.debug.check import check_file
from pnrt.errors import FileError, FormatError
from pnrt.formats import FORMATS
from pnrt.models.config import read_config
from pnrt.models.presets import blueprint
from pnrt.models.rotation import read_rotation
from pnrt.models.weights import check_weights
from pnrt.synth import random_blocks, scales, synthesize, vocabulary_keys
from pnrt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "tiny.gguf"
    synthesize(blueprint("tiny-qwen35"), path, seed=5)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_file_is_the_blueprint(tiny):
    paper = blueprint("tiny-qwen35")
    notes = []
    assert check_file(tiny, notes=notes) == []
    assert notes == []
    with open_gguf(tiny) as file:
        assert list(file.tensors) == list(paper.tensors)
        for name, info in file.tensors.items():
            wanted = paper.tensors[name]
            assert (info.shape, info.type_id) == (wanted.shape, wanted.type_id)
        config = read_config(file)
        check_weights(file, config)
        assert config.vocab_size == 560
        assert read_rotation(file).tensors == read_rotation(paper).tensors


def test_weights_have_the_spread_of_trained_ones(tiny):
    with open_gguf(tiny) as file:
        for info in file.tensors.values():
            x = file.values(info.name).astype(np.float64)
            assert np.isfinite(x).all()
            if len(info.shape) == 2 and "conv1d" not in info.name and info.elements > 10_000:
                wanted = (3 if info.name == "output.weight" else 1) * info.columns**-0.5
                assert x.std() == pytest.approx(wanted, rel=0.1), info.name
                assert abs(x.mean()) < 5 * wanted / len(x.reshape(-1)) ** 0.5 + 0.02 * wanted
        assert (file.values("blk.0.ssm_a") < 0).all()
        assert file.values("blk.0.attn_norm.weight").mean() == pytest.approx(1, abs=0.05)


def test_bytes_follow_from_the_seed(tiny, tmp_path):
    for seed in (5, 6):
        synthesize(blueprint("tiny-qwen35"), tmp_path / f"{seed}.gguf", seed=seed)
    assert digest(tmp_path / "5.gguf") == digest(tiny)
    assert digest(tmp_path / "6.gguf") != digest(tiny)


def test_tensors_do_not_repeat_each_other_or_themselves(tiny):
    with open_gguf(tiny) as file:
        up, gate = file.rows("blk.0.ffn_up.weight"), file.rows("blk.0.ffn_gate.weight")
        assert not (up == gate).all(axis=1).any()
        assert len(np.unique(up, axis=0)) == len(up)


@pytest.mark.parametrize("name", ["pn3t", "pn4t", "q8_0", "q3_K", "q4_K", "q4_1", "q6_K"])
def test_random_blocks_are_valid(name):
    form = FORMATS[name]
    draw = np.random.Generator(np.random.SFC64(1))
    blocks = random_blocks(form, 4001, draw, scales(form, 0.02))
    assert form.findings(blocks) == []
    x = form.decode(blocks).astype(np.float64)
    assert x.std() == pytest.approx(0.02, rel=0.03)
    assert abs(x.mean()) < 0.0004
    if name.startswith("pn"):
        codes = form.parts(blocks).codes
        assert sorted(np.unique(codes)) == list(range(-form.zero, form.zero))


def test_formats_without_a_scale_are_refused():
    with pytest.raises(FormatError, match="no fp16 scale"):
        scales(FORMATS["mxfp4"], 1.0)


def test_the_vocabulary_writes_every_text(tiny):
    with open_gguf(tiny) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    for text in ("the quick brown fox", "naïve ☃ \U0001f600", "\x00\x7f tab\t"):
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text
    assert len(tokenizer.encode("aaaa")) == 2
    assert 552 in tokenizer.eog


def test_the_real_vocabulary_has_the_real_size():
    keys = {key: value for key, _, value in vocabulary_keys(blueprint("qwen3.8-27b-pn3"))}
    tokens = keys["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == len(keys["tokenizer.ggml.token_type"]) == 248320
    assert len(keys["tokenizer.ggml.merges"]) == 248044 - 256
    assert tokens[248046] == "<|im_end|>"


def test_nothing_is_left_behind(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(blueprint("tiny-qwen35"), tmp_path / "x.gguf", progress=stop)
    with pytest.raises(FileError):
        synthesize(blueprint("tiny-qwen35"), tmp_path / "no" / "x.gguf")
    assert list(tmp_path.iterdir()) == []
