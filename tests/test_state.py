"""Snapshots of caches and recurrent states: what follows one has the bits it had the first time."""

import shutil

import numpy as np
import pytest

import pnrt
from pnrt.testing import assert_bits_equal

from .golden_models import load_golden, path_of

TOKENS = np.arange(1, 41)
NAMES = ("qwen3_s.f32", "qwen35_s_mtp.f32", "qwen35_m.pnrots")


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_read_once(name, kv):
    with load_golden(name, kv=kv, threads=1) as model:
        expected = model.logits(TOKENS)[-1]
        for length in (1, 16, 33):
            model.reset()
            model.eval(TOKENS[:length])
            saved = model.snapshot()
            assert saved.position == length
            assert_bits_equal(f"{name} on", expected, model.eval(TOKENS[length:]))
            # other tokens overwrite caches and states
            model.logits(TOKENS[::-1])
            model.restore(saved)
            assert model.position == length
            assert_bits_equal(f"{name} {length}", expected, model.eval(TOKENS[length:], 7))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_goes_on_from_the_cpus_snapshot(name):
    """One layout for all backends, with the same bits in it."""
    with load_golden(name) as cpu, load_golden(name, backend="reference") as judge:
        cpu.eval(TOKENS[:9])
        judge.eval(TOKENS[:9])
        mine, its = cpu.snapshot(), judge.snapshot()
        for a, b in zip((*mine.keys, *mine.values), (*its.keys, *its.values), strict=True):
            assert_bits_equal(f"{name} cache", a.astype(np.float32), b.astype(np.float32))
        for state in mine.states:
            assert_bits_equal(f"{name} {state}", mine.states[state], its.states[state])
        judge.reset()
        judge.restore(mine)
        cpu.restore(its)
        tail = TOKENS[9:12]
        assert_bits_equal(name, judge.eval(tail, all=True), cpu.eval(tail, all=True))


def test_reset_forgets():
    with load_golden("qwen35_s_mtp.f32", threads=1) as model:
        expected = model.logits(TOKENS)
        model.eval(TOKENS[:7])
        model.reset()
        assert not any(state.any() for state in model.snapshot().states.values())
        assert_bits_equal("again", expected, model.logits(TOKENS, 16))


def test_a_snapshot_fits_its_own_model_only():
    with load_golden("qwen35_s_mtp.f32") as model:
        model.eval(TOKENS[:20])
        saved = model.snapshot()
        assert saved.nbytes == sum(
            a.nbytes for a in (*saved.keys, *saved.values, *saved.states.values())
        )
        with (
            load_golden("qwen35_s_mtp.f32", kv="f32") as other,
            pytest.raises(
                pnrt.ModelError, match=r"snapshot: found one of qwen35 with .* f16 caches"
            ),
        ):
            other.restore(saved)
        with (
            load_golden("qwen35_m.pnrots") as other,
            pytest.raises(pnrt.ModelError, match="needed one of qwen35"),
        ):
            other.restore(saved)
        with (
            load_golden("qwen35_s_mtp.f32", context=16) as other,
            pytest.raises(pnrt.ModelError, match="found 20 tokens; this context holds 16"),
        ):
            other.restore(saved)


def test_states_of_a_failed_run_are_not_used(tmp_path):
    copy = tmp_path / "nan.gguf"
    shutil.copy(path_of("qwen35_m.pnrots"), copy)
    with pnrt.load(copy) as model:
        before = model.logits(TOKENS[:3])
        offset = model.file.tensors["token_embd.weight"].offset
        stride = model.file.rows("token_embd.weight").shape[1]
    with open(copy, "r+b") as file:
        # the row of token 9 becomes NaN; the others stay
        file.seek(offset + 9 * stride)
        file.write(np.array([np.nan], np.float16).tobytes())
    with pnrt.load(copy, validate=False) as model:
        model.eval(TOKENS[:3])
        saved = model.snapshot()
        with pytest.raises(pnrt.ModelError, match="an input is NaN"):
            model.eval([4, 9])
        with pytest.raises(pnrt.ModelError, match=r"states are those of a failed run .*reset"):
            model.eval([4])
        model.restore(saved)
        model.eval([4])
        with pytest.raises(pnrt.ModelError, match="an input is NaN"):
            model.eval([9])
        assert_bits_equal("after reset", before, model.logits(TOKENS[:3]))


def test_skipped_blocks_are_said():
    with load_golden("qwen35_s_mtp.f32") as model:
        assert len(model.notes) == 1
        assert model.notes[0].startswith("skipped: 1 block for drafting several tokens")
    with load_golden("llama_m.pn") as model:
        assert model.notes == ()
