"""check_weights: golden tensor lists pass, and each kind of damage is refused by name."""

import pytest
from fake_file import HEADERS, fake

from pnrt.errors import ModelError
from pnrt.models.config import read_config
from pnrt.models.weights import check_weights, expected_tensors, extra_tensors, mtp_tensors


def refuse(file, *words):
    with pytest.raises(ModelError) as caught:
        check_weights(file, read_config(file))
    for word in ("model.gguf", *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", list(HEADERS))
def test_golden_files_are_complete(name):
    file = fake(name)
    config = read_config(file)
    found = check_weights(file, config)
    extra = extra_tensors(file, config)
    assert {info.name for info in found.values()} | set(extra) == set(file.tensors)
    assert bool(extra) == (name == "qwen35_s_mtp.f32")


@pytest.mark.parametrize("name", ["llama_s.f32", "qwen2_s.f32", "qwen3_s.f32", "qwen35_s.f32"])
def test_every_tensor_counts(name):
    config = read_config(fake(name))
    for tensor, need in expected_tensors(config).items():
        file = fake(name)
        info = file.tensors.pop(tensor, None)
        if info is None or need.optional:
            check_weights(file, config)
        else:
            refuse(file, tensor, "found nothing")


@pytest.mark.parametrize("name", ["llama_s.f32", "qwen2_s.f32", "qwen3_s.f32", "qwen35_s.f32"])
def test_every_shape_counts(name):
    config = read_config(fake(name))
    for tensor in expected_tensors(config):
        file = fake(name)
        if tensor in file.tensors:
            shape = file.tensors[tensor].shape
            file.add(tensor, (*shape[:-1], shape[-1] + 32))
            refuse(
                file,
                f"tensor {tensor}",
                f"found shape {[*shape[:-1], shape[-1] + 32]}",
                str(list(shape)),
            )


def test_transposed_matrix():
    file = fake("llama_s.f32")
    file.add("blk.1.ffn_up.weight", (64, 96))
    refuse(file, "blk.1.ffn_up.weight", "found shape [64, 96]; needed [96, 64]")


def test_tied_output_is_the_embedding():
    found = check_weights(*(lambda f: (f, read_config(f)))(fake("llama_s_lin.f32")))
    assert found["output.weight"].name == "token_embd.weight"
    untied = fake("llama_s.f32")
    assert check_weights(untied, read_config(untied))["output.weight"].name == "output.weight"


def test_optional_biases():
    file = fake("llama_s.f32")
    file.add("blk.0.attn_output.bias", (64,))
    file.add("blk.0.ffn_down.bias", (64,), "f16")
    found = check_weights(file, read_config(file))
    assert "blk.0.ffn_down.bias" in found
    assert "blk.0.attn_q.bias" not in found


def test_quantized_norm():
    file = fake("llama_s.f32")
    file.add("blk.0.attn_norm.weight", (64,), "q8_0")
    refuse(file, "blk.0.attn_norm.weight", "q8_0", "f32, f16, bf16")


def test_unknown_format():
    file = fake("llama_s.f32")
    file.add("blk.0.attn_q.weight", (64, 64), None)
    refuse(file, "blk.0.attn_q.weight", "type id 999")


def test_rope_freqs_length():
    file = fake("llama_s.f32")
    file.add("rope_freqs.weight", (16,))
    refuse(file, "rope_freqs.weight", "[16]", "[8]")


def test_row_vectors_count_as_vectors():
    file = fake("llama_s.f32")
    file.add("output_norm.weight", (1, 64))
    assert check_weights(file, read_config(file))["output_norm.weight"].columns == 64


@pytest.mark.parametrize(
    "name", ["blk.0.attn_output.bias", "blk.1.attn_qkv.weight", "rope_freqs.weight"]
)
def test_a_tensor_that_would_change_the_result(name):
    file = fake("qwen2_s.f32")
    file.add(name, (64,))
    refuse(file, name, "qwen2 has no such")


def test_harmless_extra_is_listed():
    file = fake("llama_s.f32")
    file.add("cls.weight", (2, 64))
    config = read_config(file)
    check_weights(file, config)
    assert extra_tensors(file, config) == ["cls.weight"]


def test_mtp_tensors():
    file = fake("qwen35_s_mtp.f32")
    names = mtp_tensors(file, read_config(file))
    assert len(names) == 15
    assert all(name.startswith("blk.4.") for name in names)
