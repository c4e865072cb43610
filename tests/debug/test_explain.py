"""Every known mistake is planted and named; what is right, and what is unknown, is told so."""

import functools
import json

import numpy as np
import pytest

from pnrt import reference
from pnrt.container.gguf import open_gguf
from pnrt.debug.explain import explain
from pnrt.debug.misreadings import MISREADINGS
from pnrt.debug.trace import Trace, record
from pnrt.errors import FileError, ModelError
from pnrt.formats import FORMATS
from pnrt.judge import ReferenceSession
from pnrt.models.config import read_config
from pnrt.models.rope import rope_tables
from tests.builders import tiny
from tests.commands import pnrt
from tests.golden_models import load_golden, path_of

f32 = np.float32
# an id for formats that have none of their own
SPARE = 4000


@functools.cache
def random_rows(name, n, k, seed):
    x = np.random.default_rng(seed).standard_normal((n, k)).astype(f32)
    # an asymmetric matrix: minima and signs must matter
    return FORMATS[name].quantize(x + f32(0.3))


def write(path, name, n=48, k=None, seed=0, **more):
    """A file with one matrix `w` of a format; returns its rows."""
    form = FORMATS[name]
    k = k or 4 * max(form.block, 32)
    rows = random_rows(name, n, k, seed)
    type_id = SPARE if form.type_id is None else form.type_id
    tiny(path, [], {"w": (type_id, (n, k), rows)} | more)
    return rows


def options(name):
    return {"extra_types": {SPARE: name}} if FORMATS[name].type_id is None else {}


def inputs(k, t=3, seed=1):
    return np.random.default_rng(seed).standard_normal((t, k)).astype(f32)


def quantized(x):
    q, dx = reference.quantize_q8_0(x)
    return (q * np.repeat(dx, 32, axis=1))[:, : x.shape[1]]


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


WEIGHTS = [(m.name, name) for m in MISREADINGS for name in sorted(m.formats)]


@pytest.mark.parametrize(("mistake", "format"), WEIGHTS)
def test_a_misreading_is_named(mistake, format, tmp_path):
    reading = next(m for m in MISREADINGS if m.name == mistake)
    rows = write(tmp_path / "m.gguf", format)
    w = reading.weights(FORMATS[format], rows)
    assert not np.array_equal(w, FORMATS[format].decode(rows))
    x = inputs(w.shape[1])
    with np.errstate(all="ignore"):
        y = (quantized(x) if FORMATS[format].group else x) @ w.T.astype(np.float64)
    for numbers in (save(tmp_path / "p.npz", x=x, y=y), save(tmp_path / "w.npz", y=w)):
        result = explain(tmp_path / "m.gguf", numbers, tensor="w", **options(format))
        assert mistake in result.named, (numbers.name, result.guesses[:3], result.named)
        assert "right" not in result.named
        assert len(result.named) <= 2


def test_both_readings_of_the_historical_bug(tmp_path):
    """FORMATS 1.2: the worked words, decoded by hand, not by our own functions."""
    path = tmp_path / "m.gguf"
    for name, word, rest, a, b in (
        ("pn3t", 0x6F591D10, 0x49244924, "0 3 4 7 1 0 6 0 7 3", "0 2 4 6 1 2 6 2 7 5"),
        ("pn4t", 0xFD31EC20, 0x88888888, "0 3 12 15 1 2 13 14", "0 2 12 14 1 3 13 15"),
    ):
        form = FORMATS[name]
        row = np.zeros((1, 34), np.uint8)
        row[0, :2] = np.array([1.0], np.float16).view(np.uint8)
        row[0, 2:] = np.array([word] + [rest] * 7, np.uint32).view(np.uint8)
        tiny(path, [], {"w": (form.type_id, (1, form.block), row)})
        for codes, mistake in (
            (a, "element index in the pair's place"),
            (b, "codes packed one after the other"),
        ):
            codes = np.array(codes.split(), int)
            w = np.zeros((1, form.block), f32)
            w[0, : len(codes)] = codes - form.zero
            # under both readings words of equal codes read right in pn4t, not in pn3t
            if name == "pn3t":
                reading = next(m for m in MISREADINGS if m.name == mistake)
                w[0, 10:] = reading.weights(form, row)[0, 10:]
            result = explain(path, save(tmp_path / "w.npz", y=w), tensor="w")
            assert result.named == [mistake]


