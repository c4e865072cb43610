"""Whole programs through the CUDA session on the stand-in: the CPU's bits, and its manners."""

import numpy as np
import pytest

import pnrt
from pnrt import backend
from pnrt.bench import bench
from pnrt.cuda import attention, launch, memory, upload
from pnrt.cuda import backend as backends
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.standin import StandIn
from pnrt.debug.dispatch import Dispatch
from pnrt.errors import DeviceError, FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.models.state import Snapshot
from pnrt.testing import assert_bits_equal
from pnrt.text.sampling import Sampler

from ..golden_models import load_golden, path_of

IDS = [1, 5, 9, 33, 7]


def both(name, **options):
    """The same tiny model on the CPU and on the stand-in."""
    options = {"context": 32, "chunk": 3} | options
    cuda = load_golden(name, backend=CudaBackend(StandIn()), **options)
    return load_golden(name, **options), cuda


@pytest.mark.parametrize(("name", "processors"), [("llama_m.pn", 1), ("qwen35_m.pnrots", 8)])
def test_logits_are_the_cpus(monkeypatch, name, processors):
    """A prompt in parts of 3 and 1, a token, a snapshot, a step alone; then the bits once more."""
    monkeypatch.setattr(StandIn, "processors", processors)
    cpu, cuda = both(name)
    with cpu, cuda:
        expected = cpu.eval(IDS[:4], all=True)
        assert_bits_equal("prompt", expected, cuda.eval(IDS[:4], all=True))
        kept, theirs = cuda.snapshot(), cpu.snapshot()
        _same(theirs, kept)
        assert_bits_equal("token", cpu.eval(IDS[4:]), cuda.eval(IDS[4:]))
        cuda.restore(kept)
        cpu.restore(theirs)
        logits = cpu.eval(IDS[4:])
        assert cuda.session.run_greedy(IDS[4:]) == (int(np.argmax(logits)), float(logits.max()))
        launches = cuda.session.launches()
        assert launches["launches"] == 1
        alone = cuda.session.bound("both", 1, fusing=False)
        assert launches["graph_nodes"] < 0.7 * len(alone.calls)
        assert cuda.position == cpu.position == 5
        cuda.reset()
        assert_bits_equal("again", expected[:1], cuda.eval(IDS[:1], all=True))
        cpu.reset()
        cpu.eval(IDS[:1])
        cuda.session.run = None  # a greedy generation copies no logits
        expected = list(cpu.generate(IDS[1:3], n=3, sampler=Sampler.greedy()))
        assert list(cuda.generate(IDS[1:3], n=3, sampler=Sampler.greedy())) == expected


def test_the_likeliest_is_the_samplers():
    """Ties, NaN and infinities: its token, or its refusal."""
    greedy, inf, nan = Sampler.greedy(), np.inf, np.nan
    with load_golden("llama_m.pn", backend=CudaBackend(StandIn()), context=4) as model:
        session = model.session
        for some in ((1, 3, 3), (-inf, -2, -2), (5, nan, inf), (2, inf, 1), (-inf,)):
            row = np.resize(np.array(some, np.float32), model.config.vocab_size)
            session.backend.device.write(session.at[model.program.logits], row)
            session._advance = lambda tokens, wanted: [(0, 1)]
            assert model.next([1]) == np.argmax(row)
            if np.isfinite(row.max()):
                assert model.next([1], greedy) == greedy.sample(row)
                continue
            with pytest.raises(ModelError) as ours:
                model.next([1], greedy)
            with pytest.raises(ModelError) as theirs:
                greedy.sample(row)
            assert str(ours.value) == str(theirs.value)


def _same(a: Snapshot, b: Snapshot):
    assert a.position == b.position
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        assert_bits_equal("cache", x, y)
    for name, state in a.states.items():
        assert_bits_equal(name, state, b.states[name])


@pytest.mark.parametrize("name", ["llama_m.pn", "qwen2_s.f32"])
def test_float32_caches_and_activations(name):
    """The second has biases."""
    cpu, cuda = both(name, kv="f32", activations="f32")
    with cpu, cuda:
        expected = cpu.eval(IDS[:2], all=True)
        assert_bits_equal("prompt", expected, cuda.eval(IDS[:2], all=True))
        assert_bits_equal("token", cpu.eval(IDS[2:3]), cuda.eval(IDS[2:3]))


