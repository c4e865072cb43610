"""Whole models: llama.cpp's logits as the judge of truth, the reference as the judge of bits."""

import shutil

import numpy as np
import pytest

import pnrt
from pnrt import reference
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal

from .golden_models import BITS, MODELS, golden, load_golden, path_of
from .reference_run import run_reference

JOBS = ("p1", "p7", "p33", "p70", "p130")


@pytest.mark.parametrize("name", MODELS)
def test_f32_activations_match_llama_cpp(name):
    """MODELS.md 8: max |difference| <= 1e-3 against exactly dequantized weights, greedy equal."""
    ref = golden(name, "ref")
    with load_golden(name, activations="f32", kv="f32") as model:
        for job in (j for j in JOBS if f"{j}.tokens" in ref):
            prompt, steps = ref[f"{job}.tokens"], ref[f"{job}.dec_tokens"]
            got = model.logits(np.concatenate([prompt, steps]))
            expected = np.concatenate([ref[f"{job}.logits"], ref[f"{job}.dec_logits"]])
            assert np.abs(got - expected).max() <= 1e-3, (name, job)
            greedy = got[len(prompt) - 1 : -1].argmax(-1)
            np.testing.assert_array_equal(greedy, steps, err_msg=f"{name} {job}")


@pytest.mark.parametrize("name", [n for n in MODELS if golden(n, "native")])
def test_q8_0_activations_are_near_llama_cpp(name, record_property):
    native = golden(name, "native")
    worst = 0.0
    with load_golden(name) as model:
        for job in (j for j in JOBS if f"{j}.logits" in native):
            tokens = np.concatenate([native[f"{job}.tokens"], native[f"{job}.dec_tokens"]])
            expected = np.concatenate([native[f"{job}.logits"][-1:], native[f"{job}.dec_logits"]])
            got = model.logits(tokens)[-len(expected) :]
            worst = max(worst, float(((got - expected) ** 2).mean() / (expected**2).mean()))
    record_property("nmse", worst)
    assert worst <= 1e-2, name


@pytest.mark.parametrize("activations", ["q8_0", "f32"])
@pytest.mark.parametrize("name", BITS)
def test_any_chunking_and_threads_give_the_references_bits(name, activations):
    tokens = golden(name, "ref")["p33.tokens"]
    expected = None
    for threads in (1, 2):
        with load_golden(name, activations=activations, threads=threads) as model:
            if expected is None:
                expected = run_reference(model, tokens, activations, "f16")
            for chunk in (512, 7, 1):
                got = model.logits(tokens, chunk)
                assert_bits_equal(f"{name} chunk {chunk} threads {threads}", expected, got)


def test_generation_continues_and_stops_at_the_context():
    ref = golden("llama_s.f32", "ref")
    prompt, steps = ref["p7.tokens"], ref["p7.dec_tokens"]
    with load_golden("llama_s.f32", activations="f32", kv="f32", context=12) as model:
        model.tokenizer.eog = frozenset()
        assert list(model.generate(prompt, n=4)) == list(steps[:4])
        assert model.position == len(prompt) + 3
        model.reset()
        assert list(model.generate(prompt, n=50)) == list(steps[:6])
        with pytest.raises(pnrt.ModelError, match=r"the context is full: 12 \+ 1"):
            model.eval([1])
        model.reset()
        with pytest.raises(pnrt.ModelError, match="13 tokens, it holds 12"):
            model.logits(np.ones(13, int))


def test_bad_requests():
    with load_golden("llama_s.f32") as model:
        vocabulary = model.config.vocab_size
        with pytest.raises(pnrt.ModelError, match=f"token 1 is {vocabulary}: ids are 0 to"):
            model.eval([0, vocabulary])
        with pytest.raises(pnrt.ModelError, match="no tokens"):
            model.eval([])
        with pytest.raises(pnrt.ModelError, match="chunk: found 0"):
            model.eval([1], chunk=0)
    for option, value in (("activations", "q4"), ("kv", "q8_0"), ("backend", "tpu")):
        with pytest.raises(pnrt.DeviceError, match="unknown"):
            pnrt.load(path_of("llama_s.f32"), **{option: value})
    with pytest.raises(pnrt.ModelError, match="context 0"):
        pnrt.load(path_of("llama_s.f32"), context=0)
    with pytest.raises(pnrt.DeviceError, match="threads"):
        pnrt.load(path_of("llama_s.f32"), threads=0)


def test_pn_without_rotation_keys_is_refused():
    with pytest.raises(pnrt.ModelError, match="--rotation none"):
        pnrt.load(path_of("llama_m.pn"))


def test_weights_that_are_not_finite_name_the_step(tmp_path):
    copy = tmp_path / "nan.gguf"
    shutil.copy(path_of("llama_m.pn"), copy)
    with pnrt.load(copy, rotation="none") as model:
        info = model.file.tensors["blk.0.ffn_up.weight"]
    with open(copy, "r+b") as file:
        file.seek(info.offset)
        file.write(np.array([np.nan], np.float16).tobytes())
    with pytest.raises(pnrt.FormatError, match=r"ffn_up\.weight row 0 block 0 .*scale d is nan"):
        pnrt.load(copy, rotation="none")
    # whoever wants to watch the NaN spread may
    with (
        pnrt.load(copy, rotation="none", validate=False) as model,
        pytest.raises(pnrt.ModelError, match=r"blk\.0\.ffn_down: an input is NaN"),
    ):
        model.eval([1, 2, 3])


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_norm.weight"])
def test_vectors_and_the_embedding_are_looked_at_too(tmp_path, name):
    copy = tmp_path / "nan.gguf"
    shutil.copy(path_of("llama_m.pn"), copy)
    with pnrt.container.gguf.open_gguf(copy) as file:
        info = file.tensors[name]
    form, nan = info.format, np.array([np.nan], np.float16 if info.format.group else np.float32)
    offset = form.halves[0][0] if form.group else 0
    with open(copy, "r+b") as file:
        file.seek(info.offset + offset)
        file.write(nan.tobytes())
    with pytest.raises(pnrt.FormatError, match=rf"{name} row 0 block 0 .*must be finite"):
        pnrt.load(copy, rotation="none")


def test_close_and_load_again():
    tokens = golden("llama_s.f32", "ref")["p7.tokens"]
    first = load_golden("llama_s.f32")
    expected = first.logits(tokens)
    first.close()
    with load_golden("llama_s.f32") as again:
        assert_bits_equal("again", expected, again.logits(tokens))


def test_two_models_at_once():
    tokens = golden("llama_s.f32", "ref")["p7.tokens"]
    with load_golden("llama_s.f32") as a, load_golden("llama_m.q4_0") as b:
        alone = a.logits(tokens)
        b.logits(tokens)
        a.reset()
        parts = []
        for token in tokens:
            parts.append(a.eval([token]))
            b.reset()
            b.eval([token])
        assert_bits_equal("interleaved", alone, np.stack(parts))


def test_formats_of_the_table_are_formats():
    table = pnrt.backend.open("cpu").table()
    assert {form for _, form, _ in table} - {"-"} <= set(FORMATS)
    assert reference.matmul
