"""qwen35's program: which blocks it has, what each reads, and what a rotation changes."""

import numpy as np
import pytest
from fake_file import fake

from pnrt.errors import ModelError
from pnrt.models import llama, qwen35
from pnrt.models.config import read_config
from pnrt.models.rotation import Rotation, read_rotation


def program(file, rotation=None, family=qwen35):
    return family.build(read_config(file), set(file.tensors), rotation or Rotation())


def step(program, name):
    return next(s for s in program.steps if s.name == name)


def test_blocks_follow_the_interval_or_the_list():
    hybrid = program(fake("qwen35_s.f32"))
    assert [s.name for s in hybrid.steps if s.op == "attention"] == ["blk.3.attn", "blk.7.attn"]
    assert len(hybrid.caches) == 2
    assert [s.numbers["cache"] for s in hybrid.steps if s.op == "store_kv"] == [0, 1]
    assert list(hybrid.states)[:2] == ["blk.0.conv.state", "blk.0.delta.state"]
    assert hybrid.states["blk.0.conv.state"] == (3, 128)
    assert hybrid.states["blk.0.delta.state"] == (4, 16, 16)
    listed = fake("qwen35_s_mtp.f32")
    flags = listed.metadata["qwen35.attention.recurrent_layers"]
    deltas = {s.name for s in program(listed).steps if s.op == "delta"}
    assert deltas == {f"blk.{il}.delta" for il, flag in enumerate(flags[:-1]) if flag}


def test_blocks_for_drafting_are_not_read():
    file = fake("qwen35_s_mtp.f32")
    last = read_config(file).n_layers
    used = {w for s in program(file).steps for w in s.weights}
    assert any(name.startswith(f"blk.{last}.") for name in file.tensors)
    assert not any(name.startswith(f"blk.{last}.") for name in used)


def test_names_are_unique_and_every_input_is_written_before():
    for name in ("qwen35_s.f32", "qwen35_m.pnrots", "pn3mini.pnrot"):
        file = fake(name)
        built = program(file)
        names = [s.name for s in built.steps]
        assert len(set(names)) == len(names)
        known = {*built.states}
        for s in built.steps:
            assert set(s.inputs) <= known, s
            known.add(s.output)


def test_rotated_matrices_read_a_rotated_input_and_others_do_not():
    file = fake("pn3mini.pnrot")
    rotation = read_rotation(file)
    built = program(file, rotation)
    for s in built.steps:
        if s.op == "matmul":
            assert s.inputs[0].endswith(".rot") == (s.weights[0] in rotation.tensors), s
    assert step(built, "blk.0.attn_qkv").inputs == ("h.rot",)
    # alpha and beta decide what is written and forgotten; their matrices are kept unrotated
    assert step(built, "blk.0.ssm_alpha").inputs == ("h",)
    assert step(built, "blk.0.ssm_beta").inputs == ("h",)
    turns = [s for s in built.steps if s.op == "hadamard"]
    # four per block: the input of attention or delta rule, its output, and the same of the ffn
    assert [s.name for s in turns[:4]] == [
        "blk.0.attn_norm_rot", "blk.0.ssm_gated_rot", "blk.0.post_attention_norm_rot",
        "blk.0.ffn_act_rot",
    ]  # fmt: skip
    assert len(turns) == 4 * read_config(file).n_layers
    for s in turns:
        assert s.numbers["block"] == rotation.blocks[s.numbers["n"]]
        assert not s.weights


def test_explicit_signs_are_a_weight_of_the_step():
    file = fake("qwen35_m.pnrot")
    rotation = Rotation(
        "hadamard", {320: 64, 192: 64, 128: 64}, {192: np.ones(192, np.int8)},
        frozenset(n for n in file.tensors if "ffn" in n or "ssm_out" in n),
    )  # fmt: skip
    weights = {s.name: s.weights for s in program(file, rotation).steps if s.op == "hadamard"}
    assert weights["blk.0.ssm_gated_rot"] == ("rotation.signs.192",)
    assert weights["blk.0.ffn_act_rot"] == ()


def test_a_rotated_embedding_is_rotated_back_and_a_tied_output_rotated():
    file = fake("qwen3_s.f32")
    rotation = Rotation("hadamard", {64: 32}, {}, frozenset(["token_embd.weight"]))
    built = program(file, rotation, llama)
    assert built.body[1].op == "hadamard"
    assert built.body[1].numbers == {"n": 64, "block": 32, "inverse": True}
    assert [s.op for s in built.head] == ["take", "rms_norm", "hadamard", "matmul"]
    assert built.head[-1].inputs == ("y.rot",)


def test_grouped_columns_are_asked_for_or_refused():
    file = fake("qwen35_m.pnrot")
    names = frozenset(n for n in file.tensors if "ssm_out" in n)
    rotation = Rotation("hadamard", {192: 64}, {}, names, gdn_v_grouped=True)
    built = program(file, rotation)
    assert step(built, "blk.0.ssm_grouped").numbers == {"n": 32, "heads": 6, "groups": 2}
    assert step(built, "blk.0.ssm_grouped_rot").inputs == ("d.grouped",)
    with pytest.raises(ModelError, match=r"ssm_out.weight: found gdn_v_grouped true"):
        program(file, Rotation("hadamard", {192: 64}, {}, frozenset(), gdn_v_grouped=True))
