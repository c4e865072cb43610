"""Differences: equal runs are equal, planted faults are named down to the weight, traces travel."""

import json

import numpy as np
import pytest

from pnrt.container.gguf import open_gguf
from pnrt.debug.diff import StepDifference, compare_runs, difference, measure
from pnrt.debug.pieces import split_product
from pnrt.debug.sides import Live, Recorded, Remote, open_side, tier_environment
from pnrt.debug.trace import Trace, record
from pnrt.errors import DeviceError, ModelError

from ..golden_models import path_of

PN, Q4, QWEN = (path_of(n) for n in ("llama_m.pn", "llama_m.q4_0", "qwen35_s_mtp.f32"))
TOKENS = list(range(3, 15))


def side(word, file=None, **options):
    options = {"rotation": "none", "context": len(TOKENS), **options}
    return open_side(str(word), file, options)


@pytest.fixture
def cpu():
    with_model = side("cpu", PN)
    yield with_model
    with_model.close()


@pytest.fixture
def judge():
    with_model = side("reference", PN)
    yield with_model
    with_model.close()


def flipped(source, target, tensor, row, byte, mask):
    """A copy of a model with bits of one byte of a row flipped; that byte's place in the file."""
    data = bytearray(source.read_bytes())
    with open_gguf(source) as file:
        at = file.tensors[tensor].offset + row * file.rows(tensor).shape[1] + byte
    data[at] ^= mask
    target.write_bytes(data)
    return at


@pytest.mark.parametrize("chunks", [(512, 512), (5, 512), (1, 7)], ids=str)
def test_the_cpu_is_equal_to_the_reference(cpu, judge, chunks):
    report = difference(cpu, judge, TOKENS, chunks=chunks)
    assert report.equal
    assert len(report.steps) == len(cpu.model.program.steps)
    assert {s.state for s in report.steps} == {"equal"}
    assert not report.notes
    assert report.blame is None


@pytest.mark.parametrize(
    ("source", "byte", "mask", "expected"),
    [
        # pn3t: block 1 word 1, half-word 1, pair 0 is weight 11 of the block
        (PN, 34 + 2 + 4 + 2, 0b1, {"kind": "weight", "block": 1, "column": 91, "word": 1}),
        # q4_0: low nibble of byte 3 of block 2
        (Q4, 2 * 18 + 2 + 3, 0b1000, {"kind": "weight", "block": 2, "column": 67, "word": None}),
        # a scale changes every weight of its block
        (PN, 2 * 34, 1, {"kind": "scale", "block": 2, "word": None}),
    ],
    ids=["pn3t", "q4_0", "scale"],
)
def test_a_flipped_bit_of_a_file_is_found(tmp_path, source, byte, mask, expected):
    copy, tensor = tmp_path / "flipped.gguf", "blk.1.ffn_gate.weight"
    at = flipped(source, copy, tensor, 7, byte, mask)
    a, b = side(source), side(copy)
    report = difference(a, b, TOKENS)
    first, piece = report.steps[report.first], report.blame["piece"]
    assert first.name == "blk.1.ffn_gate"
    assert first.first[1] == 7
    assert first.elements == first.rows
    assert all(s.state == "equal" for s in report.steps[: report.first])
    assert (piece["tensor"], piece["row"]) == (tensor, 7)
    assert piece["byte"] == [at, at]
    assert {k: piece[k] for k in expected} == expected
    assert [bit for _, bit in piece["bits"]] == [mask.bit_length() - 1]
    if "column" in expected:
        k = expected["column"]
        for name, one in (("A", a), ("B", b)):
            value = float(one.model.file.values(tensor, 7, 8)[0, k])
            assert piece[name]["value"] == value
        assert piece["A"]["code"] != piece["B"]["code"]
    assert report.blame["judge"]["A"]["right"]
    assert report.blame["judge"]["B"]["right"]
    assert "the weights are different" in report.blame["verdict"]
    assert "two files" in report.notes[0]
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("tensor", "element"), [("blk.0.attn_norm.weight", 33), ("token_embd.weight", None)]
)
def test_a_flipped_bit_outside_a_product_is_found(tmp_path, tensor, element):
    copy = tmp_path / "flipped.gguf"
    row = 0 if element is not None else TOKENS[4]
    byte = 4 * element + 2 if element is not None else 34 * 2 + 9
    flipped(PN, copy, tensor, row, byte, 0x10)
    a, b = side(PN), side(copy)
    report = difference(a, b, TOKENS)
    piece = report.blame["piece"]
    assert report.steps[report.first].name == tensor.removesuffix(".weight")
    assert (piece["tensor"], piece["row"]) == (tensor, row)
    assert piece["column"] == (element if element is not None else 2 * 32 + 7)
    a.close()
    b.close()


