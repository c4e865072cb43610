"""read_rotation: what files declare, what users choose, and every contradiction refused."""

import numpy as np
import pytest
from fake_file import fake

from pnrt.errors import ModelError
from pnrt.models.rotation import read_rotation

PRISM = "prism.hadamard."
OURS = "pnrt.rotation."


def refuse(file, *words, choice=None):
    with pytest.raises(ModelError) as caught:
        read_rotation(file, choice)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def signed(drop=None, **changes):
    """The golden file with both key sets and explicit signs; one set dropped, keys changed."""
    file = fake("qwen35_m.pnrots")
    if drop:
        for key in [k for k in file.metadata if k.startswith(drop)]:
            del file.metadata[key]
    prefix = OURS if drop == PRISM else PRISM
    for key, value in changes.items():
        if value is None:
            del file.metadata[prefix + key]
        else:
            file.metadata[prefix + key] = value
    return file


def test_ours_without_signs():
    rotation = read_rotation(fake("pn3mini.pnrot"))
    assert rotation.kind == "hadamard"
    assert rotation.blocks == {64: 64, 128: 128, 192: 64, 1280: 256}
    assert not rotation.signs
    assert len(rotation.tensors) == 25
    assert rotation.block_of("blk.0.ffn_down.weight", 64) == 64
    assert rotation.block_of("blk.0.ssm_alpha.weight", 1280) == 0


def test_both_key_sets_agree():
    file = fake("qwen35_m.pnrots")
    both = read_rotation(file)
    values = np.array(file.metadata[OURS + "sign_values"])
    assert both.blocks == {128: 64, 192: 64, 320: 64}
    np.testing.assert_array_equal(both.signs[192], values[128:320])
    for drop in (OURS, PRISM):
        one = read_rotation(signed(drop))
        assert one.tensors == both.tensors
        assert one.blocks == both.blocks
        for width in both.signs:
            np.testing.assert_array_equal(one.signs[width], both.signs[width])


def test_a_file_without_pn_needs_no_key():
    assert read_rotation(fake("llama_s.f32")).kind == "none"
    assert read_rotation(fake("llama_s.f32"), "none").kind == "none"


def test_pn_without_keys_is_refused():
    refuse(fake("llama_m.pn"), "model.gguf", "14 PN tensors", "fluent noise", "`--rotation none`")


def test_pn_without_keys_and_a_choice():
    file = fake("llama_m.pn")
    assert read_rotation(file, "none").kind == "none"
    rotation = read_rotation(file, "hadamard:64")
    assert rotation.kind == "hadamard"
    assert rotation.blocks == {192: 64, 320: 64}
    assert len(rotation.tensors) == 14
    refuse(file, "columns", choice="hadamard:128")


@pytest.mark.parametrize(
    "choice",
    ["", "None", "hadamard", "hadamard:", "hadamard:48", "hadamard:1", "hadamard:-4", "x:64"],
)
def test_unknown_choice(choice):
    refuse(fake("llama_m.pn"), "--rotation: found", "hadamard:BLOCK", choice=choice)


def test_nothing_to_rotate():
    refuse(fake("llama_s.f32"), "no PN tensors", choice="hadamard:64")


def test_declared_none():
    file = fake("llama_m.pn")
    file.metadata |= {OURS + "version": 1, OURS + "type": "none"}
    assert read_rotation(file).kind == "none"
    assert read_rotation(file, "none").kind == "none"
    refuse(file, "declares no rotation", "contradict", choice="hadamard:64")


