"""Every planted fault is found by the right judge, cut down, saved, and found again."""

import dataclasses
import json

import numpy as np
import pytest

from pnrt import backend, reference
from pnrt.cpu import pack
from pnrt.debug import shrink
from pnrt.debug.selftest import OPS, Case, cases, judge, parse_case, selftest, untested
from pnrt.debug.selftest_base import floats
from pnrt.errors import DeviceError, FileError, FormatError
from pnrt.formats import FORMATS
from pnrt.jit import inline
from pnrt.simd import u8_at, u16_at
from tests.commands import pnrt as invoke

PN4 = "matmul(format=pn4t,N=33,K=2112,T=8,activations=q8_0,data=bytes,seed=0)"


class Faulty:
    """The reference as a backend, with one method replaced by a wrong one."""

    name, threads = "cpu", 1

    def __init__(self, matmul=None, logits=None, table=None, forgets=True):
        self._right, self._forgets = backend.open("reference"), forgets
        self._matmul, self._logits, self._table = matmul, logits, table

    def table(self):
        return self._table or self._right.table()

    def pack(self, *args):
        return self._right.pack(*args)

    def matmul(self, weight, x, activations="q8_0"):
        y = self._right.matmul(weight, x, activations)
        return y if self._matmul is None else self._matmul(y, x)

    def bind(self, program, weights, **options):
        session = self._right.bind(program, weights, **options)
        if not self._forgets:
            session.reset = lambda: setattr(session, "position", 0)
        if self._logits is not None:
            run = session.run
            session.run = lambda tokens, wanted: self._logits(run(tokens, wanted), program)
        return session


def next_float(y, at):
    y = y.copy()
    y[at] = np.nextafter(y[at], np.float32(np.inf))
    return y


def test_a_small_part_of_the_grid_passes_on_the_cpu():
    told = []
    report = selftest("cpu", ops=["rms_norm", "sw*", "softmax"], progress=lambda *a: told.append(a))
    assert report.passed, report.failures
    assert set(report.executed) == {"rms_norm", "swiglu", "softmax"}
    assert report.judged["bound"] > 0.95 * report.judged["bits"]
    assert len(told) == sum(report.executed.values())


def test_pn4t_passes_on_the_cpu():
    report = selftest("cpu", formats=["pn4t"])
    assert report.passed, report.failures
    assert report.executed == {"matmul": 32, "embedding": 10}
    # one-hot and integer data leave nothing to round: those results are exact
    assert report.judged["exactly"] > 1000


def test_a_case_is_a_string():
    seen = set()
    for case in cases(seed=3):
        seen.add(str(case))
        assert parse_case(str(case)) == case
    assert len(seen) == len(list(cases(seed=3)))
    again = [parse_case(PN4).make() for _ in range(2)]
    assert all(np.array_equal(again[0][n], again[1][n]) for n in again[0])
    other = parse_case(PN4.replace("seed=0", "seed=1")).make()
    assert not np.array_equal(other["rows"], again[0]["rows"])


@pytest.mark.parametrize("format", [n for n, f in FORMATS.items() if f.weight])
def test_grid_rows_are_valid_and_integers_are_exact(format):
    op = OPS["matmul"]
    exact = []
    for case in cases(["matmul"], [format]):
        if case.parameters["K"] > 2000:
            continue
        a = case.make()
        assert FORMATS[format].findings(a["rows"]) == []
        if case.parameters["data"] == "integer":
            exact.append((op.truth(case.parameters, a)[1] == 0).mean())
            y = op.expected(case.parameters, a)
            good = op.truth(case.parameters, a)[1] == 0
            assert (y == op.truth(case.parameters, a)[0])[good].all()
    # codes of 8-bit floats reach 2^17: their sums may round
    assert max(exact) > (0.5 if format == "e4m3" else 0.9)


def test_no_case_executed_is_not_a_pass():
    assert not selftest("cpu", ops=["nothing"]).passed
    report = selftest(Faulty(table=[("add", "-", "add")]), ops=["matmul"], formats=["pn4t"])
    assert not report.passed
    assert report.skipped == {"backend cpu has no matmul for pn4t": 32}


def test_what_no_case_tries_is_listed():
    engine = Faulty(table=[("add", "-", "a"), ("warp", "-", "w"), ("matmul", "zz", "m")])
    assert untested(engine) == ["matmul zz", "warp"]


