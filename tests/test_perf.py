"""The scripts in perf/: what they report and what they refuse; no time is judged."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from perf import kernels, large, measure, model, sm60
from pnrt.errors import DifferenceError
from pnrt.machine import default_threads

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests/golden/models/llama_s.f32.gguf"
MACHINE = {"cpu", "target", "python", "pnrt", "numba", "llvmlite", "threads", "layer", "load"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Nothing here is worth reading a gigabyte for, or 20 million weights per run."""
    read = measure.read_bandwidth
    monkeypatch.setattr(measure, "read_bandwidth", lambda threads, nbytes=0: read(threads, 1 << 20))
    monkeypatch.setattr(kernels, "RUN", 1)


def program(path, text):
    """A program that prints a text, in place of one of llama.cpp's."""
    path.write_text(f"#!/bin/sh\necho \"$@\" > '{path}.arguments'\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


def test_kernels_report(capsys):
    words = ["--formats", "pn4t,pn3t", "--shapes", "80x320,48x576", "--tokens", "1,9", "--json"]
    assert kernels.main([*words, "--threads", "1"]) == 0
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert set(data["machine"]) >= MACHINE
    assert data["read_gb_per_s"] > 0
    cases = [(r["format"], r["N"], r["K"], r["T"]) for r in data["results"]]
    shapes = [("pn4t", 80, 320), ("pn4t", 48, 576), ("pn3t", 80, 320)]
    assert cases == [(*shape, t) for shape in shapes for t in (1, 9)]
    assert data["skipped"] == ["pn3t 48x576: K is no multiple of 80"]
    assert "skipped pn3t 48x576" in out.err
    for r in data["results"]:
        assert {"compile_seconds", "compiled_from_cache", "read_ratio", "read_gb_per_s"} <= set(r)
        for clock in ("product", "quantize"):
            assert 0 < r[clock]["min"] <= r[clock]["median"] <= r[clock]["max"]
        weights = r["N"] * r["K"] / r["product"]["median"]
        assert r["gweights_per_s"] * 1e9 == pytest.approx(weights)
        assert r["gflop_per_s"] == pytest.approx(2 * r["T"] * r["gweights_per_s"])


@pytest.mark.parametrize("token", [0, 8])
def test_a_wrong_product_gets_no_number(monkeypatch, capsys, token):
    gate = kernels._gate

    def spoil(name, base, x, y):
        y[token, 70] = np.nextafter(y[token, 70], np.float32(9))
        gate(name, base, x, y)

    monkeypatch.setattr(kernels, "_gate", spoil)
    words = ["--formats", "pn4t", "--shapes", "80x320", "--tokens", "9", "--threads", "1"]
    assert kernels.main(words) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert f"DifferenceError: product with pn4t, token {token}, row 70: found" in out.err
    with pytest.raises(DifferenceError):
        kernels.case("pn4t", 80, 320, [9], 1)


def test_kernels_beside_llama(tmp_path, capsys):
    line = "  MUL_MAT(type_a=q4_K,type_b=f32,m=4096,n={},k=14336,o=1): 41 runs - {} us/run - x"
    fake = program(tmp_path / "ops", line.format(1, "2000.50") + "\n" + line.format(512, "9e9"))
    words = ["--formats", "pn4t", "--shapes", "80x320", "--tokens", "1", "--json"]
    assert kernels.main([*words, "--llama", str(fake)]) == 0
    data = json.loads(capsys.readouterr().out)
    (beside,) = data["llama"]
    assert beside["runs"] == pytest.approx([2000.5e-6] * 2)
    assert beside["gweights_per_s"] == pytest.approx(4096 * 14336 / 2000.5e-6 / 1e9)
    (ours,) = data["results"]
    seconds = ours["product"]["median"] + ours["quantize"]["median"]
    ratio = 80 * 320 / seconds / 1e9 / beside["gweights_per_s"]
    assert beside["ratios"] == {"pn4t 80x320": pytest.approx(ratio)}
    assert "-b CPU -o MUL_MAT -p type_a=(q4_K)" in Path(f"{fake}.arguments").read_text()
    assert kernels.main([*words, "--llama", str(program(tmp_path / "no", "nothing"))]) == 2
    assert kernels.main([*words, "--llama", str(tmp_path / "missing")]) == 2
    assert "missing: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--shapes", "4096"],
        ["--shapes", "axb"],
        ["--tokens", "0"],
        ["--formats", "q9"],
        ["--threads", "0"],
        ["--llama", "x", "--threads", str(default_threads()[0] + 1)],
    ],
)
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as exit:
        kernels.main(words)
    assert exit.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_model_report(tmp_path, capsys):
    tests = [{"n_prompt": 8, "n_gen": 0, "avg_ts": 4.0}, {"n_prompt": 0, "n_gen": 3, "avg_ts": 2.0}]
    fake = program(tmp_path / "bench", json.dumps(tests))
    words = [str(TINY), "-p", "8", "-n", "3", "-r", "2", "--threads", "1"]
    assert model.main([*words, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert set(alone["machine"]) >= MACHINE
    assert [(r["name"], len(r["runs"])) for r in alone["tokens_per_second"]] == [
        ("pp8", 2),
        ("tg3", 2),
    ]
    assert "ratio" not in alone["tokens_per_second"][0]
    assert model.main([*words, "--json", "--llama-bench", str(fake)]) == 0
    both = json.loads(capsys.readouterr().out)
    for run, theirs in zip(both["tokens_per_second"], (4.0, 2.0), strict=True):
        assert run["llama"]["runs"] == [theirs] * 2
        assert run["ratio"] == pytest.approx(run["median"] / theirs)
    assert "-t 1 -r 1 -o json" in Path(f"{fake}.arguments").read_text()
    assert model.main([*words, "--llama-bench", str(fake)]) == 0
    assert "llama.cpp 4.0 on llama_s.f32.gguf" in capsys.readouterr().out


def test_model_refusals(tmp_path, capsys):
    words = [str(TINY), "-p", "2", "-n", "0", "-r", "1", "--threads", "1", "--llama-bench"]
    assert model.main([str(tmp_path / "none.gguf")]) == 2
    assert model.main([*words, str(program(tmp_path / "text", "not JSON"))]) == 2
    assert "not the JSON of llama-bench" in capsys.readouterr().err
    broken = program(tmp_path / "broken", "")
    broken.write_text("#!/bin/sh\nkill -ILL $$\n")
    assert model.main([*words, str(broken)]) == 2
    assert "exit status -4" in capsys.readouterr().err


def test_large_report(capsys):
    words = [str(TINY), "-p", "9", "-n", "3", "-r", "2", "--threads", "1", "--context", "16"]
    assert large.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["machine"]) >= MACHINE
    assert data["cold"]
    assert 0 < data["pack_seconds"] < data["load_seconds"]
    assert 0 < data["matrix_bytes"] < data["file_bytes"]
    assert data["memory"]["pp"]["peak"] >= data["memory"]["before"]["peak"]
    for name, count in (("tg", 3), ("pp", 9)):
        assert data[name]["tokens"] == count
        assert 0 < data[name]["min"] <= data[name]["median"]
        shares = {row["what"]: row for row in data[f"{name}_shares"]}
        assert sum(row["share"] for row in shares.values()) == pytest.approx(1)
        assert {"matmul f32", "attention", "rms_norm", "quantize activations"} <= set(shares)
        assert shares["matmul f32"]["bytes"] > 0
    assert large.main([*words, "--warm"]) == 0
    text = capsys.readouterr().out
    assert "from a warm file" in text
    assert "small ones together" in text


def test_large_refusals(tmp_path, capsys):
    (tmp_path / "empty.gguf").write_bytes(b"GGUF")
    assert large.main([str(tmp_path / "empty.gguf")]) == 2
    assert "FileError" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        large.main([str(TINY), "-r", "0"])


def test_pnrt_does_not_know_perf():
    sources = sorted((ROOT / "pnrt").rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        assert not re.search(r"^\s*(import|from) perf\b", path.read_text(), re.MULTILINE), path


LISTING = """
        /*0008*/                   MOV R1, c[0x0][0x20] ;      /* 0x4c98078000870001 */
.L_x_1:
        /*0010*/              @!P0 LDG.E.CI.128 R4, [R2] ;     /* 0xeed4a00000070204 */
.L_x_2:
        /*0018*/                   XMAD.S16.S16 R0, R4, R5, R0 ;  /* 0x5b00000000570400 */
        /*0028*/               @P1 BRA `(.L_x_2) ;             /* 0xe2400ffffe80000f */
        /*0030*/         {         FADD R6, R6, R7 ;           /* 0x5c58000000770606 */
        /*0038*/                   SHFL.BFLY PT, R7, R6, 0x1, 0x1f }
        /*0048*/               @P0 BRA `(.L_x_1) ;             /* 0xe2400fffff87000f */
        /*0050*/                   EXIT ;                      /* 0xe30000000007000f */
.L_x_3:
        /*0058*/                   BRA `(.L_x_3) ;             /* 0xe2400fffff87000f */
"""


def test_machine_code_is_counted_per_row_with_inner_loops_repeated():
    code, loops = sm60.parse(LISTING)
    assert len(code) == 9
    total = sm60.count(code, loops, trips=5)
    assert total == {"LDG": 1, "XMAD": 5, "BRA": 6, "FADD": 1, "SHFL": 1}


def test_machine_code_needs_a_disassembler_of_cuda_12(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NVDISASM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sm60.main([]) == 2
    assert "nvdisasm: not found" in capsys.readouterr().err
    new = tmp_path / "nvdisasm"
    new.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.2, V13.2.51'\n")
    new.chmod(0o755)
    assert sm60.main([]) == 2
    assert "CUDA 12 knows sm_60" in capsys.readouterr().err
