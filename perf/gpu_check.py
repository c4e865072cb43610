"""Everything that can be said of the CUDA backend on a GPU: python -m perf.gpu_check --help

Facts of the device; every kernel against the reference, bit for bit; tiny models against the CPU's
logits; then speeds: memory, products of the 27B model's shapes, a synthetic model with and without
a graph. Under eight minutes, compiling included: what would not fit is not begun but listed, and
what hangs is stopped. A difference or an error is exit status 1; the other items go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf.gpu_items import Item, Plan, items, serve
from pnrt.container.writer import atomic
from pnrt.errors import DeviceError, FileError

# seconds until a process has opened the GPU; that an item may go on after the time is up
OPENING, GRACE = 60, 20


class Worker:
    """A process that does items on the GPU, and may hang or die."""

    method = "spawn"

    def __init__(self, plan: Plan, folder: Path, copied: float):
        context = multiprocessing.get_context(self.method)
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, plan, folder, copied))
        self.process.start()
        theirs.close()

    def send(self, item: Item) -> None:
        # one that died says so where it is heard
        with contextlib.suppress(OSError):
            self.link.send(item)

    def hear(self, seconds: float) -> tuple[str, Any]:
        """The next (kind, value) of gpu_items.serve; "failed" after so many seconds."""
        try:
            if self.link.poll(max(seconds, 0)):
                return self.link.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return "failed", f"its process ended with status {self.process.exitcode}"
        return "failed", "stopped: it did not come to an end"

    def close(self) -> None:
        """End the process and what it started."""
        self.link.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # it has no group of its own yet, or is gone
            self.process.kill()
        self.process.join()


class Run:
    """Does the items of a plan as far as the time goes.

    rows: of the table, as they come; about: facts of the device; changed: called with each.
    """

    def __init__(self, plan: Plan, folder: Path, changed: Callable[[Run], None], start=Worker):
        self.plan, self.folder, self.changed, self.start = plan, folder, changed, start
        self.rows: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self.interrupted = False
        self._worker: Any = None
        self._slowest: dict[str, float] = {}
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._began

    def all(self) -> None:
        """Run everything. Raises DeviceError where there is no GPU."""
        try:
            self._open()
            for item in items(self.plan):
                self._one(item)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._close()

    def _open(self, seconds: float = OPENING) -> None:
        copied = next((1e9 * row["gb_s"] for row in self.rows if row["what"] == "copy"), 0.0)
        self._worker = self.start(self.plan, self.folder, copied)
        kind, value = self._worker.hear(seconds)
        if kind != "facts":
            self._close()
            raise DeviceError(value)
        if not self.about:
            self.about = value
            self.changed(self)

    def _close(self) -> None:
        if self._worker:
            self._worker.close()
        self._worker = None

    def _one(self, item: Item) -> None:
        """An item, if there is time for it."""
        needed = max(item.seconds, 1.2 * self._slowest.get(item.part, 0.0))
        left, began = self.plan.seconds - self.seconds, self.seconds
        if needed > left:
            figure = f"skipped: it may take {needed:.0f} s, {max(left, 0):.0f} are left"
            self._add(item, None, figure, reached=False)
            return
        error = self._ask(item, min(left + GRACE, 5 * needed + OPENING))
        self._slowest[item.part] = max(self._slowest.get(item.part, 0.0), self.seconds - began)
        if error:
            self._close()
            self._add(item, False, error, failed=True)

    def _ask(self, item: Item, seconds: float) -> str:
        """Have an item done; what went wrong, or nothing."""
        end = self.seconds + seconds
        if not self._worker:
            try:
                self._open(min(OPENING, seconds))
            except DeviceError as error:
                return str(error)
        self._worker.send(item)
        while True:
            kind, value = self._worker.hear(end - self.seconds)
            if kind != "row":
                return value
            self.rows.append(value)
            self.changed(self)

    def _add(self, item: Item, ok: bool | None, figure: str, **numbers: Any) -> None:
        row = {"part": item.part, "what": item.what, "ok": ok, "figure": figure, **numbers}
        self.rows.append(row)
        self.changed(self)

    def report(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "device": self.about, "seconds": self.seconds, "interrupted": self.interrupted,
            "rows": self.rows,
        }  # fmt: skip

    def summary(self) -> tuple[str, int]:
        """The last line and the exit status."""
        wrong = sum(row["ok"] is False for row in self.rows)
        judged = sum(row["ok"] is not None for row in self.rows)
        skipped = sum(row.get("reached") is False for row in self.rows)
        text = f"{judged} comparisons, {wrong} wrong, {skipped} skipped, {self.seconds:.0f} s"
        if self.interrupted:
            text += "; interrupted, the rest was not reached"
        return text, int(bool(wrong or self.interrupted or not judged))


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    mark = {True: "ok", False: "WRONG", None: ""}[row["ok"]]
    if row.get("failed"):
        mark = "FAILED"
    return f"{row['part']:<10} {row['what']:<34} {mark:<6} {row['figure']}"


def save(path: Path, report: dict[str, Any]) -> None:
    """Write the report whole or not at all. Raises FileError."""
    with atomic(path) as stream:
        stream.write(json.dumps(report, indent=1).encode() + b"\n")


def main(argv: list[str] | None = None, start: Any = Worker) -> int:
    """Check this machine's GPU; 0 if all is equal, 1 if something differs, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="perf.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the table there")
    parser.add_argument("--layers", type=int, default=Plan().layers, help="of the synthetic model")
    parser.add_argument("--seconds", type=float, default=Plan().seconds, help="for everything")
    a = parser.parse_args(argv)

    def changed(run: Run) -> None:
        print(line(run.rows[-1]) if run.rows else json.dumps(run.about), flush=True)
        if a.json:
            save(a.json, run.report())

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Plan(layers=a.layers, seconds=a.seconds), Path(folder), changed, start)
            run.all()
        if a.json:
            save(a.json, run.report())
    except DeviceError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return 2
    except FileError as error:
        print(f"perf.gpu_check: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    text, status = run.summary()
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