def test_the_grid_tries_all_the_cpu_has():
    assert untested(backend.open("cpu")) == []


# faults


def wrong_code(y, x):
    """What a fault in one row's last column does."""
    y = y.copy()
    if y.shape[1] > 20:
        y[:, 20] += x[:, -1]
    return y


def skipped_row(y, x):
    y = y.copy()
    y[-1, -1] = np.nan
    return y


FAULTS = {
    "one bit of one result": (lambda y, x: next_float(y, (-1, -1)), "bits"),
    "one weight": (wrong_code, "bits"),
    "a row nobody wrote": (skipped_row, "bits"),
    "another shape": (lambda y, x: y[:, 1:], "bits"),
    "swapped tokens": (lambda y, x: y[::-1], "bits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_products_are_found_cut_down_and_found_again(fault, tmp_path):
    wrong, kind = FAULTS[fault]
    engine = Faulty(matmul=wrong)
    report = selftest(engine, ops=["matmul"], formats=["pn4t"], save=tmp_path)
    assert not report.passed
    first = report.failures[0]
    assert first.kind == kind
    assert first.smallest
    assert first.command == f"pnrt selftest --backend cpu --case '{first.file}'"
    case, small = shrink.load(first.file)
    assert str(case) == first.case
    whole = case.make()
    assert sum(a.size for a in small.values()) <= sum(a.size for a in whole.values())
    again = selftest(engine, case=first.file)
    assert [f.kind for f in again.failures] == [kind]
    # the fault removed, the saved inputs pass
    assert selftest(Faulty(), case=first.file).passed


def test_the_smallest_inputs_are_small(tmp_path):
    """One wrong weight, needing 21 rows: one token, one block of columns, one value is left."""
    engine = Faulty(matmul=wrong_code)
    report = selftest(engine, case=PN4, save=tmp_path)
    small = shrink.load(report.failures[0].file)[1]
    assert small["rows"].shape == (21, 34)
    assert small["x"].shape == (1, 64)
    assert np.count_nonzero(small["x"]) == 1


def test_faults_of_steps_are_found():
    def late(y, program):
        # wrong from the 9th row on, as a tile of eight tokens would be
        return next_float(y, (8, 0)) if len(y) > 8 else y

    report = selftest(Faulty(logits=late), ops=["add", "swiglu", "rope"])
    assert {f.kind for f in report.failures} == {"bits"}
    assert all("T=19" in f.case for f in report.failures)
    assert {f.case.split("(")[0] for f in report.failures} == {"add", "swiglu", "rope"}


def test_a_state_that_outlives_a_reset_is_found():
    for case in (
        "delta(T=5,H=4,G=2,E=24,start=2,data=normal,seed=0)",
        "conv_silu(T=19,C=40,J=4,start=0,data=normal,seed=0)",
    ):
        assert selftest(Faulty(), case=case).passed
        report = selftest(Faulty(forgets=False), case=case)
        assert [f.kind for f in report.failures] == ["bits"]


def test_a_fault_in_both_is_seen_by_the_second_judge(monkeypatch):
    """Backend and reference agree and are wrong: only the exact value tells."""
    right = reference.rms_norm
    monkeypatch.setattr(reference, "rms_norm", lambda x, w, eps: right(x, w, np.float32(1e-3)))
    report = selftest(Faulty(), ops=["rms_norm"])
    assert {f.kind for f in report.failures} == {"bound"}
    assert "the reference's too" in report.failures[0].text


def test_what_a_kernel_throws_is_a_failure_and_the_grid_goes_on():
    def boom(y, x):
        if len(y) > 1:
            raise ZeroDivisionError("lane 3")
        return y

    def refuse(y, x):
        raise DeviceError("no memory")

    report = selftest(Faulty(matmul=boom), ops=["matmul"], formats=["q8_0"])
    assert {f.kind for f in report.failures} == {"crashed"}
    assert "lane 3" in report.failures[0].text
    assert report.executed["matmul"] == 32
    report = selftest(Faulty(matmul=refuse), ops=["quantize"])
    assert {f.kind for f in report.failures} == {"refused"}


def test_the_historical_bug_in_the_codec_is_found(monkeypatch):
    """The CPU's own kernel, its reader of pn4t codes shifting by element (FORMATS 1.2 A)."""

    @inline
    def shifted(row, u, n, c):
        q = u16_at(row + (u >> 1) * 34 + 2 + (u & 1) * 16)
        for e in range(n):
            t = e & 7
            u8_at(c)[e] = (q[2 * (e >> 3) + (t & 1)] >> ((4 * t) & 15)) & 15

    codec = pack.CODECS["pn4t"]._replace(codes=shifted)
    monkeypatch.setitem(pack.CODECS, "pn4t", codec)
    monkeypatch.setitem(pack._kernels, "pn4t", _uncached(pack._pack_kernel("pn4t")))
    report = selftest("cpu", case=PN4)
    assert [f.kind for f in report.failures] == ["bits"]
    assert "rows [1, 34], x [1, 64]" in report.failures[0].smallest


def _uncached(kernel):
    # the disk cache is keyed by name: a planted fault must not stay in it
    kernel.name = f"{kernel.name}_fault"
    return kernel


# the command


def test_the_command(tmp_path):
    done = invoke("selftest", "--ops", "add", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["executed"] == {"add": 21}
    assert report["passed"] is True
    done = invoke("selftest", "--ops", "add")
    assert done.exit_code == 0
    assert "21 cases, 0 failed" in done.stdout
    assert invoke("selftest", "--case", PN4).exit_code == 0


def test_the_command_is_red_without_cases():
    done = invoke("selftest", "--ops", "zz")
    assert done.exit_code == 1
    assert "nothing is proven" in done.stdout


def test_a_failure_on_the_screen(monkeypatch, tmp_path):
    engine = Faulty(matmul=wrong_code)
    monkeypatch.setattr(backend, "open", lambda name, threads=None: engine)
    done = invoke("selftest", "--case", PN4, "--save", str(tmp_path / "new"))
    assert done.exit_code == 1
    assert PN4 in done.stdout
    assert "results differ" in done.stdout
    assert len(list((tmp_path / "new").glob("matmul-pn4t-bits-*.npz"))) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--formats", "pn5"),
        ("--case", "garbage"),
        ("--case", "matmul(format=pn4t)"),
        ("--case", PN4.replace("pn4t", "pn5")),
        ("--case", PN4.replace("2112", "2113")),
        ("--case", PN4.replace("T=8", "T=0")),
        ("--case", PN4.replace("T=8", "T=x")),
        ("--case", PN4.replace("bytes", "words")),
        ("--case", "absent.npz"),
        ("--backend", "tpu"),
    ],
)
def test_bad_arguments(arguments):
    done = invoke("selftest", *arguments)
    assert done.exit_code == 2
    assert done.stderr.strip()


def test_saved_files_are_checked(tmp_path):
    path = tmp_path / "a.npz"
    for write in (
        lambda: path.write_bytes(b"garbage"),
        lambda: np.savez(path, y=np.zeros(3)),
        lambda: np.savez(path, case=np.array(PN4), x=np.zeros((1, 64))),
    ):
        write()
        with pytest.raises((FileError, FormatError)):
            shrink.load(path)


def test_reports_are_plain_data():
    report = selftest(Faulty(matmul=skipped_row), ops=["quantize"])
    assert json.loads(json.dumps(dataclasses.asdict(report)))["failures"][0]["kind"] == "bits"


def test_floats_are_what_they_say():
    rng = np.random.default_rng(0)
    shape = (5, 64)
    tiny = np.finfo(np.float32).tiny
    x = floats(rng, "subnormal", shape, 1)
    assert ((np.abs(x) < tiny) & (x != 0)).mean() > 0.3
    x = floats(rng, "zero", shape, 1)
    assert (np.signbit(x) & (x == 0)).any()
    assert (~np.signbit(x) & (x == 0)).any()
    assert (np.count_nonzero(floats(rng, "onehot", shape, 1), axis=1) == 1).all()
    assert len(np.unique(floats(rng, "equal", shape, 1))) == 1
    x = floats(rng, "integer", shape, 1)
    assert (x == np.rint(x)).all()
    assert np.abs(floats(rng, "huge", shape, 1e9)).max() > 1e8


def test_judge_counts_what_it_judged():
    case = Case("quantize", {"T": 1, "K": 32, "data": "normal", "seed": 0})
    kind, text, counts = judge(Faulty(), OPS["quantize"], case.parameters, case.make())
    assert (kind, text) == ("", "")
    assert counts["bits"] == counts["bound"] == 32
