"""perf.gpu_check: all its parts on the stand-in at small sizes, and what it says without a GPU."""

import json

import pytest

from perf import gpu_check
from pnrt.cuda import launch
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.standin import StandIn
from pnrt.errors import DeviceError
from pnrt.formats import FORMATS

SMALL = gpu_check.Plan(
    ops=("add",), formats=("q8_0",), models=(), nbytes=1 << 14, shapes=(("pn4t", 8, 64),),
    preset="tiny-qwen35", layers=1, prompt=2, generate=1, repeats=1,
)  # fmt: skip


def test_every_part(monkeypatch):
    monkeypatch.setattr(gpu_check.Check, "clock", clock)
    lines = []
    check = gpu_check.Check(StandIn(1 << 26), SMALL, lines.append)
    check.all()
    assert check.wrong == 0
    parts = [row["part"] for row in check.rows]
    assert parts == ["op", "product", "memory", "memory", "speed", "speed", *["synthetic"] * 3]
    assert [row["ok"] for row in check.rows] == [True, True, None, None, True, True, *[None] * 3]
    assert len(lines) == len(parts)
    assert "graph on" in lines[-3]
    assert "graph off" in lines[-1]


def clock(self, calls):
    """One run, no repeats: on a stand-in no time means anything."""
    self.device.run(calls)
    return 1.0


def test_a_wrong_product_is_counted(monkeypatch):
    monkeypatch.setattr(gpu_check, "CudaBackend", wrong_backend)
    check = gpu_check.Check(StandIn(1 << 24), SMALL, lambda line: None)
    check.products()
    assert check.wrong == 1
    assert "f32 T=5" in check.rows[0]["figure"]


def wrong_backend(device):
    engine = CudaBackend(device)
    right = engine.matmul

    def matmul(weight, x, mode):
        return right(weight, x, mode) * (2 if (mode, len(x)) == ("f32", 5) else 1)

    engine.matmul = matmul
    return engine


def test_what_the_time_did_not_reach_is_said():
    check = gpu_check.Check(StandIn(1 << 20), SMALL._replace(seconds=0.0), lambda line: None)
    check.all()
    assert {row["figure"] for row in check.rows} == {"not reached in the time"}
    assert len(check.rows) == 6


def test_the_plan_has_every_format_and_op():
    plan = gpu_check.Plan()
    assert set(plan.formats) == {name for name, form in FORMATS.items() if form.weight}
    assert {"attention", "delta", "rope"} <= set(plan.ops)


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    def none():
        raise DeviceError("backend cuda: the driver finds no GPU")

    monkeypatch.setattr(launch, "open_device", none)
    assert gpu_check.main(["--json", str(tmp_path / "x.json")]) == 2
    assert "nothing was checked: backend cuda: the driver finds no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [False, True])
def test_the_table_is_written(monkeypatch, capsys, tmp_path, wrong):
    monkeypatch.setattr(launch, "open_device", lambda: StandIn(1 << 20))
    monkeypatch.setattr(
        gpu_check.Check, "all", lambda self: self.add("product", "q8_0", not wrong, "")
    )
    out = tmp_path / "x.json"
    assert gpu_check.main(["--json", str(out)]) == wrong
    data = json.loads(out.read_text())
    assert data["rows"][0]["ok"] is not wrong
    assert data["device"]["name"] == "stand-in"
    assert ("WRONG" in capsys.readouterr().out) == wrong