@pytest.mark.parametrize("format", ["pn3t", "pn4t", "q4_0", "q4_K", "q6_K", "f16"])
def test_right_numbers_are_right(format, tmp_path):
    rows = write(tmp_path / "m.gguf", format)
    x = inputs(FORMATS[format].columns(rows.shape[1]))
    y = reference.matmul(format, rows, x)
    result = explain(tmp_path / "m.gguf", save(tmp_path / "p.npz", x=x, y=y), tensor="w")
    assert result.named == ["right"]
    assert result.guesses[0]["distance"] < 1e-6


def test_unknown_numbers_are_not_explained(tmp_path):
    rows = write(tmp_path / "m.gguf", "pn4t")
    x = inputs(256)
    y = reference.matmul("pn4t", rows, x)
    for wrong in (inputs(48), y * f32(1.01), np.where(np.arange(48) == 5, 0, y)):
        result = explain(tmp_path / "m.gguf", save(tmp_path / "p.npz", x=x, y=wrong), tensor="w")
        assert not result.found
    assert result.guesses[0]["name"] in ("right", "activations not quantized")


def product(tmp_path, wrong, format="q4_0", n=48, k=256, **kw):
    """Explain what `wrong(rows, x)` makes of a matrix."""
    rows = write(tmp_path / "m.gguf", format, n, k)
    x = inputs(k)
    numbers = save(tmp_path / "p.npz", x=x, y=wrong(rows, x))
    return explain(tmp_path / "m.gguf", numbers, tensor="w", **kw).named


def test_activations(tmp_path):
    decode = FORMATS["q4_0"].decode
    plain = product(tmp_path, lambda rows, x: x @ decode(rows).T)
    assert plain == ["activations not quantized"]
    coded = product(tmp_path, lambda r, x: quantized(x) @ decode(r).T, activations="f32")
    assert coded == ["activations quantized"]
    half = product(tmp_path, lambda r, x: x.astype(np.float16).astype(f32) @ decode(r).T)
    assert half == ["activations in f16"]
    k = FORMATS["q8_K"]
    assert product(tmp_path, lambda r, x: k.decode(k.quantize(x)) @ decode(r).T) == [
        "activations in q8_K"
    ]


@pytest.mark.parametrize(("n", "k"), [(256, 256), (48, 256), (96, 64)])
def test_transposed(n, k, tmp_path):
    def wrong(rows, x):
        return quantized(x) @ FORMATS["q4_0"].decode(rows).reshape(k, n)

    assert product(tmp_path, wrong, n=n, k=k) == ["transposed weight"]


def test_rows_of_the_neighbour(tmp_path):
    def wrong(rows, x):
        return quantized(x) @ np.roll(FORMATS["q4_0"].decode(rows), 1, axis=0).T

    assert product(tmp_path, wrong) == ["rows one late"]


def test_fp16_accumulation(tmp_path):
    def wrong(rows, x):
        w, x = FORMATS["q4_0"].decode(rows).astype(np.float16), quantized(x).astype(np.float16)
        total = np.zeros((len(x), len(w)), np.float16)
        for k in reversed(range(x.shape[1])):
            total = total + x[:, k, None] * w[None, :, k]
        return total

    # another order of the sum than any that is tried
    assert "fp16 accumulation" in product(tmp_path, wrong)
    rounded = product(tmp_path, lambda r, x: reference.matmul("q4_0", r, x).astype(np.float16))
    assert rounded == ["result rounded to f16"]


