"""`.model` to GGUF: values, names, keys; what cannot be translated is not guessed."""

import os
import struct

import numpy as np
import pytest

from pnrt.container.convert import convert_model
from pnrt.container.cyb_model import open_model, write_model
from pnrt.container.gguf import TensorPlan, open_gguf
from pnrt.errors import FileError, FormatError
from pnrt.formats import FORMATS
from pnrt.models.config import read_config

D, FF, V, HEADS, WIDTH = 64, 96, 40, 2, 16
CONFIG = """model_type = "qwen3"
[architecture]
num_hidden_layers = 1
max_position_embeddings = 128
hidden_size = 64
intermediate_size = 96
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
rms_norm_eps = 1e-6
rope_theta = 1000000
vocab_size = 40
[tokenizer]
eos_token_ids = [39]
"""
VOCAB = (
    "[tokens]\n"
    + "".join(f'{i} = "t{i}"\n' for i in range(V - 1))
    + f'{V - 1} = "<|im_end|>"\n[merges]\n0 = ["t", "1"]\n'
)
SHAPES = {
    "model.embed_tokens.weight": ((V, D), "q8"),
    "model.layers.0.self_attn.q_proj.weight": ((HEADS * WIDTH, D), "q4"),
    "model.layers.0.self_attn.k_proj.weight": ((WIDTH, D), "ternary"),
    "model.layers.0.self_attn.v_proj.weight": ((WIDTH, D), "u16"),
    "model.layers.0.self_attn.o_proj.weight": ((D, HEADS * WIDTH), "q8"),
    "model.layers.0.self_attn.q_norm.weight": ((WIDTH,), "u32"),
    "model.layers.0.self_attn.k_norm.weight": ((WIDTH,), "u32"),
    "model.layers.0.input_layernorm.weight": ((D,), "u32"),
    "model.layers.0.post_attention_layernorm.weight": ((D,), "u32"),
    "model.layers.0.mlp.gate_proj.weight": ((FF, D), "q8"),
    "model.layers.0.mlp.up_proj.weight": ((FF, D), "q8"),
    "model.layers.0.mlp.down_proj.weight": ((D, FF), "q8"),
    "model.norm.weight": ((D,), "u32"),
}


def build(path, config=CONFIG, vocab=VOCAB, extra=()):
    rng = np.random.default_rng(0)
    plans, encodings = [], {}
    for name, (shape, encoding) in {**SHAPES, **dict(extra)}.items():
        x = rng.standard_normal((int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
        rows = FORMATS["q4_K" if encoding == "q4k" else f"cyb_{encoding}"].quantize(x)
        plans.append(TensorPlan(name, shape, 0, rows.nbytes, lambda rows=rows: [rows]))
        encodings[name] = encoding
        if encoding == "ternary":
            scale = struct.pack("<f", 0.125)
            plans.append(TensorPlan(f"{name}.scale", (1,), 0, 4, lambda scale=scale: [scale]))
            encodings[f"{name}.scale"] = "u32"
    sections = {"card": "# hello", "config": config, "vocab": vocab}
    write_model(path, "tiny", sections, plans, encodings)
    return path


def test_qwen3_is_translated(tmp_path):
    source, out = build(tmp_path / "m.model"), tmp_path / "m.gguf"
    with open_model(source, scale_encoding="f32") as file, open_model(source) as undecided:
        rows = convert_model(file, out)
        with open_gguf(out) as made:
            config = read_config(made)
            assert (config.architecture, config.n_layers, config.d_model) == ("qwen3", 1, D)
            assert (config.head_dim, config.rope_base, config.vocab_size) == (WIDTH, 1e6, V)
            assert made.metadata["tokenizer.ggml.tokens"][V - 1] == "<|im_end|>"
            assert made.metadata["tokenizer.ggml.token_type"][-2:] == [1, 3]
            assert made.metadata["tokenizer.ggml.merges"] == ["t 1"]
            assert made.metadata["tokenizer.ggml.eos_token_id"] == 39
            assert made.metadata["cyb.card"] == "# hello"
            assert "blk.0.attn_q_norm.weight" in made.tensors
            assert len(made.tensors) == len(SHAPES) == len(rows)
            for row in rows:
                assert row["target"] == "f32"
                assert np.array_equal(made.values(row["to"]), file.values(row["name"]))
        with pytest.raises(FormatError, match="--scale-encoding"):
            convert_model(undecided, tmp_path / "no.gguf")
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "m.model"]


def test_target_and_what_does_not_divide(tmp_path):
    extra = {"lm_head.weight": ((V, 256), "q4k")}
    source, out = build(tmp_path / "m.model", extra=extra), tmp_path / "m.gguf"
    with open_model(source, scale_encoding="f32") as file:
        rows = {row["to"]: row for row in convert_model(file, out, "pn4t")}
        # 96 columns are no multiple of 64; vectors stay plain; k-quants keep their bytes
        assert rows["blk.0.ffn_down.weight"]["target"] == "f32"
        assert rows["output_norm.weight"]["target"] == "f32"
        assert rows["token_embd.weight"]["target"] == "pn4t"
        with open_gguf(out) as made:
            assert np.array_equal(made.rows("output.weight"), file.rows("lm_head.weight"))
            assert made.tensors["output.weight"].format.name == "q4_K"
            x = file.values("model.embed_tokens.weight")
            assert np.array_equal(made.rows("token_embd.weight"), FORMATS["pn4t"].quantize(x))
            assert made.metadata["pnrt.rotation.type"] == "none"
        with pytest.raises(FormatError, match="GGUF holds"):
            convert_model(file, out, "cyb_q8")


def test_other_architectures_keep_their_names(tmp_path):
    source = build(tmp_path / "m.model", CONFIG.replace("qwen3", "llama"))
    with open_model(source, scale_encoding="f32") as file:
        convert_model(file, tmp_path / "m.gguf")
        with open_gguf(tmp_path / "m.gguf") as made:
            assert made.metadata["general.architecture"] == "cyb"
            assert 'model_type = "llama"' in made.metadata["cyb.config"]
            assert "model.norm.weight" in made.tensors
            assert len(made.tensors) == len(SHAPES)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"extra": {"odd.weight": ((2, 32), "q8")}}, "no such tensor"),
        ({"vocab": VOCAB.replace("7 = ", "77 = ", 1)}, "entry 7 of tokens is None"),
        ({"vocab": VOCAB.replace('"t8"', "8")}, "entry 8 of tokens is 8"),
        ({"vocab": VOCAB.replace('["t", "1"]', '["t"]')}, "entry 0 of merges"),
        ({"vocab": "tokens = 1\n"}, "entry 0 of tokens"),
    ],
)
def test_refusals(tmp_path, change, word):
    source = build(tmp_path / "m.model", **change)
    with (
        open_model(source, scale_encoding="f32") as file,
        pytest.raises(FileError, match=word) as caught,
    ):
        convert_model(file, tmp_path / "m.gguf")
    assert str(source) in str(caught.value)
    assert os.listdir(tmp_path) == ["m.model"]
