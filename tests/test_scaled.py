"""X.scale beside X.weight: one number for the products of a matrix, as NVFP4 files have it."""

import numpy as np
import pytest

import pnrt
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.standin import StandIn
from pnrt.testing import assert_bits_equal

from .golden_models import path_of

SCALES = {"blk.0.attn_q": 0.5, "blk.0.ffn_down": -4.0, "blk.1.attn_v": 2.0, "blk.1.ffn_gate": 8.0}


def write(path, folded):
    """llama_s with SCALES as tensors of their own, or folded into the weights."""
    with open_gguf(path_of("llama_s.f32")) as file:
        arrays = {
            name: file.values(name).reshape(info.shape) for name, info in file.tensors.items()
        }
        for name, factor in SCALES.items():
            if folded:
                arrays[f"{name}.weight"] = arrays[f"{name}.weight"] * np.float32(factor)
            else:
                arrays[f"{name}.scale"] = np.float32([factor])
        plans = [
            TensorPlan(name, x.shape, 0, x.nbytes, lambda x=x: iter([x]))
            for name, x in arrays.items()
        ]
        write_gguf(path, file.raw_metadata(), plans)
    return path


def logits(path, backend):
    with pnrt.load(path, backend=backend, activations="f32", kv="f32") as model:
        return model.logits(np.array([1, 7, 3]))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scaled") / "m.gguf", folded=False)


def test_powers_of_two_are_exact_wherever_they_stand(scaled, tmp_path):
    folded = write(tmp_path / "m.gguf", folded=True)
    assert_bits_equal("scaled", logits(folded, "cpu"), logits(scaled, "cpu"))


@pytest.mark.parametrize("backend", ["reference", "cuda"])
def test_backends_agree(scaled, backend):
    engine = CudaBackend(StandIn()) if backend == "cuda" else backend
    assert_bits_equal(backend, logits(scaled, "cpu"), logits(scaled, engine))
