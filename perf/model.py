"""A whole model under the clock, beside llama.cpp where asked: python -m perf.model --help"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pnrt
from perf import measure
from pnrt.bench import bench
from pnrt.errors import DeviceError, PnrtError


def llama_bench(path: Path, model: Path, prompt: int, generate: int, threads: int) -> dict:
    """Tokens per second of one run of llama-bench (which warms up itself): {'pp512': ..., ...}.

    Raises: DeviceError if it cannot be run or writes something else than its JSON.
    """
    command = [str(path), "-m", str(model), "-p", str(prompt), "-n", str(generate)]
    command += ["-t", str(threads), "-r", "1", "-o", "json"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise DeviceError(
                f"{path}: exit status {ran.returncode} {ran.stderr.strip()[-200:]}. A negative "
                "status is a signal: -4 means that the build uses instructions this machine "
                "does not have."
            )
        tests = json.loads(ran.stdout)
        kinds = [("pp", t["n_prompt"]) if t["n_prompt"] else ("tg", t["n_gen"]) for t in tests]
        return {f"{k}{n}": t["avg_ts"] for (k, n), t in zip(kinds, tests, strict=True)}
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}. Name llama.cpp's llama-bench.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DeviceError(
            f"{path}: its output is not the JSON of llama-bench: {error!r}. Name that program."
        ) from None


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """Time the model in `a.repeats` rounds, each followed by one of llama-bench if it is given."""
    load = os.getloadavg()[0]
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    with pnrt.load(a.file, threads=a.threads, activations=a.activations, kv=a.kv) as model:
        threads = model.threads
        for _ in range(a.repeats):
            for run in bench(model, a.prompt, a.generate, repeats=1)["runs"]:
                ours.setdefault(run["name"], []).append(run["median"])
            if a.llama_bench:
                beside = a.llama_bench, a.llama_model or a.file
                for name, speed in llama_bench(*beside, a.prompt, a.generate, threads).items():
                    theirs.setdefault(name, []).append(speed)
    runs = []
    for name, speeds in ours.items():
        run: dict[str, Any] = {"name": name, "runs": speeds, **measure.summary(speeds)}
        if name in theirs:
            run["llama"] = {"runs": theirs[name], **measure.summary(theirs[name])}
            run["ratio"] = statistics.median(speeds) / statistics.median(theirs[name])
        runs.append(run)
    return {
        "file": a.file.name,
        "bytes": a.file.stat().st_size,
        "llama_file": (a.llama_model or a.file).name if a.llama_bench else None,
        "activations": a.activations,
        "kv": a.kv,
        "tokens_per_second": runs,
        "machine": measure.machine(threads, load),
    }


def report(data: dict[str, Any]) -> str:
    """The numbers as text."""
    where = data["machine"]
    lines = [
        f"{data['file']}, {where['cpu']}, {where['threads']} threads, pnrt {where['pnrt']}, "
        f"load {where['load']:.1f} at the start",
        f"{'run':8}{'tokens/s':>10}{'min':>9}{'max':>9}",
    ]
    for r in data["tokens_per_second"]:
        line = f"{r['name']:8}{r['median']:>10.1f}{r['min']:>9.1f}{r['max']:>9.1f}"
        if "ratio" in r:
            line += f"   llama.cpp {r['llama']['median']:.1f} on {data['llama_file']}"
            line += f", ratio {r['ratio']:.2f}"
        lines.append(line)
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure, print; exit status 0, or 2 where the model or llama-bench cannot be run."""
    parser = argparse.ArgumentParser(prog="perf.model", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("-p", dest="prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("-n", dest="generate", type=int, default=128, help="generated tokens")
    parser.add_argument("-r", dest="repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--activations", default="q8_0", choices=("q8_0", "f32"))
    parser.add_argument("--kv", default="f16", choices=("f16", "f32"))
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, run in turns")
    parser.add_argument("--llama-model", type=Path, help="its file; FILE if left out")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(words)
    if a.repeats < 1:
        parser.error("-r is at least 1")
    try:
        data = compare(a)
    except PnrtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(data, indent=1) if a.json else report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
