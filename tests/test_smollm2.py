"""SmolLM2 against llama.cpp's greedy text; needs the model in the cache (`pnrt demo`)."""

import json
from pathlib import Path

import numpy as np
import pytest

import pnrt
from pnrt.demo import cached_model

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2" / "greedy.json").read_text())
# the float32 path's largest logit error on this model, with room
PATH_ERROR = 0.01


@pytest.fixture(scope="module")
def model():
    path = cached_model()
    if path is None:
        pytest.skip("SmolLM2 is not cached: run `pnrt demo` once")
    with pnrt.load(path, activations="f32", kv="f32", context=256) as loaded:
        yield loaded


@pytest.mark.parametrize("case", sorted(GOLDEN["cases"]))
def test_greedy_text_with_exact_weights(model, case):
    """Tokens equal up to the first step whose stored margin is below the path's error."""
    golden = GOLDEN["cases"][case]
    expected, margins = golden["ref"]["ids"], np.array(golden["ref"]["top1_minus_top2"])
    assert model.tokenizer.encode(golden["prompt"], parse_special=True) == golden["prompt_ids"]
    close = np.flatnonzero(margins < PATH_ERROR)
    steps = int(close[0]) if close.size else len(expected)
    assert steps > 4
    ids = golden["prompt_ids"] + expected[: steps - 1]
    got = model.logits(ids)[len(golden["prompt_ids"]) - 1 :].argmax(-1)
    np.testing.assert_array_equal(got, expected[:steps])
