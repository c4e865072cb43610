"""--backend of the commands: what they say without a GPU, and a run on the stand-in."""

import json

import pytest
from typer.testing import CliRunner

from pnrt.cli import app
from pnrt.cuda import launch
from pnrt.cuda.standin import StandIn

from ..golden_models import path_of

MODEL = str(path_of("llama_m.pn"))
COMMANDS = {
    "run": ["-p", "a", "-n", "1"],
    "chat": [],
    "logits": ["--tokens", "1"],
    "trace": ["--tokens", "1"],
    "bench": ["-p", "1", "-n", "1", "-r", "1"],
}


def call(command, *args, backend="cuda"):
    words = [command, MODEL, *COMMANDS.get(command, []), "--rotation", "none", *args]
    return CliRunner().invoke(app, [*words, "--backend", backend], input="")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_gpu_is_one_sentence(command, monkeypatch, tmp_path):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    out = ["-o", str(tmp_path / "x.npz")] if command == "logits" else []
    result = call(command, *out)
    assert result.exit_code == 2
    assert "backend cuda: the package numba-cuda is not installed" in result.output
    assert not list(tmp_path.iterdir())


def test_bench_on_the_stand_in(monkeypatch):
    monkeypatch.setattr(launch, "open_device", lambda: StandIn(1 << 26))
    result = json.loads(call("bench", "--json", backend="auto").stdout)
    assert (result["backend"], result["device"], result["launches"]) == ("cuda", "stand-in", 1)
    assert result["graph_nodes"] == 33
    assert [run["name"] for run in result["runs"]] == ["pp1", "tg1"]
