"""rope_tables against llama.cpp's rotated queries, the judge's angles and hand-worked values."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_file import fake
from forward_float64 import Forward

from pnrt.container.gguf import open_gguf
from pnrt.errors import ModelError
from pnrt.models.config import RopeScaling, read_config
from pnrt.models.rope import rope_tables

GOLDEN = Path(__file__).parent.parent / "golden" / "models"


def test_rotated_queries_of_llama_cpp():
    stored = np.load(GOLDEN / "llama_s.intermediates.p7.npz")
    with open_gguf(GOLDEN / "llama_s.f32.gguf") as file:
        freqs = file.rows("rope_freqs.weight").view(np.float32)
        config = read_config(file)
        for step, positions in (("s0", np.arange(7)), ("s1", [7])):
            cos, sin = rope_tables(config, positions, freqs)
            assert cos.shape == (len(positions), 8)
            assert cos.dtype == sin.dtype == np.float32
            for head in ("Qcur", "Kcur"):
                before = stored[f"{step}/{head}-0#1"].reshape(len(positions), -1, 8, 2)
                after = stored[f"{step}/{head}-0#2"].reshape(before.shape)
                c, s = cos[:, None], sin[:, None]
                a, b = before[..., 0], before[..., 1]
                turned = np.stack([a * c - b * s, a * s + b * c], axis=-1)
                np.testing.assert_allclose(turned, after, atol=2e-6)


@pytest.mark.parametrize(
    "name", ["llama_s_lin.f32", "llama_s_yarn.f32", "qwen2_s.f32", "qwen3_s.f32", "qwen35_s.f32"]
)
def test_same_angles_as_the_judge(name):
    file = fake(name)
    config = read_config(file)
    angle, size = Forward(file).angles(config.rope_dim)
    positions = np.array([0, 1, 63, 255, 4097])
    cos, sin = rope_tables(config, positions)
    np.testing.assert_allclose(cos, size * np.cos(np.outer(positions, angle)), atol=1e-6)
    np.testing.assert_allclose(sin, size * np.sin(np.outer(positions, angle)), atol=1e-6)


def test_far_positions_are_exact():
    # the first pair turns by one radian per token; float32 angles would be off by 1e-2 here
    config = read_config(fake("llama_s.f32"))
    cos, sin = rope_tables(config, [200_003])
    assert cos[0, 0] == np.float32(math.cos(200_003))
    assert sin[0, 0] == np.float32(math.sin(200_003))


def test_linear_is_a_slower_clock():
    config = read_config(fake("llama_s_lin.f32"))
    plain = replace(config, rope_scaling=RopeScaling("none", 1.0, 256, 1.0))
    for scaled, unscaled in zip(
        rope_tables(config, [4, 40]), rope_tables(plain, [1, 10]), strict=True
    ):
        np.testing.assert_array_equal(scaled, unscaled)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    config = read_config(fake("llama_s_yarn.f32"))
    cos, _ = rope_tables(config, [0, 100])
    size = 1 + 0.1 * math.log(4)
    np.testing.assert_allclose(cos[0], size, rtol=1e-7)
    assert cos[1, 0] == pytest.approx(size * math.cos(100), abs=1e-6)
    slowest = 100 * 10000 ** (-14 / 16)
    assert cos[1, 7] == pytest.approx(size * math.cos(slowest / 4), abs=1e-6)


def test_attention_factor_multiplies_both():
    config = read_config(fake("llama_s.f32"))
    twice = replace(config, rope_scaling=RopeScaling("none", 1.0, 256, 2.0))
    for one, two in zip(rope_tables(config, [5]), rope_tables(twice, [5]), strict=True):
        np.testing.assert_array_equal(2 * one, two)


@pytest.mark.parametrize(
    ("freqs", "word"),
    [
        (np.ones(7), "7 values; needed 8"),
        (np.array([1, 1, 0, 1, 1, 1, 1, 1.0]), "found 0.0 at element 2"),
        (np.array([1, 1, 1, 1, 1, 1, 1, np.nan]), "found nan at element 7"),
        (np.array([-1, 1, 1, 1, 1, 1, 1, 1.0]), "found -1.0 at element 0"),
    ],
)
def test_bad_rope_freqs(freqs, word):
    with pytest.raises(ModelError, match="rope_freqs") as caught:
        rope_tables(read_config(fake("llama_s.f32")), [0], freqs)
    assert word in str(caught.value)


def test_unknown_scaling_is_refused():
    config = read_config(fake("llama_s.f32"))
    config = replace(config, rope_scaling=RopeScaling("longrope", 4.0, 256, 1.0))
    with pytest.raises(ModelError, match="longrope"):
        rope_tables(config, [0])
