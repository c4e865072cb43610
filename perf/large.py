"""A large model under the clock: loading, memory, speed, and where the time goes.

python -m perf.large FILE [-p 512] [-n 16] [--warm] [--json]

Shares are measured call by call, so each has the start of a parallel region in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import pnrt
from perf import measure
from pnrt.backend import Tap
from pnrt.errors import PnrtError

# what should cost little beside the products: recurrence, convolution, attention, rotation
SMALL = ("delta", "conv_silu", "attention", "hadamard")


def memory() -> dict[str, int]:
    """Bytes of this process: peak, now, and of these now in anonymous memory."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon"):
            found[name] = int(value.split()[0]) * 1024
    return {"peak": found["VmHWM"], "now": found["VmRSS"], "anonymous": found["RssAnon"]}


def drop_from_cache(path: Path) -> None:
    """Ask the system to forget the file's pages, so that loading reads the disk."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Shares:
    """An observer that sums seconds by kind of work: products by format, other ops by name."""

    def __init__(self, model: pnrt.Model):
        self.file = model.file
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def __call__(self, tap: Tap) -> None:
        op = tap.step.op
        *prepare, last = tap.kernels
        for _, seconds, _ in prepare:
            self._add("quantize activations" if op == "matmul" else op, seconds, 0)
        if op == "matmul":
            op = f"matmul {self.file.tensors[tap.step.weights[0]].format.name}"
        self._add(op, last[1], last[2])

    def _add(self, what: str, seconds: float, nbytes: int) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        self.bytes[what] = self.bytes.get(what, 0) + nbytes

    def rows(self) -> list[dict[str, Any]]:
        """What took how much, the most first."""
        total = sum(self.seconds.values())
        order = sorted(self.seconds, key=self.seconds.get, reverse=True)
        return [
            {
                "what": what,
                "seconds": self.seconds[what],
                "share": self.seconds[what] / total,
                "bytes": self.bytes[what],
            }
            for what in order
        ]


def speed(model: pnrt.Model, tokens: list[int], each: bool) -> tuple[float, float]:
    """Seconds of feeding the tokens into an empty state, one by one or as one prompt.

    Returns: by the clock, and of the CPUs; the second does not count what others ran meanwhile.
    """
    model.reset()
    start, busy = time.perf_counter(), time.process_time()
    for part in [[t] for t in tokens] if each else [tokens]:
        model.eval(part)
    return time.perf_counter() - start, time.process_time() - busy


def shares(model: pnrt.Model, tokens: list[int], each: bool) -> list[dict[str, Any]]:
    """Where the time of the same goes, measured call by call."""
    watch = Shares(model)
    model.reset()
    model.session.observer = watch
    try:
        for part in [[t] for t in tokens] if each else [tokens]:
            model.eval(part)
    finally:
        model.session.observer = None
    return watch.rows()


def run(a: argparse.Namespace) -> dict[str, Any]:
    """Load, measure, and give everything back."""
    load = os.getloadavg()[0]
    before = memory()
    if not a.warm:
        drop_from_cache(a.file)
    started, busy = time.perf_counter(), time.process_time()
    packing: dict[str, float] = {}

    def tell(what: str, done: int, total: int) -> None:
        packing[what.split(",")[0]] = time.perf_counter() - started

    options = {"threads": a.threads, "context": a.context, "rotation": a.rotation}
    with pnrt.load(a.file, progress=tell, **options) as model:
        loaded, busy = time.perf_counter() - started, time.process_time() - busy
        after = memory()
        packed = sum(getattr(w, "nbytes", 0) for w in model.session.weights.values())
        read = sum(model.file.tensors[name].nbytes for name in model.program.matrices())
        draw = np.random.default_rng(0)
        tokens = draw.integers(0, model.config.vocab_size, max(a.prompt, a.generate)).tolist()
        speed(model, tokens[:2], True)
        result = {
            "file": a.file.name,
            "layers": model.config.n_layers,
            "file_bytes": model.file.size,
            "matrix_bytes": read,
            "packed_bytes": packed,
            "cold": not a.warm,
            "pack_seconds": packing["packing weights"],
            "load_seconds": loaded,
            "load_cpu_seconds": busy,
            "memory": {"before": before, "loaded": after},
        }
        threads = model.threads
        for name, count, each in (("tg", a.generate, True), ("pp", a.prompt, False)):
            if not count:
                continue
            rounds = [speed(model, tokens[:count], each) for _ in range(a.repeats)]
            result[name] = {
                "tokens": count,
                **measure.summary([count / seconds for seconds, _ in rounds]),
                "cpu_seconds_per_token": min(busy for _, busy in rounds) / count,
            }
            result["memory"][name] = memory()
            result[f"{name}_shares"] = shares(
                model, tokens[: min(count, 8) if each else count], each
            )
    result["machine"] = measure.machine(threads, load)
    return result


def report(data: dict[str, Any]) -> str:
    """The numbers as text."""
    where, peak = data["machine"], data["memory"]
    gigabytes = data["matrix_bytes"] / 1e9
    lines = [
        f"{data['file']}, {data['layers']} layers, {where['cpu']}, {where['threads']} threads, "
        f"pnrt {where['pnrt']}, load {where['load']:.1f} at the start",
        f"{gigabytes:.2f} GB of matrices, {data['packed_bytes'] / 1e9:.2f} GB packed",
        f"packed in {data['pack_seconds']:.1f} s from a {'cold' if data['cold'] else 'warm'} file, "
        f"{gigabytes / data['pack_seconds']:.2f} GB/s; loaded in {data['load_seconds']:.1f} s, "
        f"{data['load_cpu_seconds']:.1f} s of the CPUs",
    ]
    for name in ("before", "loaded", "tg", "pp"):
        if name in peak:
            m = peak[name]
            lines.append(
                f"memory {name:7} peak {m['peak'] / 1e9:.2f} GB, "
                f"{m['peak'] / data['packed_bytes']:.2f} of the packed; now {m['now'] / 1e9:.2f} GB"
            )
    for name in ("tg", "pp"):
        if name not in data:
            continue
        r = data[name]
        lines.append(
            f"{name}{r['tokens']}: {r['median']:.2f} tokens/s ({r['min']:.2f} to {r['max']:.2f}), "
            f"{r['cpu_seconds_per_token']:.4f} s of the CPUs per token"
        )
        for row in data[f"{name}_shares"]:
            rate = f"{row['bytes'] / row['seconds'] / 1e9:.1f} GB/s" if row["bytes"] else ""
            lines.append(f"  {row['what']:24}{row['share']:7.1%}{row['seconds']:10.4f} s  {rate}")
        small = sum(r["share"] for r in data[f"{name}_shares"] if r["what"] in SMALL)
        lines.append(f"  {'small ones together':24}{small:7.1%}  ({', '.join(SMALL)})")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure, print; exit status 0, or 2 where the model cannot be run."""
    parser = argparse.ArgumentParser(prog="perf.large", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("-p", dest="prompt", type=int, default=512, help="prompt tokens, 0: none")
    parser.add_argument("-n", dest="generate", type=int, default=16, help="generated tokens")
    parser.add_argument("-r", dest="repeats", type=int, default=3, help="rounds")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rotation")
    parser.add_argument("--warm", action="store_true", help="leave the file in the page cache")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(words)
    if a.repeats < 1 or min(a.prompt, a.generate) < 0:
        parser.error("-r is at least 1, -p and -n are at least 0")
    try:
        data = run(a)
    except PnrtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(data, indent=1) if a.json else report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