def test_an_observer_sees_every_step_with_the_same_bits():
    cpu, cuda = both("qwen35_m.pnrots")
    with cpu, cuda:
        seen = {}
        for model in (cpu, cuda):
            taps = seen.setdefault(model.session.backend.name, {})

            def note(tap, taps=taps):
                taps[tap.step.name] = (tap.start, tap.T, tap.values().copy(), tap.kernels)

            model.session.observer = note
            model.eval(IDS[:2])
        assert seen["cpu"].keys() == seen["cuda"].keys()
        assert list(seen["cuda"]) == [step.name for step in cuda.program.steps]
        for name, (start, T, values, _) in seen["cpu"].items():
            assert seen["cuda"][name][:2] == (start, T)
            assert_bits_equal(name, values, seen["cuda"][name][2])
        weight = cuda.session.weights["output.weight"]
        assert sum(n for *_, n in seen["cuda"]["output"][3]) == weight.nbytes
        _redo(cuda, {name: values for name, (_, _, values, _) in seen["cuda"].items()})


def _redo(model, values):
    """Steps alone, from what the observer saw of their inputs."""
    writer, done = {}, set()
    for step in model.program.body:
        given = {i: values[writer[i]] for i in step.inputs if i in writer}
        if (
            step.inputs
            and step.op not in done
            and given.keys() == set(step.inputs)
            and step.output not in given
        ):
            done.add(step.op)
            assert_bits_equal(step.name, values[step.name], model.session.redo(step.name, given, 0))
        writer[step.output] = step.name
    assert {"matmul", "rms_norm", "swiglu", "hadamard", "l2_norm"} <= done
    embedded = model.session.redo(model.program.body[0].name, {"tokens": IDS[:2]}, 0)
    assert_bits_equal("embed", values[model.program.body[0].name], embedded)


def test_close_gives_the_memory_back_and_another_load_works():
    engine = CudaBackend(StandIn(1 << 24))
    for _ in range(2):
        with load_golden("llama_m.pn", backend=engine, context=16, chunk=2) as model:
            first = model.eval(IDS[:1])
            assert engine.device.memory()[0] < 1 << 24
        assert engine.device.memory() == (0, 0)
    assert np.isfinite(first).all()


def test_what_is_reserved_is_what_is_used():
    class Noting(StandIn):
        def reserve(self, nbytes):
            self.reserved = nbytes

    engine = CudaBackend(Noting())
    with load_golden("qwen35_m.pnrots", backend=engine, context=16, chunk=2) as model:
        shape = model.reader.shape
        sizes = memory.sizes(model.program, 16, 2, "f16", "q8_0")
        weights = sum(memory.whole(w.nbytes) for w in model.session.weights.values()
                      if hasattr(w, "layout"))  # fmt: skip
        needed = memory.needed(model.program, shape, sizes)
        assert needed["weights"] == weights
        assert set(model.session.at) == set(memory.regions(model.program, shape, sizes))
        assert engine.device.reserved == sum(needed.values())


def test_too_little_memory_is_refused_before_a_weight_is_read():
    class Small(StandIn):
        def reserve(self, nbytes):
            launch.check_memory("small", nbytes, 1 << 16, 1 << 20)

        def write(self, address, values):
            raise AssertionError("written")

    with pytest.raises(DeviceError, match=r"small: .* GiB are needed"):
        load_golden("llama_m.pn", backend=CudaBackend(Small()))


def test_a_full_context_and_a_value_that_is_not_finite():
    with load_golden("qwen35_m.pnrots", backend=CudaBackend(StandIn()), context=4) as cuda:
        with pytest.raises(ModelError, match="the context is full"):
            cuda.session.run(np.arange(5))
        state = next(iter(cuda.program.states))
        shape = cuda.program.states[state]
        cuda.session.backend.device.write(cuda.session.at[state], np.full(shape, np.nan, "f4"))
        with pytest.raises(ModelError, match="ssm_out: an input is NaN"):
            cuda.eval(IDS[:1])
        with pytest.raises(ModelError, match="those of a failed run"):
            cuda.eval(IDS[:1])
        cuda.reset()
        assert np.isfinite(cuda.eval(IDS[:1])).all()