def test_bias(tmp_path):
    b = np.arange(48, dtype=f32)
    more = {"w.bias": (0, (48,), b.view(np.uint8))}
    rows = write(tmp_path / "m.gguf", "q4_0", 48, 256, **more)
    x = inputs(256)
    y = reference.matmul("q4_0", rows, x) + b
    result = explain(tmp_path / "m.gguf", save(tmp_path / "p.npz", x=x, y=y), tensor="w")
    assert result.named == ["bias added"]


def test_undeclared_rotation(tmp_path):
    def wrong(rows, x):
        return reference.matmul("q4_0", rows, reference.exact.hadamard(x, 64).astype(f32))

    assert product(tmp_path, wrong) == ["activations rotated by 64"]


ROTATED = "blk.0.ffn_down.weight"


@pytest.mark.parametrize(
    ("times", "mistake"),
    [
        (0, "activations not rotated"),
        (1, "right"),
        (2, "activations rotated twice"),
        (-1, "activations rotated back"),
        (None, "rotation without its signs"),
    ],
)
def test_rotation(times, mistake, tmp_path):
    from pnrt.models.rotation import read_rotation

    path = path_of("qwen35_m.pnrots")
    with open_gguf(path) as file:
        info, rows = file.tensor(ROTATED), file.rows(ROTATED).copy()
        found = read_rotation(file)
    x = inputs(info.columns)
    block, signs = found.block_of(ROTATED, info.columns), found.signs[info.columns]
    seen = x
    if times is None:
        seen = reference.hadamard(x, block)
    for _ in range(max(times or 0, 0)):
        seen = reference.hadamard(seen, block, signs)
    if times == -1:
        seen = reference.hadamard(x, block, signs, inverse=True)
    y = reference.matmul(info.format.name, rows, seen)
    result = explain(path, save(tmp_path / "p.npz", x=x, y=y), tensor=ROTATED)
    assert result.named == [mistake]


