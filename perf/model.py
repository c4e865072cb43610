"""Prompt and generation speed of a model, beside llama-bench in the same run.

python -m perf.model model.gguf --llama-bench PATH --llama-model other.gguf
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time

import numpy as np

import pnrt
from pnrt.bench import machine
from pnrt.jit import default_threads


def speeds(model: pnrt.Model, prompt: int, generate: int) -> tuple[float, float]:
    """Tokens per second of one prompt and one generation."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt)
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    middle = time.perf_counter()
    model.reset()
    model.eval([1])
    first = time.perf_counter()
    for token in ids[:generate]:
        model.eval([int(token)])
    return prompt / (middle - start), generate / (time.perf_counter() - first)


def llama_speeds(tool: str, path: str, prompt: int, generate: int, threads: int) -> list[float]:
    """The same two numbers by llama-bench."""
    command = [tool, "-m", path, "-t", str(threads), "-p", str(prompt), "-n", str(generate)]
    done = subprocess.run(
        [*command, "-r", "1", "-o", "json"], capture_output=True, text=True, check=True
    )
    return [row["avg_ts"] for row in json.loads(done.stdout)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-p", type=int, default=512, help="prompt tokens")
    parser.add_argument("-n", type=int, default=64, help="generated tokens")
    parser.add_argument("-r", type=int, default=5, help="repetitions")
    parser.add_argument("--threads", type=int, default=default_threads()[0])
    parser.add_argument("--rotation")
    parser.add_argument("--llama-bench", help="path of llama-bench, run in turn with ours")
    parser.add_argument("--llama-model", help="the file it runs (default: FILE)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    ours, theirs = [], []
    with pnrt.load(options.file, threads=options.threads, rotation=options.rotation) as model:
        speeds(model, min(options.p, 32), 4)
        for _ in range(options.r):
            ours.append(speeds(model, options.p, options.n))
            if options.llama_bench:
                path = options.llama_model or options.file
                theirs.append(
                    llama_speeds(options.llama_bench, path, options.p, options.n, options.threads)
                )
    result = {"machine": machine(), "threads": options.threads, "repetitions": options.r}
    for i, what in enumerate((f"prompt_{options.p}", f"generation_{options.n}")):
        runs = [pair[i] for pair in ours]
        entry = {"median": float(np.median(runs)), "min": min(runs), "max": max(runs)}
        if theirs:
            entry["llama_median"] = float(np.median([pair[i] for pair in theirs]))
            entry["ratio"] = entry["median"] / entry["llama_median"]
        result[what] = entry
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for what, entry in result.items():
        if isinstance(entry, dict) and "median" in entry:
            beside = f", llama.cpp {entry['llama_median']:.1f}" if theirs else ""
            ratio = f", ratio {entry['ratio']:.2f}" if theirs else ""
            print(f"{what}: {entry['median']:.1f} tokens/s{beside}{ratio}")


if __name__ == "__main__":
    main()
