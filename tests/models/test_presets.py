"""Presets: the sizes of Qwen3.8-27B-PN3 are those of its public description."""

from __future__ import annotations

import pytest

from pnrt.errors import ModelError
from pnrt.models.config import read_config
from pnrt.models.presets import blueprint, presets
from pnrt.models.rotation import read_rotation
from pnrt.models.weights import check_weights

# class -> shape, count, parameters, format, bytes; the published table
PUBLISHED = {
    "token_embd": ((248320, 5120), 1, 1_271_398_400, "q3_K", 546_304_000),
    "output": ((248320, 5120), 1, 1_271_398_400, "q4_K", 715_161_600),
    "attn_qkv": ((10240, 5120), 48, 2_516_582_400, "pn3t", 1_069_547_520),
    "attn_gate": ((6144, 5120), 48, 1_509_949_440, "pn3t", 641_728_512),
    "ssm_out": ((5120, 6144), 48, 1_509_949_440, "pn4t", 802_160_640),
    "ssm_alpha": ((48, 5120), 48, 11_796_480, "q8_0", 12_533_760),
    "ssm_beta": ((48, 5120), 48, 11_796_480, "q8_0", 12_533_760),
    "attn_q": ((12288, 5120), 16, 1_006_632_960, "pn3t", 427_819_008),
    "attn_k": ((1024, 5120), 16, 83_886_080, "pn4t", 44_564_480),
    "attn_v": ((1024, 5120), 16, 83_886_080, "pn4t", 44_564_480),
    "attn_output": ((5120, 6144), 16, 503_316_480, "pn4t", 267_386_880),
    "ffn_gate": ((17408, 5120), 64, 5_704_253_440, "pn3t", 2_424_307_712),
    "ffn_up": ((17408, 5120), 64, 5_704_253_440, "pn3t", 2_424_307_712),
    "ffn_down": ((5120, 17408), 64, 5_704_253_440, "pn4t", 3_030_384_640),
}


def test_the_27b_model_is_the_published_one():
    paper = blueprint("qwen3.8-27b-pn3")
    assert len(paper.tensors) == 851
    assert sum(t.elements for t in paper.tensors.values()) == 26_895_998_464
    assert sum(t.nbytes for t in paper.tensors.values()) == 12_473_886_720
    for part, (shape, count, parameters, form, nbytes) in PUBLISHED.items():
        same = [t for t in paper.tensors.values() if t.name.split(".")[-2] == part]
        assert {(t.shape, t.format.name) for t in same} == {(shape, form)}, part
        assert len(same) == count
        assert sum(t.elements for t in same) == parameters
        assert sum(t.nbytes for t in same) == nbytes


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_a_whole_model(name):
    paper = blueprint(name)
    config = read_config(paper)
    assert len({t.name for t in check_weights(paper, config).values()}) == len(paper.tensors)
    rotation = read_rotation(paper)
    assert rotation.kind == "hadamard"
    assert not {"token_embd.weight", "output.weight"} & rotation.tensors
    assert not any("ssm_alpha" in n or "ssm_beta" in n for n in rotation.tensors)
    assert any(config.recurrent)
    assert not all(config.recurrent)


def test_fewer_layers():
    paper = blueprint("qwen3.8-27b-pn3", layers=4)
    assert read_config(paper).recurrent == (True, True, True, False)
    assert len([n for n in paper.tensors if n.startswith("blk.")]) == 3 * 14 + 11


def test_the_tiny_one_has_every_format_of_the_large_one():
    formats = [{t.format.name for t in blueprint(n).tensors.values()} for n in presets()]
    assert all(f == formats[0] for f in formats)


def test_what_there_is_not_is_refused():
    with pytest.raises(ModelError, match=r"there are qwen3\.8-27b-pn3, tiny-qwen35"):
        blueprint("qwen4")
    for layers in (0, -1, 10**6):
        with pytest.raises(ModelError, match="--layers"):
            blueprint("tiny-qwen35", layers)
