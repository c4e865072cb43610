"""The commands, in process: exit status, streams, JSON, and no traceback for any bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from pnrt.cli import app
from pnrt.cli.app import _prepare_streams
from pnrt.cli.output import progress
from pnrt.container.gguf import open_gguf
from pnrt.demo import write_tiny_model
from pnrt.formats import FORMATS
from pnrt.quantize import quantize_file
from tests.commands import pnrt, rewrite


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with tiny.gguf (f32) and pn.gguf (pn3t, pn4t, q8_0)."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "tiny.gguf", layers=1)
    quantize_file(folder / "tiny.gguf", folder / "pn.gguf", "pn3")
    return folder


@pytest.fixture(scope="module")
def pn(models):
    return models / "pn.gguf"


def test_help_and_version():
    listed = pnrt("--help")
    assert listed.exit_code == 0
    commands = "demo inspect check quantize convert run chat score tokenize logits bench doctor"
    for command in (*commands.split(" "), "compare", "formats", "trace", "diff"):
        assert f"\n  {command} " in listed.output
        assert pnrt(command, "--help").exit_code == 0
    assert pnrt("--version").output.startswith("pnrt 0.")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['pnrt', '--help']\n"
        "from pnrt.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numba', 'numpy', 'tokenizers', 'jinja2', 'llvmlite'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("args", [["nonsense"], ["inspect"], ["run", "x.gguf"], ["bench", "-r"]])
def test_wrong_usage_is_two(args):
    result = pnrt(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_inspect_in_three_depths(pn):
    whole = json.loads(pnrt("inspect", pn, "--json", "--hash").stdout)
    assert len(whole["tensors"]) == 11
    assert len(whole["tensors"][0]["sha256"]) == 64
    tensor = json.loads(pnrt("inspect", pn, "--tensor", "blk.0.ffn_up.weight", "--json").stdout)
    assert sum(count for _, count in tensor["codes"]) == 576 * 320
    args = ("inspect", pn, "--tensor", "blk.0.ffn_up.weight", "--block", "5,2")
    block = json.loads(pnrt(*args, "--json").stdout)
    with open_gguf(pn) as file:
        rows = file.rows("blk.0.ffn_up.weight")
        assert block["hex"] == rows[5, 68:102].tobytes().hex()
        assert block["values"] == FORMATS["pn3t"].decode(rows[5:6])[0, 160:240].tolist()
    for shown in (pnrt("inspect", pn), pnrt("inspect", pn, "--hash"), pnrt(*args)):
        assert shown.exit_code == 0
        assert "pn3t" in shown.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tensor", "blk.0.ffn_pu.weight"], "blk.0.ffn_up.weight"),
        (["--tensor", "blk.0.ffn_up.weight", "--block", "x"], "ROW,BLOCK"),
        (["--tensor", "blk.0.ffn_up.weight", "--block", "576,0"], "row 576"),
        (["--block", "0,0"], "--tensor"),
    ],
)
def test_inspect_refuses_what_is_not_there(pn, args, words):
    result = pnrt("inspect", pn, *args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_check_counts_every_finding(pn, tmp_path):
    assert pnrt("check", pn).exit_code == 0
    with open_gguf(pn) as file:
        data = file.data("blk.0.ffn_up.weight").copy()
    for block in (0, 7, 500):
        data[34 * block + 1] = 0x7E
    broken = {"blk.0.ffn_up.weight": ((576, 320), 124, data)}
    path = rewrite(pn, tmp_path / "bad.gguf", tensors=broken)
    result = pnrt("check", path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["findings"]
    assert [(f["row"], f["block"]) for f in found] == [(0, 0), (1, 3), (125, 0)]
    shown = pnrt("check", path)
    assert shown.exit_code == 1
    assert "3 findings" in shown.stdout


def test_quantize_dry_run_writes_nothing(models, tmp_path):
    out = tmp_path / "o.gguf"
    result = pnrt("quantize", models / "tiny.gguf", out, "--mix", "pn3", "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert {d["name"]: d["target"] for d in plan}["blk.0.ffn_down.weight"] == "pn4t"
    assert "pn3t's 80" in pnrt(
        "quantize", models / "tiny.gguf", out, "--mix", "pn3", "--dry-run"
    ).stdout.replace("\n", " ")
    assert not out.exists()


def test_quantize_reports_and_names_fallbacks(models, tmp_path):
    args = ("quantize", models / "tiny.gguf", tmp_path / "o.gguf", "--mix", "pn3")
    result = pnrt(*args, "--tensor-type", "ffn_up=q8_0", "--report")
    assert result.exit_code == 0
    assert "relative RMS" in result.stdout
    assert "blk.0.ffn_down.weight: pn4t, because K = 576" in result.stdout
    with open_gguf(tmp_path / "o.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].type_name == "q8_0"


@pytest.mark.parametrize(
    "args",
    [
        ["--mix", "pn9"],
        ["--mix", "pn3", "--tensor-type", "ffn_up"],
        ["--mix", "pn3", "--tensor-type", "ffn_down=pn3t"],
        ["--mix", "pn3", "--threads", "0"],
    ],
)
def test_quantize_refuses(models, tmp_path, args):
    result = pnrt("quantize", models / "tiny.gguf", tmp_path / "o.gguf", *args)
    assert result.exit_code == 2
    assert result.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_output_replaces_its_source(models):
    path = models / "tiny.gguf"
    before = path.read_bytes()
    for args in (
        ["quantize", path, path, "--mix", "pn3"],
        ["logits", path, "-p", "x", "-o", path],
        ["trace", path, "-p", "x", "-o", path],
        ["diff", path, "cpu", "reference", "-p", "x", "--html", path],
        ["formats", "--error", path, "--svg", path],
    ):
        result = pnrt(*args)
        assert result.exit_code == 2
        assert f"{path}: is the source itself" in result.stderr
    assert path.read_bytes() == before


def test_tokenize(pn):
    rows = json.loads(pnrt("tokenize", pn, "the é", "--json").stdout)
    assert b"".join(bytes.fromhex(r["bytes"]) for r in rows).decode() == "the é"
    assert (rows[0]["token"], rows[0]["kind"]) == ("th", "normal")
    assert "5 tokens" in pnrt("tokenize", pn, "the é").stdout
    marked = json.loads(pnrt("tokenize", pn, "<|im_end|>", "--special", "--json").stdout)
    assert [r["token"] for r in marked] == ["<|im_end|>"]


def test_compare(models, pn):
    same = pnrt("compare", pn, pn, "--json")
    assert same.exit_code == 0
    assert json.loads(same.stdout)["equal"]
    other = pnrt("compare", models / "tiny.gguf", pn, "--json")
    assert other.exit_code == 1
    kinds = {t["name"]: t["kind"] for t in json.loads(other.stdout)["tensors"]}
    assert kinds["output_norm.weight"] == "same"
    assert kinds["blk.0.ffn_up.weight"] == "differs"
    assert "relative RMS" in pnrt("compare", models / "tiny.gguf", pn).stdout


def test_run_is_deterministic_and_speaks_of_speed(pn):
    args = ("run", pn, "-p", "hello", "-n", "8", "--seed", "5")
    first, second = pnrt(*args), pnrt(*args)
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    assert "tokens/s" in first.stderr
    assert "; seed 5" in first.stderr
    report = json.loads(pnrt(*args, "--json", "--logprobs", "1").stdout)
    assert [row["token"] for row in report["logprobs"]][: len(report["tokens"])] == report["tokens"]
    assert (report["prompt_tokens"], report["seed"]) == (5, 5)
    assert report["ended"] == ("limit" if len(report["tokens"]) == 8 else "end")
    assert 1 <= len(report["tokens"]) <= 8
    assert report["text"] == first.stdout[:-1]


def test_chunks_do_not_change_logits(pn, tmp_path):
    seen = []
    for chunk in (1, 7, 512):
        out = tmp_path / f"{chunk}.npz"
        args = ("logits", pn, "--tokens", ",".join(map(str, range(20))), "-o", out, "--all")
        assert pnrt(*args, "--chunk", chunk).exit_code == 0
        seen.append(np.load(out))
    assert seen[0]["logits"].shape == (20, 259)
    assert seen[0]["logits"].dtype == np.float32
    assert seen[0]["tokens"].tolist() == list(range(20))
    for other in seen[1:]:
        assert np.array_equal(seen[0]["logits"], other["logits"])
    last = tmp_path / "last.npz"
    pnrt("logits", pn, "--tokens", ",".join(map(str, range(20))), "-o", last)
    assert np.array_equal(np.load(last)["logits"], seen[0]["logits"][-1])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "-p TEXT or --tokens"),
        (["-p", "a", "--tokens", "1"], "only one"),
        (["--tokens", "1,x"], "whole numbers"),
        (["--tokens", "1,259"], "token 259"),
        (["--tokens", "-1"], "token -1"),
    ],
)
def test_logits_refuses(pn, tmp_path, args, words):
    result = pnrt("logits", pn, "-o", tmp_path / "o.npz", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_score_alone_and_against(models, pn, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8, encoding="utf-8")
    args = ("score", pn, text, "--ctx", "32", "--chunks", "3", "--json")
    alone = json.loads(pnrt(*args).stdout)
    assert (alone["windows"], alone["tokens"]) == (3, 45)
    both = json.loads(pnrt(*args, "--against", models / "tiny.gguf").stdout)
    assert both["model"] == alone["perplexity"]
    assert both["kld"]["value"] > 0
    itself = json.loads(pnrt(*args, "--against", pn).stdout)
    assert itself["kld_max"] == 0
    exact = json.loads(pnrt(*args, "--against-kv", "f32").stdout)
    assert exact["model"] == alone["perplexity"]
    assert 0 < exact["kld"]["value"] < both["kld"]["value"]
    assert exact["base_settings"] == {"activations": "q8_0", "kv": "f32"}
    shown = pnrt(*args[:-1], "--against", pn).stdout
    assert "same top token" in shown
    assert "activations q8_0, kv f16" in shown
    long = pnrt("score", pn, text, "--ctx", "4096")
    assert long.exit_code == 2
    missing = pnrt("score", pn, tmp_path / "no.txt")
    assert missing.exit_code == 2
    assert "no.txt" in missing.stderr
    text.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in pnrt("score", pn, text).stderr


def test_bench_states_numbers_and_machine(pn):
    result = json.loads(pnrt("bench", pn, "-p", "16", "-n", "4", "-r", "2", "--json").stdout)
    assert [r["name"] for r in result["runs"]] == ["pp16", "tg4"]
    for run in result["runs"]:
        assert 0 < run["low"] <= run["median"] <= run["high"]
        assert len(run["seconds"]) == 2
    assert result["machine"]["numba"]
    assert "pp4 @ d60" in pnrt("bench", pn, "-p", "4", "-n", "0", "-r", "1", "-d", "60").stdout
    assert pnrt("bench", pn, "-p", "0", "-n", "0").exit_code == 2


def test_doctor_lists_kernels():
    result = pnrt("doctor", "--kernels", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    assert {"op", "format", "cpu", "cuda"} == set(report["kernels"][0])
    assert all(k["cpu"] and k["cuda"] for k in report["kernels"])
    assert "pn3t" in {k["format"] for k in report["kernels"]}
    assert report["threads"]["because"]
    assert "threads" in pnrt("doctor").stdout


def test_formats_table_and_errors(models, tmp_path):
    rows = {r["name"]: r for r in json.loads(pnrt("formats", "--json").stdout)}
    assert rows["pn3t"]["bits_per_weight"] == 3.4
    assert "cpu" in rows["pn4t"]["backends"]
    assert rows["f16"]["activations"] == ["f32"]
    svg = tmp_path / "formats.svg"
    result = pnrt("formats", "--error", models / "tiny.gguf", "--svg", svg)
    assert result.exit_code == 0
    assert svg.read_text().startswith("<svg")
    bars = {line.split()[0]: line.count("▇") for line in result.stdout.splitlines() if "▇" in line}
    assert bars["q8_0"] < bars["pn4t"] < bars["pn3t"]
    assert "no matrix fits the block or the range of q2_K" in " ".join(result.stdout.split())
    measured = json.loads(pnrt("formats", "--error", models / "tiny.gguf", "--json").stdout)
    error = {r["name"]: r["relative_rms"] for r in measured}
    assert error["f32"] == 0
    held = {r["name"]: (r["matrices"], r["of"]) for r in measured if r["weights"]}
    assert held["f32"][0] == held["f32"][1] > held["q2_K"][0] == 0
    assert error["q8_0"] < error["pn4t"] < error["pn3t"] < 0.3


# bad input: whatever the file, one message and exit status 2


def garbage(path, models):
    path.write_bytes(np.random.default_rng(1).bytes(5000))


def empty(path, models):
    path.write_bytes(b"")


def truncated(path, models):
    path.write_bytes((models / "pn.gguf").read_bytes()[:-1000])


def directory(path, models):
    path.mkdir()


def missing(path, models):
    pass


def safetensors(path, models):
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def unknown_architecture(path, models):
    rewrite(models / "pn.gguf", path, {"general.architecture": ("string", "mamba")})


def missing_key(path, models):
    rewrite(models / "pn.gguf", path, {"llama.block_count": None})


def missing_tensor(path, models):
    rewrite(models / "pn.gguf", path, tensors={"blk.0.ffn_up.weight": None})


def wrong_shape(path, models):
    x = np.zeros((576, 160), "<f4")
    rewrite(models / "pn.gguf", path, tensors={"blk.0.ffn_up.weight": (x.shape, 0, x)})


def silent_rotation(path, models):
    rewrite(models / "pn.gguf", path, {"pnrt.rotation.type": None, "pnrt.rotation.version": None})


def unknown_type(path, models):
    data = np.zeros(576 * 320, np.uint8)
    rewrite(models / "pn.gguf", path, tensors={"blk.0.ffn_up.weight": ((576, 320), 24, data)})


def no_tokenizer(path, models):
    rewrite(models / "pn.gguf", path, {"tokenizer.ggml.model": None})


BAD = [
    garbage, empty, truncated, directory, missing, safetensors, unknown_architecture, missing_key,
    missing_tensor, wrong_shape, silent_rotation, unknown_type, no_tokenizer,
]  # fmt: skip


@pytest.mark.parametrize("make", BAD, ids=lambda f: f.__name__)
def test_bad_files_are_refused_by_run(models, tmp_path, make):
    path = tmp_path / "bad.gguf"
    make(path, models)
    before = sorted(p.name for p in tmp_path.iterdir())
    commands = [["run", path, "-p", "hello", "-n", "2"]]
    if make is not no_tokenizer:
        commands.append(["bench", path, "-r", "1", "-p", "8", "-n", "0"])
    for args in commands:
        result = pnrt(*args)
        assert result.exit_code == 2, result.output
        assert str(path) in result.stderr
        assert result.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("make", BAD[:6], ids=lambda f: f.__name__)
def test_bad_containers_are_refused_by_everything(models, tmp_path, make):
    path, out = tmp_path / "bad.gguf", tmp_path / "out.gguf"
    make(path, models)
    for args in (
        ["inspect", path],
        ["quantize", path, out, "--mix", "pn3"],
        ["tokenize", path, "x"],
        ["compare", models / "pn.gguf", path],
        ["logits", path, "-p", "x", "-o", out],
        ["formats", "--error", path],
    ):
        result = pnrt(*args)
        assert result.exit_code == 2, args
        assert str(path) in result.stderr
    assert pnrt("check", path).exit_code in ((2,) if make in (directory, missing) else (1,))
    assert not out.exists()


def test_nan_scales_are_refused(models, tmp_path):
    with open_gguf(models / "pn.gguf") as file:
        data = file.data("blk.0.ffn_up.weight").copy()
    data[34 * 9 + 1] = 0x7E
    broken = {"blk.0.ffn_up.weight": ((576, 320), 124, data)}
    path = rewrite(models / "pn.gguf", tmp_path / "nan.gguf", tensors=broken)
    result = pnrt("run", path, "-p", "x", "-n", "1")
    assert result.exit_code == 2
    assert "blk.0.ffn_up.weight row 2 block 1 (byte 0x" in result.stderr
    assert "scale d is nan; it must be finite" in result.stderr
    assert "pnrt check" in result.stderr


def test_a_prompt_longer_than_the_context_is_refused(pn):
    result = pnrt("run", pn, "-p", "x" * 70, "--context", "64")
    assert result.exit_code == 2
    assert "70 tokens" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", ""),
        ("{{ messages.__class__.__mro__ }}", ""),
        ("{% broken", ""),
    ],
)
def test_hostile_templates_are_refused_by_chat(models, tmp_path, template, words):
    path = rewrite(
        models / "pn.gguf", tmp_path / "t.gguf", {"tokenizer.chat_template": ("string", template)}
    )
    result = CliRunner().invoke(app, ["chat", str(path), "-n", "2"], input="hello\n")
    assert result.exit_code == 2
    assert "template" in result.stderr
    assert "Traceback" not in result.output


def test_chat_answers_each_line(pn):
    result = CliRunner().invoke(
        app, ["chat", str(pn), "-n", "4", "--seed", "1"], input="hello\nand again\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.count("generation") == 2


def test_chat_takes_a_template_and_survives_an_interrupt(pn, tmp_path, monkeypatch):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    pieces = iter([KeyboardInterrupt])

    def write(piece):
        for error in pieces:
            raise error

    monkeypatch.setattr("pnrt.cli.text.write", write)
    command = ["chat", str(pn), "-n", "2", "--seed", "1", "--template", str(template)]
    result = CliRunner().invoke(app, command, input="one\ntwo\n")
    assert result.exit_code == 0, result.output
    first, second = (line for line in result.stderr.splitlines() if "generation" in line)
    assert first.startswith("prompt 3 tokens")
    # the second answer reads the whole conversation anew
    assert int(second.split()[1]) > 6


def test_chat_without_a_template_names_the_file(models, tmp_path):
    path = rewrite(models / "pn.gguf", tmp_path / "t.gguf", {"tokenizer.chat_template": None})
    result = CliRunner().invoke(app, ["chat", str(path)], input="hello\n")
    assert result.exit_code == 2
    assert f"{path}: tokenizer.chat_template: missing" in result.stderr
    assert "--template FILE" in result.stderr


def test_a_closed_pipe_is_quiet(pn):
    command = f"{sys.executable} -m pnrt inspect {pn} --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_closed_streams_and_narrow_encodings_stop_nothing(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    for name, stream in (("stdin", None), ("stdout", None), ("stderr", narrow)):
        monkeypatch.setattr(sys, name, stream)
    _prepare_streams()
    assert sys.stdin.readline() == ""
    print("nobody reads this")
    print("caf\u00e9", file=sys.stderr, end="", flush=True)
    assert narrow.buffer.getvalue() == b"caf\\xe9"


def test_names_out_of_files_do_not_drive_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress() as tell:
        tell("blk[/b]\x1b[2J", 1, 2)
        tell("remark [/b]", -1, 0)
    shown = capsys.readouterr().err
    assert "blk[/b]" in shown
    assert "remark [/b]" in shown
    assert "\x1b[2J" not in shown
