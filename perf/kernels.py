"""The quantized product under the clock: python -m perf.kernels --help

A number is only reported after its product has been compared, bit for bit, with the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from perf import measure
from pnrt import backend, jit, reference
from pnrt.cpu import matmul, pack
from pnrt.cpu.activations import TILE, Activations
from pnrt.cpu.codec import FLOATS
from pnrt.cpu.codec import ROWS as PANEL
from pnrt.errors import DeviceError, DifferenceError, PnrtError
from pnrt.formats import FORMATS
from pnrt.machine import default_threads

# rows that are quantized and judged; the matrix repeats them
ROWS = 64
# weights per timed run at least, so that starting a parallel region does not count
RUN = 20_000_000
# the one shape that llama.cpp's own benchmark of products covers
LLAMA = {"m": 4096, "k": 14336}
LLAMA_LINE = re.compile(r"type_a=(\w+),.*?m=4096,n=(\d+),k=14336,.*?([\d.]+) us/run")
# what a format that llama.cpp lacks is held against; the others meet themselves
RIVALS = {"pn3t": "q4_K", "pn4t": "q4_K"} | dict.fromkeys(("e4m3", "mxfp8", "mxfp8_264"), "q8_0")


def case(name: str, N: int, K: int, tokens: list[int], threads: int) -> list[dict[str, Any]]:
    """Time [N, K] of a format times each number of tokens.

    Returns: one dict per number of tokens; seconds in `product` and `quantize`.
    Raises: DifferenceError where a product has other bits than the reference, and no number then.
    """
    form, rng = FORMATS[name], np.random.default_rng(0)
    base = form.quantize(rng.standard_normal((min(N, ROWS), K)).astype(np.float32))
    rows = np.resize(base, (N, base.shape[1]))
    weight = backend.open("cpu", threads).pack(name, rows, K)
    read = measure.read_bandwidth(threads, weight.nbytes) / 1e9
    results = [_time(weight, base, T, threads, rng) for T in tokens]
    for r in results:
        r |= {"read_gb_per_s": read, "read_ratio": r["gb_per_s"] / read}
    return results


def _time(weight: pack.Weight, base: np.ndarray, T: int, threads: int, rng) -> dict[str, Any]:
    name, N, K = weight.format, weight.N, weight.K
    count = 1 if T == 1 else TILE
    x = rng.standard_normal((T, K)).astype(np.float32)
    mode = "f32" if name in FLOATS else "q8_0"
    inputs = Activations(K, T, mode, count)
    out = np.full((-(-T // count) * count, weight.panels * PANEL), np.nan, np.float32)
    control, bad = np.array([T, 0], np.int64), np.zeros(1, np.int32)
    scratch = matmul.scratch(threads, [weight], "q8_0")
    product = matmul.matmul(weight, inputs, out, control, scratch)
    fill = jit.Script([inputs.fill(x, control, bad)])
    compiled = fill.compile() + jit.Script([product]).compile()
    inner = max(1, RUN // (N * K * T))
    script = jit.Script([product] * inner)
    fill.run(threads)
    script.run(threads)
    _gate(name, base, x, out[:T, :N])
    quantize = measure.seconds(lambda: fill.run(threads), budget=0.2)
    product_s = [t / inner for t in measure.seconds(lambda: script.run(threads))]
    time = statistics.median(product_s)
    return {
        "format": name,
        "N": N,
        "K": K,
        "T": T,
        "compile_seconds": compiled,
        "compiled_from_cache": product.kernel.cached,
        "product": measure.summary(product_s),
        "quantize": measure.summary(quantize),
        "gb_per_s": weight.nbytes / time / 1e9,
        "gflop_per_s": 2 * N * K * T / time / 1e9,
        "gweights_per_s": N * K / time / 1e9,
    }


def _gate(name: str, base: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Every row of y for the first and the last token has the reference's bits."""
    some = sorted({0, len(x) - 1})
    expected = np.resize(np.arange(len(base)), y.shape[1])
    expected = reference.matmul(name, base, x[some])[:, expected]
    wrong = np.argwhere(expected.view(np.int32) != y[some].view(np.int32))
    if len(wrong):
        t, n = wrong[0]
        raise DifferenceError(
            f"product with {name}, token {some[t]}, row {n}: found {y[some[t], n]!r}; the "
            f"reference has {expected[t, n]!r}. "
            "A wrong kernel gets no number: run the tests in tests/ops."
        )


