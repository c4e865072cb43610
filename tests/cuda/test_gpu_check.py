"""perf.gpu_check: all its parts on the stand-in at small sizes, and what it says of trouble."""

import json
import os
import time

import pytest

from perf import gpu_check, gpu_items
from pnrt.cuda import launch
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.standin import StandIn
from pnrt.errors import DeviceError
from pnrt.formats import FORMATS

SMALL = gpu_items.Plan(
    ops=("add",), formats=("q8_0",), models=(), nbytes=1 << 14, shapes=(("pn4t", 8, 64),),
    preset="tiny-qwen35", layers=1, prompt=2, generate=1, repeats=1, seconds=1e4,
)  # fmt: skip


class Here:
    """A worker in this process, on a stand-in."""

    def __init__(self, plan, folder, copied):
        self.said = [("facts", {"name": "stand-in"})]
        tell = self.said.append
        self.check = gpu_items.Check(
            StandIn(1 << 26), plan, lambda row: tell(("row", row)), folder, copied
        )

    def send(self, item):
        gpu_items.answer(Once(item, self.said.append), self.check)

    def hear(self, seconds):
        return self.said.pop(0)

    def close(self):
        pass


class Once:
    """A connection that one item comes over."""

    def __init__(self, item, send):
        self.items, self.send = [item], send

    def recv(self):
        if not self.items:
            raise EOFError
        return self.items.pop()


def test_every_part(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_items.Check, "clock", clock)
    lines = []
    run = gpu_check.Run(SMALL, tmp_path, lambda run: lines.append(len(run.rows)), Here)
    run.all()
    parts = [row["part"] for row in run.rows]
    assert parts == ["op", "product", "memory", "memory", "speed", "speed", *["synthetic"] * 3]
    assert [row["ok"] for row in run.rows] == [True, True, None, None, True, True, *[None] * 3]
    assert lines == list(range(len(parts) + 1))
    assert "% of the copy" in run.rows[4]["figure"]
    assert run.rows[-3]["what"].endswith("graph on")
    assert run.rows[-1]["what"].endswith("graph off")
    text, status = run.summary()
    assert text.startswith("4 comparisons, 0 wrong, 0 skipped")
    assert status == 0
    assert not list(tmp_path.iterdir())


def clock(self, calls):
    """One run, no repeats: on a stand-in no time means anything."""
    self.device.run(calls)
    return 1.0


def test_a_wrong_product_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_items, "CudaBackend", wrong_backend)
    rows = []
    gpu_items.Check(StandIn(1 << 24), SMALL, rows.append, tmp_path).product("q8_0")
    assert [row["ok"] for row in rows] == [False]
    assert "f32 T=5" in rows[0]["figure"]


def wrong_backend(device):
    engine = CudaBackend(device)
    right = engine.matmul

    def matmul(weight, x, mode):
        return right(weight, x, mode) * (2 if (mode, len(x)) == ("f32", 5) else 1)

    engine.matmul = matmul
    return engine


def test_what_does_not_fit_the_time_is_not_begun(tmp_path):
    run = gpu_check.Run(SMALL._replace(seconds=12), tmp_path, lambda run: None, Here)
    run._slowest["op"] = 20.0
    run.all()
    reached = {row["part"]: row.get("reached", True) for row in run.rows}
    assert reached == {"compile": False, "op": False, "product": True, "memory": False,
                       "speed": False, "synthetic": False}  # fmt: skip
    assert "skipped: it may take 24 s, 1" in run.rows[1]["figure"]
    assert "1 comparisons, 0 wrong, 5 skipped" in run.summary()[0]


def trouble(link, plan, folder, copied):
    """Items with the worst manners, by their first argument."""
    link.send(("facts", {}))
    while True:
        item = link.recv()
        what = item.args[0] if item.args else ""
        if what == "add":
            os._exit(7)
        if what == "q8_0":
            link.send(("failed", "ValueError: no"))
            return
        if item.part == "memory":
            time.sleep(60)
        link.send(("row", {"part": item.part, "what": what, "ok": True, "figure": str(copied)}))
        link.send(("done", ""))


def test_what_fails_dies_or_hangs_is_reported_and_the_rest_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check.Worker, "method", "fork")
    monkeypatch.setattr(gpu_check, "serve", trouble)
    monkeypatch.setattr(gpu_check, "OPENING", 0.3)
    right = gpu_check.items

    def items(plan):
        return [item._replace(seconds=0.1) for item in right(plan)]

    monkeypatch.setattr(gpu_check, "items", items)
    run = gpu_check.Run(SMALL, tmp_path, lambda run: None)
    run.all()
    figures = {row["part"]: row["figure"] for row in run.rows if row["ok"] is False}
    assert figures == {
        "op": "its process ended with status 7",
        "product": "ValueError: no",
        "memory": "stopped: it did not come to an end",
    }
    assert [row["part"] for row in run.rows if row["ok"]] == ["compile", "speed", "synthetic"]
    assert run.summary()[1] == 1


def test_the_plan_has_every_format_and_op():
    plan = gpu_items.Plan()
    assert set(plan.formats) == {name for name, form in FORMATS.items() if form.weight}
    assert {"attention", "delta", "rope"} <= set(plan.ops)
    assert sum(item.seconds < plan.seconds / 3 for item in gpu_items.items(plan)) > 50


def test_every_product_is_compiled_beforehand():
    keys = gpu_items.wanted(gpu_items.Plan())
    names = [gpu_items._kernel(key).name for key in keys]
    assert len(set(names)) == len(names)
    expected = {"matmul_pn4t_17408_q8_0_vector_add", "matmul_q4_K_5120_q8_0_4x4", "delta"}
    assert {*expected, "swiglu_rot_1024_17408_nibble_rot", "rope_and_rope"} <= set(names)


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    def none():
        raise DeviceError("backend cuda: the driver finds no GPU")

    monkeypatch.setattr(launch, "open_device", none)
    monkeypatch.setattr(gpu_check.Worker, "method", "fork")
    assert gpu_check.main(["--json", str(tmp_path / "x.json")]) == 2
    assert "nothing was checked: backend cuda: the driver finds no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["right", "wrong", "interrupted"])
def test_the_table_is_written(monkeypatch, capsys, tmp_path, end):
    def run(self, item):
        if end == "interrupted" and item.part == "op":
            raise KeyboardInterrupt
        self.add(item.part, item.what, end != "wrong", "")

    monkeypatch.setattr(gpu_items.Check, "run", run)
    out = tmp_path / "x.json"
    assert gpu_check.main(["--json", str(out), "--seconds", "9999"], Here) == (end != "right")
    data = json.loads(out.read_text())
    assert data["device"]["name"] == "stand-in"
    assert data["interrupted"] == (end == "interrupted")
    assert (data["rows"][-1]["part"] == "synthetic") == (end != "interrupted")
    assert ("WRONG" in capsys.readouterr().out) == (end == "wrong")
    assert list(tmp_path.iterdir()) == [out]
