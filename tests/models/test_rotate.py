"""Rotating weights: the transform, the choice of tensors and blocks, the keys that declare it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_file import fake

import pnrt
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.demo import write_tiny_model
from pnrt.errors import ModelError
from pnrt.formats import FORMATS
from pnrt.formats.fwht import rotate
from pnrt.models.rotate import choose_rotation, rotate_rows, rotation_keys
from pnrt.models.rotation import Rotation, read_rotation
from pnrt.quantize import plan, quantize_file

GOLDEN = Path(__file__).parent.parent / "golden" / "rotation" / "qwen35_m.npz"


def normal(n, k, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def signs_of(k, seed=1):
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.int8), k)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.mark.parametrize("block", [2, 8, 64])
def test_the_transform_is_the_matrix_of_signs(block):
    i = np.arange(block)
    hadamard = np.array([[(-1) ** int(a & b).bit_count() for a in i] for b in i]) / block**0.5
    x, signs = normal(5, 3 * block), signs_of(3 * block)
    wanted = (x.astype(np.float64) * signs).reshape(-1, block) @ hadamard
    got = rotate_rows(x, block, signs)
    np.testing.assert_allclose(got.reshape(-1, block), wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rotate_rows(rotate_rows(x, block), block), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("block", [2, 16, 1024])
@pytest.mark.parametrize("signed", [False, True])
def test_the_compiled_form_has_the_same_bits(block, signed):
    x, signs = normal(7, 3072), signs_of(3072) if signed else None
    wanted = rotate_rows(x, block, signs)
    for threads in (1, 2):
        np.testing.assert_array_equal(rotate(x, block, signs, threads), wanted)


@pytest.mark.parametrize("name", ["attn_qkv", "ssm_out", "ffn_down"])
def test_golden_blocks(name):
    golden = np.load(GOLDEN)
    x = FORMATS["f16"].decode(golden[f"{name}.f16"])
    k = x.shape[1]
    form = FORMATS["pn3t" if k % 80 == 0 else "pn4t"]
    plain = rotate_rows(x, 128 if k == 128 else 64)
    np.testing.assert_array_equal(form.quantize(plain), golden[f"{name}.pnrot"])
    signed = rotate_rows(x, 64, golden[f"signs.{k}"])
    np.testing.assert_array_equal(form.quantize(signed), golden[f"{name}.pnrots"])


def test_blocks_for_each_width(tiny):
    with open_gguf(tiny) as file:
        rotation = choose_rotation(file, "auto")
        assert rotation.blocks == {320: 64, 576: 64}
        assert choose_rotation(file, 32).blocks == {320: 32, 576: 32}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert rotation.tensors == {f"blk.{i}.{p}.weight" for i in (0, 1) for p in parts}


def test_what_is_rotated_in_a_hybrid_model():
    golden = read_rotation(fake("qwen35_m.pnrot"))
    file = fake("qwen35_m.pnrot")
    chosen = choose_rotation(file, "auto")
    assert chosen.tensors == golden.tensors
    assert chosen.blocks == golden.blocks


def test_blocks_to_skip_are_left_alone():
    names = choose_rotation(fake("qwen35_s_mtp.f32"), "auto").tensors
    skipped = [n for n in fake("qwen35_s_mtp.f32").tensors if "nextn" in n]
    block = skipped[0].split("nextn")[0]
    assert names
    assert not any(n.startswith(block) for n in names)


def test_at_most_1024():
    file = fake("llama_m.pn")
    file.add("blk.0.attn_q.weight", (16, 6144))
    file.add("blk.0.ffn_down.weight", (16, 17408))
    assert choose_rotation(file, "auto").blocks[6144] == 1024
    assert choose_rotation(file, "auto").blocks[17408] == 1024


@pytest.mark.parametrize("block", [0, 1, 3, 48, -64, "big", "64.0", ""])
def test_blocks_that_are_none(block):
    with pytest.raises(ModelError, match="--rotate: found"):
        choose_rotation(fake("llama_m.pn"), block)


def test_a_block_must_divide_every_width():
    with pytest.raises(ModelError, match=r"320 columns; needed a multiple of 128.*auto"):
        choose_rotation(fake("llama_m.pn"), 128)


def test_unknown_models_are_refused():
    file = fake("llama_m.pn")
    file.metadata["general.architecture"] = "mamba"
    with pytest.raises(ModelError, match="mamba"):
        choose_rotation(file, "auto")
    file = fake("llama_m.pn")
    file.tensors = {n: t for n, t in file.tensors.items() if not n.startswith("blk.")}
    with pytest.raises(ModelError, match="no matrix that is rotated"):
        choose_rotation(file, "auto")


@pytest.mark.parametrize("blocks", [{320: 64, 192: 64}, {320: 64, 192: 32}])
@pytest.mark.parametrize("signed", [False, True])
def test_keys_are_read_back(tmp_path, blocks, signed):
    names = {"blk.0.attn_q.weight": 320, "blk.10.ffn_down.weight": 192}
    signs = {320: signs_of(320)} if signed else {}
    keys = rotation_keys(Rotation("hadamard", blocks, signs, frozenset(names)))
    plans = [
        TensorPlan(n, (2, k), 0, 8 * k, lambda k=k: iter([normal(2, k)])) for n, k in names.items()
    ]
    write_gguf(tmp_path / "m.gguf", keys, plans)
    with open_gguf(tmp_path / "m.gguf") as file:
        both = any(key.startswith("prism.") for key in file.metadata)
        assert both == (len(set(blocks.values())) == 1)
        rotation = read_rotation(file)
        assert (rotation.blocks, rotation.tensors) == (blocks, set(names))
        assert signed == bool(rotation.signs)
        if signed:
            np.testing.assert_array_equal(rotation.signs[320], signs[320])
        for drop in ("pnrt.", "prism.") if both else ():
            kept = file.metadata
            file.metadata = {k: v for k, v in kept.items() if not k.startswith(drop)}
            assert read_rotation(file).blocks == blocks
            file.metadata = kept


def test_a_declaration_written_by_us_and_damaged_is_refused():
    file = fake("llama_m.pn")
    rotation = choose_rotation(file, 64)
    file.metadata |= {key: value for key, _, value in rotation_keys(rotation)}
    assert read_rotation(file).tensors == rotation.tensors
    damages = {
        "prism.hadamard.block_size": 32,
        "prism.hadamard.weight_names": sorted(rotation.tensors)[1:],
        "pnrt.rotation.block_sizes": [64, 32],
        "pnrt.rotation.type": "none",
        "pnrt.rotation.tensors": ["blk.77.attn_q.weight"],
    }
    for key, value in damages.items():
        damaged = fake("llama_m.pn")
        damaged.metadata = {**file.metadata, key: value}
        with pytest.raises(ModelError, match=r"pnrt\.rotation"):
            read_rotation(damaged)


def test_products_stay_what_they_were(tiny, tmp_path):
    """Rotated weights times rotated activations, in f32 where only rounding is in the way."""
    rules = [(".", "f32")]
    quantize_file(tiny, tmp_path / "r.gguf", "f16", rules, rotate="auto")
    with open_gguf(tiny) as plain, open_gguf(tmp_path / "r.gguf") as file:
        rotation = read_rotation(file)
        for name, info in file.tensors.items():
            if name not in rotation.tensors:
                assert np.array_equal(plain.data(name), file.data(name))
                continue
            x = normal(4, info.columns, 3)
            rotated = rotate_rows(x, rotation.block_of(name, info.columns)).astype(np.float64)
            wanted = x.astype(np.float64) @ plain.values(name).T.astype(np.float64)
            got = rotated @ file.values(name).T.astype(np.float64)
            scale = np.linalg.norm(x, axis=1).max() * np.linalg.norm(plain.values(name), axis=1)
            assert (np.abs(got - wanted) / scale).max() < 3e-7, name


def test_the_error_of_quantization_turns_back_with_the_weights(tiny, tmp_path):
    reports = quantize_file(tiny, tmp_path / "r.gguf", "pn4", rotate=64)
    by_name = {r.name: r.relative_rms for r in reports}
    with open_gguf(tiny) as plain, open_gguf(tmp_path / "r.gguf") as file:
        name = "blk.1.ffn_down.weight"
        x, back = plain.values(name), rotate_rows(file.values(name), 64)
        distance = np.linalg.norm(back - x) / np.linalg.norm(x)
        assert distance == pytest.approx(by_name[name], rel=1e-4)
        assert distance < 0.1


def test_a_second_rotation_is_refused(tiny, tmp_path):
    quantize_file(tiny, tmp_path / "r.gguf", "pn4", rotate="auto")
    with pytest.raises(ModelError, match="rotated already"):
        quantize_file(tmp_path / "r.gguf", tmp_path / "x.gguf", "pn3", rotate="auto")
    quantize_file(tmp_path / "r.gguf", tmp_path / "x.gguf", "q8_0")
    with open_gguf(tmp_path / "x.gguf") as file, open_gguf(tmp_path / "r.gguf") as source:
        assert read_rotation(file).tensors == read_rotation(source).tensors


def test_an_unrotated_pn_file_can_be_rotated(tiny, tmp_path):
    """Tensors that keep their format are rotated too, and the old keys go."""
    quantize_file(tiny, tmp_path / "p.gguf", "pn4")
    quantize_file(tmp_path / "p.gguf", tmp_path / "r.gguf", "pn4", rotate=32)
    with open_gguf(tmp_path / "p.gguf") as p, open_gguf(tmp_path / "r.gguf") as r:
        assert r.metadata["pnrt.rotation.type"] == "hadamard"
        name = "blk.0.ffn_up.weight"
        wanted = FORMATS["pn4t"].quantize(rotate_rows(p.values(name), 32))
        np.testing.assert_array_equal(r.rows(name), wanted)
        decided = {d.name: d for d in plan(p, "pn4", rotation=choose_rotation(p, 32))}
    assert "rotated in blocks of 32" in decided[name].reason
    assert not decided[name].kept
    assert decided["token_embd.weight"].kept


def test_a_silent_source_keeps_what_its_owner_said(tiny, tmp_path):
    quantize_file(tiny, tmp_path / "r.gguf", "pn4", rotate=64)
    with open_gguf(tmp_path / "r.gguf") as file:
        silent = [e for e in file.raw_metadata() if not e[0].startswith(("pnrt.", "prism."))]
        plans = [
            TensorPlan(t.name, t.shape, t.type_id, t.nbytes, lambda t=t: iter([file.data(t.name)]))
            for t in file.tensors.values()
        ]
        write_gguf(tmp_path / "s.gguf", silent, plans)
    for block in (None, 64):
        with pytest.raises(ModelError, match="fluent noise"):
            quantize_file(tmp_path / "s.gguf", tmp_path / "x.gguf", "pn4", rotate=block)
    with pytest.raises(ModelError, match="rotated already"):
        quantize_file(
            tmp_path / "s.gguf", tmp_path / "x.gguf", "pn4", rotate=64, rotation="hadamard:64"
        )
    quantize_file(tmp_path / "s.gguf", tmp_path / "x.gguf", "pn4", rotation="hadamard:64")
    with open_gguf(tmp_path / "x.gguf") as file, open_gguf(tmp_path / "r.gguf") as r:
        assert read_rotation(file).tensors == read_rotation(r).tensors
        assert read_rotation(file).blocks == {320: 64, 576: 64}


def test_a_rotated_model_says_what_the_original_says(tiny, tmp_path):
    quantize_file(tiny, tmp_path / "r.gguf", "f16", [(".", "f32")], rotate="auto")
    tokens = list(range(40, 60))
    with (
        pnrt.load(tiny, activations="f32", kv="f32") as plain,
        pnrt.load(tmp_path / "r.gguf", activations="f32", kv="f32") as rotated,
    ):
        assert sum(step.op == "hadamard" for step in rotated.program.steps) == 2 * 4
        wanted, got = plain.logits(tokens), rotated.logits(tokens)
    assert np.abs(got - wanted).max() < 1e-4 * wanted.std()