def test_head_order_of_the_delta_rules_output(tmp_path):
    path, name = path_of("qwen35_m.pnrots"), "blk.0.ssm_out.weight"
    with open_gguf(path) as file:
        d, info = read_config(file).delta, file.tensor(name)
        from pnrt.models.rotation import read_rotation

        found, rows = read_rotation(file), file.rows(name).copy()
    assert 1 < d.key_heads < d.value_heads
    x = inputs(info.columns)
    grouped = x.reshape(3, d.value_heads // d.key_heads, d.key_heads, d.state_size).swapaxes(1, 2)
    seen = grouped.reshape(x.shape)
    block = found.block_of(name, info.columns)
    if block:
        seen = reference.hadamard(seen, block, found.signs.get(info.columns))
    y = reference.matmul(info.format.name, rows, seen)
    result = explain(path, save(tmp_path / "p.npz", x=x, y=y), tensor=name)
    assert result.named == ["heads grouped, not tiled"]


# steps


def recorded(tmp_path, name="llama_m.q4_0", tokens=range(1, 12)):
    path = tmp_path / "run.trace"
    with load_golden(name, backend="reference") as model:
        record(model, list(tokens), path, full=True)
    return path


@pytest.mark.parametrize(
    ("positions", "swap", "mistake"),
    [
        (0, True, "NEOX instead of NORM rope"),
        (1, False, "position one too high"),
        (-1, False, "position one too low"),
    ],
)
def test_rope_in_a_trace_of_a_wrong_program(positions, swap, mistake, tmp_path, monkeypatch):
    right = ReferenceSession._rope

    def wrong(self, step, slots, start):
        with open_gguf(path_of("llama_m.q4_0")) as file:
            at = np.maximum(np.arange(start, start + len(slots[step.output])) + positions, 0)
            self.rope_tables = rope_tables(read_config(file), at)
        numbers = {**step.numbers, "neox": step.numbers["neox"] != swap}
        step = step.__class__(step.name, step.op, (), (), step.output, numbers)
        return right(self, step, slots, 0)

    monkeypatch.setitem(ReferenceSession.OPS, "rope", wrong)
    path = recorded(tmp_path)
    result = explain(path_of("llama_m.q4_0"), path, step="blk.1.q_rope")
    assert result.named == [mistake]
    # what comes after it was computed rightly from the wrong numbers
    assert explain(path_of("llama_m.q4_0"), path, step="blk.1.attn").named == ["right"]
    assert explain(path_of("llama_m.q4_0"), path, tensor="blk.1.ffn_up.weight").named == ["right"]


def test_every_kind_of_step_of_a_right_trace_is_right(tmp_path):
    name = "qwen35_m.pnrots"
    path = recorded(tmp_path, name)
    with Trace(path) as trace:
        ops = {entry["op"]: entry["name"] for entry in trace.index["steps"]}
    for op in ("rope", "attention", "rms_norm", "delta", "swiglu", "matmul"):
        assert explain(path_of(name), path, step=ops[op]).named == ["right"], op
    with pytest.raises(ModelError, match="no known mistakes of hadamard"):
        explain(path_of(name), path, step=ops["hadamard"])


def test_heads_of_attention_and_delta(tmp_path):
    """Numbers of one step in an .npz: heads mapped the other way."""
    path = path_of("qwen35_m.pnrots")
    with load_golden("qwen35_m.pnrots", backend="reference") as model:
        steps, caches = model.program.steps, model.program.caches
    step = next(s for s in steps if s.op == "delta")
    n, rng = step.numbers, np.random.default_rng(0)
    heads, keys, e = n["heads"], n["key_heads"], n["n"]
    q, k = (reference.l2_norm(inputs(keys * e, 5, s).reshape(5, keys, e), 1e-6) for s in (1, 2))
    v = inputs(n["first"] + heads * e, 5, 3)
    g, beta = (rng.uniform(0.5, 1, (5, heads)).astype(f32) for _ in range(2))
    state, out = np.zeros((heads, e, e), f32), []
    for t in range(5):
        i = np.repeat(np.arange(keys), heads // keys)
        values = v[t, n["first"] :].reshape(heads, e)
        o, state = reference.delta_step(state, q[t, i], k[t, i], values, g[t], beta[t])
        out.append(o)
    numbers = save(tmp_path / "d.npz", q=q, k=k, v=v, g=g, beta=beta, y=np.stack(out))
    assert explain(path, numbers, step=step.name).named == ["heads grouped, not tiled"]

    path = path_of("llama_s.f32")
    with load_golden("llama_s.f32", backend="reference") as model:
        steps, caches = model.program.steps, model.program.caches
    step = next(s for s in steps if s.op == "attention")
    heads, (groups, dim) = step.numbers["heads"], caches[step.numbers["cache"]]
    assert 1 < groups < heads
    counts = enumerate((heads, groups, groups))
    q, k, v = (inputs(c * dim, 6, seed).reshape(6, c, dim) for seed, c in counts)
    i = np.arange(heads) % groups
    y = reference.exact.attention(q, k[:, i], v[:, i], 0, step.numbers["scale"])
    numbers = save(tmp_path / "a.npz", q=q, k=k, v=v, y=y)
    assert explain(path, numbers, step=step.name).named == ["heads tiled, not grouped"]


def test_norms_and_gates(tmp_path):
    path = path_of("llama_m.q4_0")
    with open_gguf(path) as file:
        w, eps = file.values("blk.0.attn_norm.weight").reshape(-1), read_config(file).eps
    x = inputs(len(w))
    for mistake, y in (
        ("weight plus one", reference.rms_norm(x, w + 1, eps)),
        ("weight left out", reference.rms_norm(x, np.ones_like(w), eps)),
        ("mean subtracted", reference.rms_norm(x - x.mean(-1, keepdims=True), w, eps)),
    ):
        numbers = save(tmp_path / "n.npz", x=x, y=y)
        assert explain(path, numbers, step="blk.0.attn_norm").named == [mistake]
    gate, up = inputs(300, 3, 4), inputs(300, 3, 5)
    numbers = save(tmp_path / "s.npz", gate=gate, up=up, y=reference.swiglu(up, gate))
    assert explain(path, numbers, step="blk.0.ffn_act").named == ["gate and up exchanged"]


# the command


def test_the_command(tmp_path):
    rows = write(tmp_path / "m.gguf", "pn4t")
    x = inputs(256)
    wrong = next(m for m in MISREADINGS if m.name == "half-words swapped")
    y = quantized(x) @ wrong.weights(FORMATS["pn4t"], rows).T
    numbers = save(tmp_path / "p.npz", x=x, y=y)
    done = pnrt("explain", tmp_path / "m.gguf", numbers, "--tensor", "w")
    assert done.exit_code == 0
    assert "these numbers come from: half-words swapped" in done.stdout
    done = pnrt("explain", tmp_path / "m.gguf", numbers, "--tensor", "w", "--json")
    data = json.loads(done.stdout)
    assert data["named"] == ["half-words swapped"]
    assert data["guesses"][0]["distance"] < 1e-6
    save(numbers, x=x, y=y * 2)
    done = pnrt("explain", tmp_path / "m.gguf", numbers, "--tensor", "w")
    assert done.exit_code == 1
    assert "none of" in done.stdout


def test_bad_numbers(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "pn4t")
    x, y = inputs(256), inputs(48)

    def refused(match, tensor="w", step=None, kind=ModelError, **arrays):
        with pytest.raises(kind, match=match):
            explain(path, save(tmp_path / "p.npz", **arrays), tensor=tensor, step=step)

    refused(r"x is \[3, 255\]", x=x[:, 1:], y=y)
    refused("y is missing", x=x)
    refused("there is no x", y=y)
    refused("all zeros", x=x, y=0 * y)
    refused("no finite value", x=x, y=y * np.nan)
    refused("x holds values that are not finite", x=x * np.nan, y=y)
    refused("is <U1", x=x, y=np.array(["a"]))
    refused("only one of them", step="blk.0.attn", x=x, y=y)
    refused("no tensor", tensor="v", kind=FileError, x=x, y=y)
    refused("row is -1", y=inputs(256), row=np.array(-1))
    for data in (b"", b"garbage", b"PK\x03\x04 broken"):
        (tmp_path / "bad.npz").write_bytes(data)
        with pytest.raises(FileError):
            explain(path, tmp_path / "bad.npz", tensor="w")
    done = pnrt("explain", path, tmp_path / "absent.npz", "--tensor", "w")
    assert done.exit_code == 2
    with pytest.raises(ModelError, match="no such step"):
        explain(path_of("llama_m.q4_0"), save(tmp_path / "p.npz", x=x, y=y), step="blk.9.up")


def test_traces_that_cannot_be_used(tmp_path):
    name = "llama_m.q4_0"
    path = tmp_path / "digest.trace"
    with load_golden(name, backend="reference") as model:
        record(model, [1, 2, 3], path)
        with pytest.raises(ModelError, match="holds digests"):
            explain(path_of(name), path, tensor="blk.0.attn_q.weight")
        record(model, [1, 2, 3], path, full=True, taps=["blk.0.q"])
    with pytest.raises(ModelError, match=r"not its input blk\.0\.attn_norm"):
        explain(path_of(name), path, tensor="blk.0.attn_q.weight")
    with pytest.raises(ModelError, match="does not hold step"):
        explain(path_of(name), path, step="blk.1.attn")
    with pytest.raises(ModelError, match="no such product"):
        explain(path_of(name), path, tensor="blk.0.attn_norm.weight")