def llama(path: Path, types: list[str], tokens: list[int]) -> dict[tuple[str, int], float]:
    """Seconds per product of llama.cpp's CPU backend by type and number of tokens, 4096 x 14336.

    Args:
        path: its program test-backend-ops.
        types: its names of the weights' types.
    Raises: DeviceError if it cannot be run or says nothing about one of these.
    """
    ns, names = "|".join(map(str, tokens)), "|".join(types)
    pattern = f"type_a=({names}),type_b=f32,m=4096,n=({ns}),k=14336,bs=.1,1.,nr=.1,1."
    command = [str(path), "perf", "-b", "CPU", "-o", "MUL_MAT", "-p", pattern]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}. Name llama.cpp's test-backend-ops.") from None
    lines = LLAMA_LINE.findall(ran.stdout)
    found = {(name, int(n)): float(us) / 1e6 for name, n, us in lines}
    found = {key: found[key] for key in ((t, n) for t in types for n in tokens) if key in found}
    if ran.returncode or not {name for name, _ in found}.issuperset(types):
        raise DeviceError(
            f"{path}: exit status {ran.returncode} and times for {sorted(found)}; n = {ns} of "
            f"{names} 4096 x 14336 was asked for. A negative status is a signal: -4 means that "
            "the build uses instructions this machine does not have."
        )
    return found


def compare(
    results: list[dict[str, Any]], rounds: list[dict[tuple[str, int], float]]
) -> list[dict[str, Any]]:
    """llama.cpp's median per type and number of tokens, and the ratio of our results to it.

    The ratio is of weights per second, which at the same T is that of GFLOP/s.
    """
    out = []
    for name, T in set.intersection(*map(set, rounds)):
        runs = [r[name, T] for r in rounds]
        time = statistics.median(runs)
        weights = LLAMA["m"] * LLAMA["k"] / time / 1e9
        ours = [r for r in results if r["T"] == T and rival(r["format"]) == name]
        out.append(
            {
                "type": name,
                **LLAMA,
                "T": T,
                "runs": runs,
                "seconds": time,
                "gweights_per_s": weights,
                "gflop_per_s": 2 * T * weights,
                "ratios": {f"{r['format']} {r['N']}x{r['K']}": _whole(r) / weights for r in ours},
            }
        )
    return sorted(out, key=lambda r: (r["type"], r["T"]))


def rival(name: str) -> str:
    """The type of llama.cpp a format is held against."""
    return RIVALS.get(name, name)


def _whole(r: dict[str, Any]) -> float:
    """Weights per nanosecond with the activations' quantization, which llama.cpp's time has too."""
    return r["N"] * r["K"] / (r["product"]["median"] + r["quantize"]["median"]) / 1e9