def test_single_products_and_what_they_refuse():
    engine, rng = CudaBackend(StandIn(1 << 24)), np.random.default_rng(0)
    rows = FORMATS["q4_0"].quantize(rng.standard_normal((5, 64)).astype(np.float32))
    told = []
    weight = engine.pack("q4_0", rows, 64, lambda first, last: told.append((first, last)))
    assert told == [(0, 5)]
    x = rng.standard_normal((2, 64)).astype(np.float32)
    free = engine.device.memory()[0]
    for activations in backend.ACTIVATIONS:
        expected = pnrt.reference.matmul("q4_0", rows, x, activations)
        assert_bits_equal(activations, expected, engine.matmul(weight, x, activations))
    assert engine.device.memory()[0] == free
    with pytest.raises(FormatError, match="must be finite"):
        engine.matmul(weight, x * np.float32(np.inf))
    with pytest.raises(FormatError, match="q8_0 codes blocks of 32"):
        engine.matmul(weight, x * np.float32(1e20))
    with pytest.raises(DeviceError, match=r"backend cuda has no matmul kernel for q9.* It has"):
        engine.pack("q9", rows, 64)


def test_the_table_has_the_cpus_ops():
    ops = {(op, form) for op, form, _ in CudaBackend(StandIn(1 << 16)).table()}
    assert ops == {(op, form) for op, form, _ in backend.open("cpu").table()}


def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu(monkeypatch):
    def none():
        raise DeviceError("backend cuda: the driver finds no GPU")

    monkeypatch.setattr(launch, "open_device", none)
    with pytest.raises(DeviceError, match="finds no GPU"):
        pnrt.load(path_of("llama_s.f32"), backend="cuda")
    with pnrt.load(path_of("llama_s.f32"), backend="auto", context=16) as model:
        assert model.session.backend.name == "cpu"
        assert any("finds no GPU" in note for note in model.notes)


def test_dispatch_and_bench_of_a_run_on_the_device():
    with load_golden("qwen35_m.pnrots", backend=CudaBackend(StandIn()), context=8) as model:
        seen = Dispatch(model)
        model.session.observer = seen
        model.eval(IDS[:1])
        model.session.observer = None
        report = seen.report()
        assert report["fallbacks"] == 0, [r["kernel"] for r in report["rows"] if r["fallback"]]
        assert {r["format"] for r in report["rows"]} >= {"pn3t", "pn4t", "-"}
        result = bench(model, prompt=0, generate=1, repeats=1)
        assert (result["backend"], result["device"]) == ("cuda", "stand-in")
        assert result["graph_nodes"] == len(model.session.bound("both", 1).calls)


def test_a_matrix_arrives_whole_whatever_the_slices(monkeypatch):
    monkeypatch.setattr(backends, "SLICE", 700)
    monkeypatch.setattr(upload, "PIECE", 200)
    engine, rng = CudaBackend(StandIn(1 << 22)), np.random.default_rng(0)
    rows = FORMATS["pn3t"].quantize(rng.standard_normal((23, 240)).astype(np.float32))
    told = []
    weight = engine.pack("pn3t", rows, 240, lambda first, last: told.append((first, last)))
    assert told == [(first, min(first + 6, 23)) for first in range(0, 23, 6)]
    x = rng.standard_normal((1, 240)).astype(np.float32)
    assert_bits_equal("sliced", pnrt.reference.matmul("pn3t", rows, x), engine.matmul(weight, x))


def test_attention_and_logits_in_parts(monkeypatch):
    """A chunk of 5: attention takes 2 tokens at a time, the head 2 rows."""
    monkeypatch.setattr(memory, "HEAD_ROWS", 2)
    with load_golden("llama_m.pn", context=32) as cpu:
        heads, dim = cpu.config.n_heads[0], cpu.config.head_dim
        monkeypatch.setattr(memory, "SCRATCH", 2 * attention.scratch_bytes(heads, dim, 32))
        engine = CudaBackend(StandIn())
        with load_golden("llama_m.pn", backend=engine, context=32, chunk=5) as cuda:
            assert (cuda.session.size.attended, cuda.session.size.batches) == (2, 3)
            for _ in range(2):
                expected = cpu.eval(IDS, all=True)
                assert_bits_equal("parts", expected, cuda.eval(IDS, all=True))
