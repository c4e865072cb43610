"""read_config: golden headers read right, and each way to be wrong is one named refusal."""

import math

import pytest
from fake_file import HEADERS, fake

from pnrt.errors import ModelError
from pnrt.models.config import MAX_BLOCKS, read_config


def refuse(file, *words):
    with pytest.raises(ModelError) as caught:
        read_config(file)
    message = str(caught.value)
    assert message.startswith("model.gguf: ")
    for word in words:
        assert word in message, message


def changed(name="llama_s.f32", **keys):
    """A golden header with keys replaced (None removes); __ stands for a dot."""
    file = fake(name)
    arch = file.metadata["general.architecture"]
    for key, value in keys.items():
        key = f"{arch}.{key.replace('__', '.')}"
        if value is None:
            file.metadata.pop(key)
        else:
            file.metadata[key] = value
    return file


def test_llama():
    config = read_config(fake("llama_s.f32"))
    assert (config.architecture, config.n_layers, config.mtp_layers) == ("llama", 2, 0)
    assert (config.d_model, config.d_ff, config.vocab_size) == (64, (96, 96), 320)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == ((4, 4), (2, 2), 16)
    assert (config.rope_dim, config.rope_base, config.neox) == (16, 10000.0, False)
    assert config.rope_scaling.kind == "none"
    assert config.context_length == 256
    assert math.isclose(config.eps, 1e-5, rel_tol=1e-6)
    assert config.delta is None
    assert config.recurrent == (False, False)


def test_scalings():
    linear = read_config(fake("llama_s_lin.f32")).rope_scaling
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    yarn = read_config(fake("llama_s_yarn.f32")).rope_scaling
    assert (yarn.kind, yarn.factor, yarn.original_context, yarn.attn_factor) == ("yarn", 4.0, 64, 1)


def test_old_linear_key():
    assert read_config(changed(rope__scale_linear=2.0)).rope_scaling.factor == 2.0


def test_scaling_none_ignores_factor():
    file = changed("llama_s_lin.f32", rope__scaling__type="none")
    assert read_config(file).rope_scaling.factor == 1.0


def test_yarn_context_defaults_to_context_length():
    file = changed("llama_s_yarn.f32", rope__scaling__original_context_length=None)
    assert read_config(file).rope_scaling.original_context == 256


def test_keys_that_change_nothing():
    neutral = {"logit_scale": 1.0, "attention__causal": True, "attention__scale": 0.0}
    config = read_config(changed(expert_count=0, attention__sliding_window=4096, **neutral))
    assert config == read_config(changed(attention__sliding_window=0))


def test_a_sliding_window_ends_the_context():
    config = read_config(changed("llama_s_yarn.f32", attention__sliding_window=64))
    assert config.context_length == 64
    assert config.rope_scaling == read_config(changed("llama_s_yarn.f32")).rope_scaling


@pytest.mark.parametrize(("key", "found"), [("general.type", "adapter"), ("split.count", 3)])
def test_parts_of_models_are_refused(key, found):
    file = fake("llama_s.f32")
    file.metadata[key] = found
    refuse(file, f"key {key}: found {found!r}", "needed")


def test_qwen2_and_qwen3():
    assert read_config(fake("qwen2_s.f32")).neox
    config = read_config(fake("qwen3_s.f32"))
    assert (config.head_dim, config.rope_dim, config.n_kv_heads) == (24, 24, (1, 1))


def test_qwen35():
    config = read_config(fake("qwen35_s.f32"))
    assert config.recurrent == (True, True, True, False) * 2
    assert (config.head_dim, config.rope_dim) == (32, 8)
    assert len(config.rope_sections) == 4
    delta = config.delta
    assert (delta.conv_kernel, delta.state_size, delta.key_heads, delta.value_heads) == (
        4,
        16,
        2,
        4,
    )
    assert (delta.channels, delta.inner) == (128, 64)


def test_mtp_block_is_not_a_layer():
    config = read_config(fake("qwen35_s_mtp.f32"))
    assert (config.n_layers, config.mtp_layers) == (4, 1)
    assert config.recurrent == (True, False, True, True)
    assert len(config.d_ff) == len(config.n_heads) == 4


def test_interval_default_is_four():
    file = changed("qwen35_m.pnrot", full_attention_interval=None)
    assert read_config(file).recurrent == (True, True, True, False)


def test_interval_other():
    file = changed("qwen35_m.pnrot", full_attention_interval=2)
    assert read_config(file).recurrent == (True, False, True, False)


def test_per_layer_arrays():
    file = changed(feed_forward_length=[96, 128], attention__head_count_kv=[2, 4])
    config = read_config(file)
    assert config.d_ff == (96, 128)
    assert config.n_kv_heads == (2, 4)


def test_kv_heads_default_to_heads():
    assert read_config(changed(attention__head_count_kv=None)).n_kv_heads == (4, 4)


