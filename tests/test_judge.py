"""The reference as a backend, step by step beside the CPU: one program, one set of bits."""

import numpy as np
import pytest

import pnrt
from pnrt import backend
from pnrt.testing import assert_bits_equal

from .golden_models import load_golden

TOKENS = np.arange(1, 21)
NAMES = ("llama_m.pn", "qwen2_s.f32", "qwen35_s_mtp.f32", "qwen35_m.pnrots")


def record(model, chunk, all=True):
    """Step -> [rows, width] of a run, in program order, and the logits."""
    taps = {}

    def observe(tap):
        assert tap.values().shape[0] == tap.T
        taps.setdefault(tap.step.name, []).append((tap.start, tap.values().copy()))

    model.reset()
    model.session.observer = observe
    logits = model.eval(TOKENS, chunk, all)
    model.session.observer = None
    for name, parts in taps.items():
        sizes = np.cumsum([0, *(len(x) for _, x in parts)])
        assert [start - parts[0][0] for start, _ in parts] == list(sizes[:-1]), name
    return {name: np.concatenate([x for _, x in parts]) for name, parts in taps.items()}, logits


@pytest.mark.parametrize("options", [{}, {"activations": "f32", "kv": "f32"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_step_has_the_references_bits(name, options):
    with (
        load_golden(name, **options) as cpu,
        load_golden(name, backend="reference", **options) as judge,
    ):
        expected, logits = record(judge, 512)
        assert list(expected) == [step.name for step in cpu.program.steps]
        for chunk in (512, 7, 1):
            taps, got = record(cpu, chunk)
            assert list(taps) == list(expected)
            for step, values in expected.items():
                assert_bits_equal(f"{name} {step} chunk {chunk}", values, taps[step])
            assert_bits_equal(f"{name} logits chunk {chunk}", logits, got)
        _, last = record(judge, 7, all=False)
        assert_bits_equal("the last row alone", logits[-1], last)
        # watched or not, the same bits
        assert_bits_equal("unwatched", logits, cpu.logits(TOKENS))


@pytest.mark.parametrize("which", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["llama_m.pn", "qwen35_s_mtp.f32"])
def test_a_step_run_again_from_its_inputs_gives_its_output(name, which):
    with load_golden(name, backend=which) as model:
        expected, _ = record(model, 7)
        slots = {"tokens": TOKENS}
        for step in model.program.steps:
            read = step.inputs or ("tokens",)
            # a state is zeros before the first row
            states = {
                s: np.zeros(model.program.states[s], np.float32)
                for s in step.inputs[-1:]
                if s in model.program.states
            }
            slots |= states
            for start, stop in ((0, 20), (0, 5)) if states else ((0, 20), (13, 20), (19, 20)):
                inputs = {
                    s: slots[s] if s in states or s.startswith("cache") else slots[s][start:stop]
                    for s in read
                }
                got = model.session.redo(step.name, inputs, start)
                assert_bits_equal(step.name, expected[step.name][start:stop], got)
            slots[step.output] = expected[step.name]


def test_the_reference_refuses_as_backends_do():
    with load_golden("llama_m.pn", backend="reference", context=4) as model:
        with pytest.raises(pnrt.ModelError, match=r"the context is full"):
            model.session.run(TOKENS)
        model.session.weights["blk.0.ffn_norm.weight"] = np.full(320, np.inf, np.float32)
        with pytest.raises(pnrt.ModelError, match=r"blk\.0\.ffn_gate: .*q8_0 codes"):
            model.eval([1])
    table = backend.open("reference").table()
    assert ("matmul", "q4_K", "matmul") in table
    assert ("swiglu", "-", "swiglu") in table
