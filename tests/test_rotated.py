"""One model stored in several rotated ways gives llama.cpp's logits of the plain one."""

import numpy as np
import pytest

import pnrt
from pnrt import reference
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.formats import FORMATS
from pnrt.models.rotation import read_rotation

from .golden_models import golden, path_of

NAME = "qwen35_m.pnrots"
OURS = ("pnrt.rotation.", "prism.hadamard.")


def exact_weights(file):
    """Name -> float32 array, un-rotated."""
    rotation, found = read_rotation(file), {}
    for name, info in file.tensors.items():
        w = info.format.decode(file.rows(name)).reshape(info.shape)
        if block := rotation.block_of(name, info.columns):
            w = reference.hadamard(w, block, rotation.signs.get(info.columns), inverse=True)
        found[name] = w
    return found


def write(path, file, weights, keys):
    """A copy of a file with F32 weights and other rotation keys."""
    metadata = [entry for entry in file.raw_metadata() if not entry[0].startswith(OURS)] + keys
    plans = [
        TensorPlan(name, w.shape, FORMATS["f32"].type_id, w.nbytes, lambda w=w: [w.tobytes()])
        for name, w in weights.items()
    ]
    write_gguf(path, metadata, plans)


def prism(names, inverse=(), signs=None, grouped=False, block=64):
    """Keys of prism.hadamard version 1."""
    keys = {
        "version": ("uint32", 1),
        "transform": ("string", "normalized-sylvester-walsh-hadamard"),
        "axis": ("string", "input-last-dimension"),
        "block_size": ("uint32", block),
        "sign_mode": ("string", "explicit" if signs else "identity"),
        "weight_names": ("array[string]", list(names)),
        "inverse_weight_names": ("array[string]", list(inverse)),
        "gdn_v_grouped": ("bool", grouped),
    }
    if signs:
        keys["sign_widths"] = ("array[uint32]", list(signs))
        keys["sign_values"] = ("array[int8]", np.concatenate(list(signs.values())))
    return [(f"prism.hadamard.{key}", kind, value) for key, (kind, value) in keys.items()]


def check(path):
    ref = golden(NAME, "ref")
    prompt, steps = ref["p33.tokens"], ref["p33.dec_tokens"]
    expected = np.concatenate([ref["p33.logits"], ref["p33.dec_logits"]])
    with pnrt.load(path, activations="f32", kv="f32") as model:
        got = model.logits(np.concatenate([prompt, steps]), chunk=9)
        assert np.abs(got - expected).max() <= 1e-3
        np.testing.assert_array_equal(got[len(prompt) - 1 : -1].argmax(-1), steps)
        return model.program


def test_grouped_columns(tmp_path):
    with open_gguf(path_of(NAME)) as file:
        weights = exact_weights(file)
        names = [name for name in weights if "ssm_out" in name]
        heads, groups = 6, 2
        for name in names:
            w = weights[name].reshape(len(weights[name]), heads // groups, groups, -1)
            grouped = np.ascontiguousarray(w.swapaxes(1, 2)).reshape(weights[name].shape)
            weights[name] = reference.hadamard(grouped, 64)
        write(tmp_path / "grouped.gguf", file, weights, prism(names, grouped=True))
    program = check(tmp_path / "grouped.gguf")
    assert sum(step.op == "regroup" for step in program.steps) == len(names) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_rotated_embedding_and_every_matrix(tmp_path, tied):
    rng = np.random.default_rng(5)
    with open_gguf(path_of(NAME)) as file:
        weights = exact_weights(file)
        names = [n for n, w in weights.items() if w.ndim == 2 and "conv1d" not in n]
        if tied:
            # the output matrix in the embedding's place would be another model: compare with itself
            weights.pop("output.weight")
            names.remove("output.weight")
            write(tmp_path / "plain.gguf", file, weights, [])
            with pnrt.load(tmp_path / "plain.gguf", activations="f32", kv="f32") as model:
                expected = model.logits(np.arange(1, 20))
        widths = sorted({weights[name].shape[1] for name in names})
        signs = {k: rng.choice(np.array([-1, 1], np.int8), k) for k in widths}
        for name in names:
            weights[name] = reference.hadamard(weights[name], 32, signs[weights[name].shape[1]])
        keys = prism(names, ["token_embd.weight"], signs, block=32)
        write(tmp_path / "all.gguf", file, weights, keys)
    if not tied:
        check(tmp_path / "all.gguf")
        return
    with pnrt.load(tmp_path / "all.gguf", activations="f32", kv="f32") as model:
        assert np.abs(model.logits(np.arange(1, 20)) - expected).max() <= 1e-3