def test_vocabulary_beats_the_key():
    file = changed(vocab_size=7)
    file.metadata["tokenizer.ggml.tokens"] = ["a"] * 320
    assert read_config(file).vocab_size == 320


def test_embedding_rows_without_vocabulary():
    assert read_config(changed(vocab_size=None)).vocab_size == 320


def test_three_sections_are_padded():
    file = changed("qwen35_s.f32", rope__dimension_sections=[2, 2, 1])
    assert read_config(file).rope_sections == (2, 2, 1, 0)


@pytest.mark.parametrize("found", [None, "mamba", 3, ["llama"]])
def test_unknown_architecture(found):
    file = fake("llama_s.f32")
    file.metadata["general.architecture"] = found
    refuse(file, "general.architecture", "llama, qwen2, qwen3, qwen35")


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
@pytest.mark.parametrize("name", ["llama_s.f32", "qwen2_s.f32", "qwen3_s.f32", "qwen35_s.f32"])
def test_required_key_absent(name, key):
    file = fake(name)
    key = f"{file.metadata['general.architecture']}.{key}"
    del file.metadata[key]
    refuse(file, key, "found nothing")


@pytest.mark.parametrize(
    "key",
    [
        "rope.dimension_sections",
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.inner_size",
    ],
)
def test_required_qwen35_key_absent(key):
    file = fake("qwen35_s.f32")
    del file.metadata["qwen35." + key]
    refuse(file, "qwen35." + key, "found nothing")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", True),
        ("block_count", 2.0),
        ("block_count", "2"),
        ("block_count", MAX_BLOCKS + 1),
        ("block_count", 1 << 60),
        ("nextn_predict_layers", 2),
        ("expert_count", 8),
        ("feed_forward_length", [96]),
        ("feed_forward_length", [96, 0]),
        ("feed_forward_length", "96"),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 3),
        ("attention.head_count_kv", 8),
        ("attention.head_count_kv", [2, 0]),
        ("attention.value_length", 32),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", -1.0),
        ("rope.dimension_count", 8),
        ("rope.dimension_count", 15),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.type", 1),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.factor", math.nan),
        ("rope.scaling.original_context_length", 0),
        ("rope.scaling.attn_factor", 0.0),
        ("rope.scaling.yarn_beta_fast", 16.0),
        ("attention.sliding_window", -1),
        ("attention.scale", 0.5),
        ("attention.causal", False),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
    ],
)
def test_bad_value(key, value):
    file = fake("llama_s.f32")
    file.metadata["llama." + key] = value
    refuse(file, "llama." + key, "; needed ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.dimension_sections", [2, 2]),
        ("rope.dimension_sections", [0, 0, 0, 0]),
        ("rope.dimension_sections", [2, -1, 2, 0]),
        ("rope.dimension_sections", 4),
        ("rope.dimension_count", 34),
        ("rope.dimension_count", 7),
        ("ssm.time_step_rank", 3),
        ("ssm.inner_size", 65),
        ("full_attention_interval", 0),
        ("attention.recurrent_layers", [True] * 7),
        ("attention.recurrent_layers", [True] * 7 + [2]),
    ],
)
def test_bad_qwen35_value(key, value):
    file = fake("qwen35_s.f32")
    file.metadata["qwen35." + key] = value
    refuse(file, "qwen35." + key, "; needed ")


def test_unrotated_pair_is_refused():
    # the fourth section takes pair 3, and text has no fourth position
    file = changed("qwen35_s.f32", rope__dimension_sections=[1, 1, 1, 1])
    refuse(file, "unrotated", "pair 3")


def test_sections_of_the_27b_model():
    file = changed(
        "qwen35_s.f32",
        attention__key_length=256,
        attention__value_length=256,
        rope__dimension_count=64,
        rope__dimension_sections=[11, 11, 10, 0],
    )
    assert read_config(file).rope_sections == (11, 11, 10, 0)


def test_recurrent_layers_may_have_no_heads():
    heads = [0, 0, 0, 2] * 2
    file = changed("qwen35_s.f32", attention__head_count=heads, attention__head_count_kv=heads)
    assert read_config(file).n_heads == tuple(heads)


def test_attention_layer_needs_heads():
    heads = [2, 2, 2, 0] * 2
    refuse(changed("qwen35_s.f32", attention__head_count=heads), "in block 3")


def test_qwen2_heads_fill_the_model_width():
    file = changed("qwen2_s.f32", attention__key_length=8, attention__value_length=8)
    refuse(file, "qwen2.attention.key_length", "found 8")


def test_head_width_has_no_default_when_it_does_not_divide():
    refuse(changed(embedding_length=65, rope__dimension_count=None), "key_length", "found nothing")


def test_every_golden_header_reads():
    assert len(HEADERS) >= 10
    for name in HEADERS:
        read_config(fake(name))