def report(data: dict[str, Any]) -> str:
    """The numbers as text; the JSON has all of them."""
    where, read = data["machine"], data["read_gb_per_s"]
    lines = [
        f"{where['cpu']}, {where['target']}, {where['threads']} threads ({where['layer']}), "
        f"pnrt {where['pnrt']}, numba {where['numba']}; reads {read:.1f} GB/s from memory, "
        f"load {where['load']:.1f} at the start",
        f"{'format':7}{'N x K':>13}{'T':>5}{'median us':>11}{'min us':>10}{'spread':>8}"
        f"{'GB/s':>7}{'/read':>6}{'GFLOP/s':>9}{'Gw/s':>7}{'quantize us':>13}",
    ]
    for r in data["results"]:
        p = r["product"]
        lines.append(
            f"{r['format']:7}{r['N']:>6} x{r['K']:>6}{r['T']:>5}{1e6 * p['median']:>11.1f}"
            f"{1e6 * p['min']:>10.1f}{p['spread']:>8.0%}{r['gb_per_s']:>7.1f}"
            f"{r['read_ratio']:>6.2f}"
            f"{r['gflop_per_s']:>9.0f}{r['gweights_per_s']:>7.2f}"
            f"{1e6 * r['quantize']['median']:>13.1f}"
        )
    for r in data["results"]:
        how = "loaded from the cache" if r["compiled_from_cache"] else "compiled"
        lines.append(f"{r['format']} T={r['T']}: {how} in {r['compile_seconds']:.2f} s")
    for r in data.get("llama", []):
        lines.append(
            f"llama.cpp {r['type']} 4096 x 14336 T={r['T']}: {1e6 * r['seconds']:.0f} us, "
            f"{r['gweights_per_s']:.2f} Gw/s, {r['gflop_per_s']:.0f} GFLOP/s; pnrt / llama.cpp: "
            + ", ".join(f"{name} {ratio:.2f}" for name, ratio in r["ratios"].items())
        )
    return "\n".join(lines)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf.kernels", description=__doc__)
    parser.add_argument("--formats", default="pn4t,pn3t")
    parser.add_argument("--shapes", default="4096x14336,17408x5120", help="NxK,NxK")
    parser.add_argument("--tokens", default="1,512")
    parser.add_argument("--threads", type=int, help="with --llama: half the CPUs, as it takes")
    parser.add_argument("--llama", type=Path, help="llama.cpp's test-backend-ops")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(words)
    # test-backend-ops runs on half the machine's CPUs and cannot be told otherwise
    half = max(1, (os.cpu_count() or 1) // 2)
    if a.llama and a.threads not in (None, half):
        parser.error(f"test-backend-ops uses {half} threads here: leave --threads away")
    if a.threads is None:
        a.threads = half if a.llama else default_threads()[0]
    try:
        a.formats = a.formats.split(",")
        a.shapes = [tuple(int(n) for n in s.split("x")) for s in a.shapes.split(",")]
        a.tokens = [int(t) for t in a.tokens.split(",")]
    except ValueError:
        parser.error("--shapes 4096x14336,17408x5120 and --tokens 1,512 are what is understood")
    if any(len(s) != 2 or min(s) < 1 for s in a.shapes) or min(*a.tokens, a.threads, 1) < 1:
        parser.error("shapes are NxK; sizes, tokens and threads are at least 1")
    if unknown := set(a.formats) - set(FORMATS):
        parser.error(f"no format {sorted(unknown)}; there are {', '.join(FORMATS)}")
    return a


def main(words: list[str] | None = None) -> int:
    """Measure, print; exit status 0, or 2 where something cannot be measured or is wrong."""
    a = arguments(words)
    load = os.getloadavg()[0]
    try:
        types = sorted({rival(name) for name in a.formats})
        rounds = [llama(a.llama, types, a.tokens)] if a.llama else []
        read = measure.read_bandwidth(a.threads)
        results, skipped = [], []
        for name in a.formats:
            for N, K in a.shapes:
                if K % FORMATS[name].block:
                    skipped.append(f"{name} {N}x{K}: K is no multiple of {FORMATS[name].block}")
                    continue
                results += case(name, N, K, a.tokens, a.threads)
        # before and after, so that a machine that changes its mind shows
        rounds += [llama(a.llama, types, a.tokens)] if a.llama else []
    except PnrtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    data: dict[str, Any] = {
        "machine": measure.machine(a.threads, load),
        "read_gb_per_s": read / 1e9,
    }
    data |= {"results": results, "skipped": skipped}
    if rounds:
        data["llama"] = compare(results, rounds)
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    print(json.dumps(data, indent=1) if a.json else report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