def test_a_wrong_code_in_the_cpus_memory_is_read_back(cpu, judge):
    """A packed word of 16 rows: row 3, the second byte of block 1's word group 0."""
    weight = cpu.model.session.weights["blk.0.attn_output.weight"]
    weight.data[64 * 9 + 4 * 3 + 1] ^= 2
    report = difference(cpu, judge, TOKENS)
    blame, piece = report.blame, report.blame["piece"]
    assert blame["step"] == "blk.0.attn_output"
    assert blame["verdict"].startswith("A is wrong")
    assert blame["again"] == {"A": "the same bits", "B": "the same bits"}
    assert (piece["side"], piece["kind"], piece["row"]) == ("A", "weight", 3)
    file = cpu.model.file
    values = file.values(piece["tensor"])[3]
    assert piece["file"]["value"] == float(values[piece["column"]])
    assert piece["read"]["code"] == piece["file"]["code"] - 2
    assert piece["read"]["value"] == pytest.approx(piece["file"]["scale"] * piece["read"]["code"])


def test_a_wrong_scale_in_the_cpus_memory_is_a_scale(cpu, judge):
    weight = cpu.model.session.weights["blk.1.ffn_down.weight"]
    # the high byte of the first block's scale of row 2: a power of two
    weight.data[weight.planes[0] + 2 * 2 + 1] ^= 0x04
    report = difference(judge, cpu, TOKENS)
    piece = report.blame["piece"]
    assert report.blame["verdict"].startswith("B is wrong")
    assert (piece["side"], piece["kind"], piece["row"], piece["block"]) == ("B", "scale", 2, 0)
    factor = piece["read"]["scale"] / piece["file"]["scale"]
    assert factor in (0.5, 2.0)


def plant(model, fault):
    """Break one part of a CPU session; the step that must be blamed, and its first position."""
    session = model.session
    if fault == "rope":
        session.rope_tables[1][5, 2] += 1e-3
        return "blk.0.q_rope", 5
    if fault == "norm":
        session.weights["blk.1.ffn_norm.weight"][40] *= 1.5
        return "blk.1.ffn_norm", 0
    if fault == "conv":
        session.weights["blk.0.ssm_conv1d.weight"].reshape(-1)[4 * 3] += 0.5
        # taps are transposed when a script is bound
        session._scripts.clear()
        # the oldest tap sees its first token at position 3
        return "blk.0.ssm_conv", 3
    session.weights["blk.0.ssm_dt.bias"][1] += 0.5
    return "blk.0.ssm_decay", 0


@pytest.mark.parametrize(
    ("source", "fault"), [(PN, "rope"), (PN, "norm"), (QWEN, "conv"), (QWEN, "decay")]
)
def test_a_fault_of_another_op_is_blamed_on_its_step_and_side(source, fault):
    a, b = side("cpu", source), side("reference", source)
    # the reference shares no array with the session
    step, position = plant(a.model, fault)
    report = difference(a, b, TOKENS, chunks=(5, 512))
    assert (report.blame["step"], report.blame["position"]) == (step, position)
    assert report.blame["verdict"].startswith("A is wrong: the reference has the bits of B")
    assert report.blame["again"]["A"] == "the same bits"
    assert report.blame["piece"]["kind"] == "element"
    a.close()
    b.close()


def test_a_fault_that_does_not_come_back_is_called_that(cpu, judge, monkeypatch):
    """Memory that was wrong during the run only: a race, or a stale buffer."""
    weight = cpu.model.session.weights["blk.0.attn_output.weight"]

    def spoiled(tokens, path, chunk, all):
        weight.data[64] ^= 1
        try:
            return Live.record(cpu, tokens, path, chunk, all)
        finally:
            weight.data[64] ^= 1

    monkeypatch.setattr(cpu, "record", spoiled)
    blame = difference(cpu, judge, TOKENS).blame
    assert blame["step"] == "blk.0.attn_output"
    assert "other bits" in blame["again"]["A"]
    assert blame["verdict"].startswith("A gives other bits when the step is run again")
    assert not blame["judge"]["A"]["right"]


def products(file, tensor, row):
    from pnrt import reference

    rows, form = file.rows(tensor)[row : row + 1], file.tensors[tensor].format

    def expected(x):
        return reference.matmul(form.name, rows, x, "q8_0")[:, 0]

    return expected


@pytest.mark.parametrize(
    ("wrong", "kind", "place"),
    [
        # what differs only when two units meet is the sum
        (lambda x: x[:160].any() and x[160:].any(), "sum", {"unit": 1, "lane": 1}),
        (lambda x: x[160:192].any() and x[192:224].any(), "unit", {"unit": 1}),
        (lambda x: x[240] != 0 and x[241] != 0, "segment", {"columns": [240, 256]}),
        (lambda x: x[243] != 0, "weight", {"column": 243, "block": 3, "word": 0}),
    ],
    ids=["sum", "unit", "segment", "weight"],
)
def test_the_smallest_piece(wrong, kind, place):
    rng = np.random.default_rng(5)
    x = rng.standard_normal(320).astype(np.float32)
    with open_gguf(PN) as file:
        tensor = "blk.0.attn_q.weight"
        expected = products(file, tensor, 4)

        def found(x):
            y = expected(x[None])[0]
            return np.nextafter(y, np.float32(9)) if wrong(x) else y

        piece = split_product(file, tensor, 4, x, found, expected, "q8_0")
    assert piece["kind"] == kind
    assert {k: piece[k] for k in place} == place