def test_choice_against_the_file():
    file = fake("qwen35_m.pnrots")
    assert read_rotation(file, "hadamard:64").signs
    refuse(file, "blocks of 64", "contradict", choice="none")
    refuse(file, "blocks of 64", "contradict", choice="hadamard:32")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2),
        ("version", None),
        ("version", "1"),
        ("type", "fwht"),
        ("type", None),
        ("widths", None),
        ("widths", [128, 192]),
        ("widths", [192, 128, 320]),
        ("widths", [128, 128, 320]),
        ("widths", [0, 192, 320]),
        ("widths", ["128", "192", "320"]),
        ("block_sizes", [64, 64]),
        ("block_sizes", [64, 64, 48]),
        ("block_sizes", [64, 128, 64]),
        ("block_sizes", [64, 64, 0]),
        ("block_sizes", 64),
        ("sign_mode", "random"),
        ("sign_mode", None),
        ("sign_values", None),
        ("sign_values", [1, -1]),
        ("sign_values", [1] * 639 + [0]),
        ("tensors", None),
        ("tensors", "blk.0.attn_qkv.weight"),
        ("tensors", ["blk.9.attn_qkv.weight"]),
        ("tensors", ["blk.0.attn_norm.weight"]),
        ("tensors", ["blk.0.ssm_conv1d.weight"]),
        ("tensors", [7]),
        ("tensors", []),
        ("seed", 7),
    ],
)
def test_bad_declaration_of_ours(key, value):
    refuse(signed(PRISM, **{key: value}), OURS + key if key != "widths" else OURS)


def test_signs_without_sign_mode():
    refuse(signed(PRISM, sign_mode="none"), OURS + "sign_values")


def test_none_with_tensors():
    refuse(signed(PRISM, type="none"), OURS, "no rotation")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2),
        ("version", None),
        ("transform", "dct"),
        ("axis", None),
        ("block_size", 48),
        ("block_size", 128),
        ("block_size", None),
        ("block_size", -64),
        ("sign_mode", "none"),
        ("sign_widths", [128, 192, 256]),
        ("sign_widths", [128, 192, 192]),
        ("sign_widths", None),
        ("sign_values", [1] * 10),
        ("weight_names", None),
        ("weight_names", ["nothing.weight"]),
        ("weight_names", []),
        ("inverse_weight_names", ["output.weight"]),
        ("gdn_v_grouped", 3),
        ("tied_output", True),
    ],
)
def test_bad_declaration_of_prism(key, value):
    refuse(signed(OURS, **{key: value}), PRISM + key)


def test_prism_identity():
    file = signed(OURS, sign_mode="identity", sign_widths=None, sign_values=None)
    assert not read_rotation(file).signs
    refuse(signed(OURS, sign_mode="identity"), PRISM + "sign_widths")


def test_prism_embedding_is_looked_up():
    rotation = read_rotation(signed(OURS, inverse_weight_names=["token_embd.weight"]))
    assert "token_embd.weight" in rotation.tensors
    refuse(signed(OURS, weight_names=["token_embd.weight"]), "look-up stays rotated")


def test_prism_grouped_heads():
    assert read_rotation(signed(OURS, gdn_v_grouped=True)).gdn_v_grouped


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("block_size", 32, "blocks 64 and 32"),
        ("sign_values", [1] * 640, "different signs"),
        ("weight_names", ["blk.0.attn_qkv.weight"], "only one of them"),
        ("gdn_v_grouped", True, "gdn_v_grouped"),
    ],
)
def test_contradictory_declarations(key, value, word):
    refuse(signed(**{key: value}), "both must say the same", word)


def test_one_says_none():
    file = fake("qwen35_m.pnrots")
    for key in [k for k in file.metadata if k.startswith(OURS)]:
        del file.metadata[key]
    file.metadata |= {OURS + "version": 1, OURS + "type": "none"}
    refuse(file, "none in one and hadamard in the other")


def test_the_largest_block_of_each_width():
    file = fake("llama_m.pn")
    file.add("blk.0.ffn_down.weight", (16, 6144), "pn4t")
    rotation = read_rotation(file, "hadamard:auto")
    assert rotation.blocks == {192: 64, 320: 64, 6144: 1024}
    assert read_rotation(fake("qwen35_m.pnrot"), "hadamard:auto").blocks[128] == 128
    refuse(fake("qwen35_m.pnrots"), "contradict", choice="hadamard:auto")