def test_traces_take_the_place_of_runs(cpu, judge, tmp_path):
    full, digest, few = (tmp_path / f"{n}.trace" for n in ("full", "digest", "few"))
    record(judge.model, TOKENS, full, full=True)
    record(judge.model, TOKENS, digest)
    record(judge.model, TOKENS, few, full=True, taps=["blk.0.*"])
    for path in (full, digest, few):
        assert difference(open_side(str(path), None, {}), cpu, TOKENS).equal
    cpu.model.session.weights["blk.1.ffn_norm.weight"][40] *= 1.5
    report = difference(Recorded(full), cpu, TOKENS)
    assert report.blame["step"] == "blk.1.ffn_norm"
    assert report.blame["again"]["A"] == "a recorded run"
    assert report.blame["verdict"].startswith("B is wrong")
    report = difference(Recorded(digest), cpu, TOKENS)
    first = report.steps[report.first]
    assert (first.name, first.first) == ("blk.1.ffn_norm", (0, None))
    assert "record that run with --full" in report.blame["verdict"]
    assert difference(Recorded(few), cpu, TOKENS).equal
    # two traces: a difference is found, nobody can run
    wrong = tmp_path / "wrong.trace"
    record(cpu.model, TOKENS, wrong, full=True)
    report = difference(Recorded(full), Recorded(wrong), TOKENS)
    assert report.steps[report.first].name == "blk.1.ffn_norm"
    assert "neither side can run" in report.blame["verdict"]
    record(cpu.model, TOKENS[1:], few, full=True)
    with pytest.raises(ModelError, match="runs of the same tokens"):
        difference(Recorded(full), Recorded(few), TOKENS)


def test_other_positions_of_logits_are_compared_where_both_have_them(judge, tmp_path):
    a, b = tmp_path / "a.trace", tmp_path / "b.trace"
    record(judge.model, TOKENS, a, full=True)
    record(judge.model, TOKENS, b, full=True, all=True)
    with Trace(a) as left, Trace(b) as right:
        report = compare_runs(left, right, "a", "b")
        assert report.equal
        assert report.steps[-1].total == left.steps["output"]["shape"][1]


def test_tolerance_is_for_sides_that_promise_no_bits(cpu):
    other = side("cpu", PN, activations="f32")
    strict = difference(cpu, other, TOKENS)
    assert not strict.equal
    assert strict.steps[strict.first].op == "matmul"
    assert strict.notes == ["activations: q8_0 in A, f32 in B"]
    assert "different settings" in strict.blame["verdict"]
    loose = difference(cpu, other, TOKENS, tolerance=0.5)
    assert loose.equal
    assert "within" in {s.state for s in loose.steps}
    other.close()


def test_measures():
    out = StepDifference("x", "add")
    x = np.array([[1, 0.0, np.inf, np.nan, 3]], np.float32)
    y = np.array([[1, -0.0, np.inf, np.nan, np.nextafter(np.float32(3), np.float32(4))]])
    measure(out, x, y, first=7)
    assert (out.elements, out.first, out.a_bits, out.b_bits) == (
        2, (7, 1), "0x00000000", "0x80000000",
    )  # fmt: skip
    assert out.ulp == 1
    assert out.max_error == pytest.approx(2.4e-7, rel=0.01)
    measure(out, np.float32([[0, 1]]), np.float32([[0, np.nan]]))
    assert out.relative_rms == np.inf


def test_a_process_with_another_instruction_set(judge, tmp_path):
    try:
        tier_environment("avx2")
    except DeviceError as error:
        pytest.skip(str(error))
    remote = Remote("cpu:avx2", PN, "avx2", {"rotation": "none", "threads": 1})
    assert difference(remote, judge, TOKENS).equal
    with pytest.raises(ModelError, match=r"cpu:avx2: token 0 is -1: ids are 0 to"):
        remote.record([-1], tmp_path / "x.trace", 512, False)
    remote.process.kill()
    with pytest.raises(DeviceError, match=r"cpu:avx2: its process ended"):
        remote.redo("output_norm", {}, 0)
    remote.close()
    assert remote.process.returncode


def test_tiers_that_are_not_there():
    with pytest.raises(DeviceError, match="Allowed: native, avx512, avx2, plain"):
        tier_environment("sse9")
    assert tier_environment("native") == {}


def test_the_report_is_json(cpu, tmp_path):
    from pnrt.screen.parts import plain

    copy = tmp_path / "flipped.gguf"
    flipped(PN, copy, "blk.0.attn_q.weight", 0, 5, 1)
    other = side(copy)
    report = difference(cpu, other, TOKENS)
    loaded = json.loads(json.dumps(plain(report), allow_nan=False))
    assert loaded["blame"]["piece"]["tensor"] == "blk.0.attn_q.weight"
    assert loaded["steps"][report.first]["state"] == "differs"
    other.close()
