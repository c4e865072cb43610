"""Everything that can be said of the CUDA backend on a GPU: python -m perf.gpu_check --help

Facts of the device; every kernel against the reference, bit for bit; tiny models against the CPU's
logits; then speeds: memory, products of the 27B model's shapes, a synthetic model with and without
a graph. Under eight minutes; what the time did not reach is said. A difference is exit status 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pnrt
from pnrt import reference
from pnrt.bench import bench, versions
from pnrt.cuda import build, launch, matmul
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.control import index
from pnrt.cuda.kernel import Call, kernel, registers, unroll
from pnrt.cuda.lanes import (
    at,
    blocks,
    fetch_u32x4,
    store_u32,
    store_u32x4,
    threads,
    u32,
    u64,
)
from pnrt.cuda.pack import CODECS
from pnrt.debug.selftest import OPS, selftest
from pnrt.errors import DeviceError, PnrtError
from pnrt.formats import FORMATS
from pnrt.models.presets import blueprint
from pnrt.program import FORMAT_OPS
from pnrt.synth import synthesize

MODELS = Path(__file__).resolve().parents[1] / "tests" / "golden" / "models"
TOKENS = [1, 5, 9, 33, 7, 2, 11, 3]
# rows that are quantized and judged; a timed matrix repeats them
ROWS = 64


class Plan(NamedTuple):
    """What is checked.

    ops: names of the self-test's; formats: whose products are judged; models: files of
    tests/golden/models; nbytes: of the memory that is read and copied; shapes: (format, N, K);
    prompt: tokens of a timed product and of the synthetic model's prompt; repeats: of its runs;
    seconds: for everything.
    """

    ops: tuple[str, ...] = tuple(op for op in OPS if op not in FORMAT_OPS)
    formats: tuple[str, ...] = tuple(CODECS)
    models: tuple[str, ...] = ("llama_m.pn", "qwen35_m.pnrots")
    nbytes: int = 1 << 30
    shapes: tuple[tuple[str, int, int], ...] = (
        ("pn3t", 34816, 5120), ("pn4t", 5120, 17408), ("q4_K", 34816, 5120),
        ("q3_K", 34816, 5120), ("q8_0", 17408, 5120),
    )  # fmt: skip
    preset: str = "qwen3.8-27b-pn3"
    layers: int | None = 4
    prompt: int = 512
    generate: int = 64
    repeats: int = 2
    seconds: float = 450


class Check:
    """Rows of the table as they come: part, what, ok (None for a mere figure), figure."""

    def __init__(self, device: Any, plan: Plan, tell: Callable[[str], None]):
        self.device, self.plan, self.tell = device, plan, tell
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def add(self, part: str, what: str, ok: bool | None, figure: str, **numbers: Any) -> None:
        self.rows.append({"part": part, "what": what, "ok": ok, "figure": figure, **numbers})
        mark = {True: "ok", False: "WRONG", None: ""}[ok]
        self.tell(f"{part:<10} {what:<34} {mark:<6} {figure}")

    def late(self, part: str, what: str) -> bool:
        """Whether there is no time left; says what was left out."""
        if time.perf_counter() - self.began < self.plan.seconds:
            return False
        self.add(part, what, None, "not reached in the time", reached=False)
        return True

    @property
    def wrong(self) -> int:
        return sum(row["ok"] is False for row in self.rows)

    def all(self) -> None:
        """Run every part."""
        self.compile()
        for part in (self.ops, self.products, self.models, self.memory, self.speeds, self.model):
            if not self.late(part.__name__, "all of it"):
                part()

    def compile(self) -> None:
        """Compile every kernel on all CPUs, into the cache on disk."""
        facts = getattr(self.device, "facts", None)
        if facts is None:
            return
        start, count = time.perf_counter(), len(build.kernels())
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
            list(pool.map(_compile, range(count), [facts.capability] * count))
        taken = time.perf_counter() - start
        self.add("compile", f"{count} kernels", None, f"{taken:.1f} s", seconds=taken)

    def ops(self) -> None:
        """The self-test's hard inputs for every op that is no product."""
        for op in self.plan.ops:
            if self.late("op", op):
                continue
            report = selftest(CudaBackend(self.device), ops=[op])
            first = report.failures[0].case if report.failures else ""
            count = sum(report.executed.values())
            self.add("op", op, count > 0 and not report.failures, f"{count} cases {first}")

    def products(self) -> None:
        """One token and five, both kinds of activations, at the width that was compiled."""
        engine = CudaBackend(self.device)
        for name in self.plan.formats:
            if self.late("product", name):
                continue
            K = 1024 // FORMATS[name].block * FORMATS[name].block
            rng = np.random.default_rng(K)
            rows = FORMATS[name].quantize(rng.standard_normal((37, K)).astype(np.float32) * 0.02)
            x = rng.standard_normal((5, K)).astype(np.float32)
            weight, wrong = engine.pack(name, rows, K), []
            for mode in ("q8_0", "f32"):
                expected = reference.matmul(name, rows, x, mode)
                for T in (1, 5):
                    if not _same(expected[:T], engine.matmul(weight, x[:T], mode)):
                        wrong.append(f"{mode} T={T}")
            self.add("product", name, not wrong, f"37 x {K} {' '.join(wrong)}")
        engine.close()

    def models(self) -> None:
        """Tiny models: the CPU's logits, prompt and single tokens."""
        for name in self.plan.models:
            if self.late("model", name):
                continue
            rotation = "none" if name.endswith(".pn") else None
            found = []
            for engine in ("cpu", CudaBackend(self.device)):
                path = MODELS / f"{name}.gguf"
                with pnrt.load(path, backend=engine, rotation=rotation, context=64) as model:
                    prompt = model.eval(TOKENS[:-2], all=True)
                    found.append(np.vstack([prompt, *(model.eval([t]) for t in TOKENS[-2:])]))
            self.add("model", name, _same(*found), f"logits of {len(TOKENS)} tokens")

    def memory(self) -> None:
        """Bytes per second that are read, and that are copied (read and written)."""
        device, n = self.device, self.plan.nbytes // 16
        grid = (device.processors * 8, 1)
        device.reserve(2 * self.plan.nbytes + (1 << 20))
        x, y = device.allocate(16 * n), device.allocate(16 * n)
        sums = device.allocate(grid[0] * read_kernel.threads * 4)
        read = self.clock([Call(read_kernel, grid, (x, n, sums))])
        copy = self.clock([Call(copy_kernel, grid, (x, n, y))])
        device.close()
        self.copied = 32 * n / copy
        self.add("memory", "read", None, f"{16e-9 * n / read:.1f} GB/s", gb_s=16e-9 * n / read)
        self.add("memory", "copy", None, f"{1e-9 * self.copied:.1f} GB/s", gb_s=1e-9 * self.copied)

    def clock(self, calls: list[Call], least: float = 0.2) -> float:
        """Seconds of launches: the best of five runs, each repeated until it lasts `least` / 5."""
        device, inner = self.device, 1
        while True:
            sequence, taken = device.sequence(calls * inner), []
            sequence.run()
            device.synchronize()
            for _ in range(5):
                start = time.perf_counter()
                sequence.run()
                device.synchronize()
                taken.append(time.perf_counter() - start)
            if sum(taken) >= least or inner >= 4096:
                return min(taken) / inner
            inner *= 4

    def speeds(self) -> None:
        """Products of the 27B model's shapes, judged, then timed."""
        for name, N, K in self.plan.shapes:
            if self.late("speed", f"{name} {N} x {K}"):
                continue
            engine, rng = CudaBackend(self.device), np.random.default_rng(0)
            base = FORMATS[name].quantize(rng.standard_normal((min(N, ROWS), K)).astype("f4"))
            weight = engine.pack(name, np.resize(base, (N, base.shape[1])), K)
            for T in (1, self.plan.prompt):
                self._speed(weight, base, T, rng.standard_normal((T, K)).astype(np.float32))
            engine.close()

    def _speed(self, weight: Any, base: np.ndarray, T: int, x: np.ndarray) -> None:
        device, (name, N, K) = self.device, (weight.format, weight.N, weight.K)
        view, mark = matmul.view_of(name, K, "q8_0", T), device.mark()
        source, bad = device.upload(x), device.upload(np.zeros(1, np.uint32))
        prepared = device.allocate(matmul.view_bytes(view, K, T))
        out = device.allocate(T * N * 4)
        device.run([matmul.convert(view, source, K, K, T, prepared, bad)])
        product = matmul.multiply(
            weight.layout, weight.address, view, prepared, out, N, T, device.processors * 4
        )
        seconds = self.clock([product])
        found, device_rows = device.read(out, (T, N)), len(base)
        device.release(mark)
        ok = _same(reference.matmul(name, base, x[-1:]), found[-1:, :device_rows])
        rate, share = weight.nbytes / seconds, weight.nbytes / seconds / self.copied
        figure = f"{1e6 * seconds:.1f} us, {1e-9 * rate:.1f} GB/s, {100 * share:.0f} % of the copy"
        if T > 1:
            figure = f"{1e6 * seconds:.1f} us, {2e-9 * T * N * K / seconds:.0f} GFLOP/s"
        self.add(
            "speed", f"{name} {N} x {K}, T = {T}", ok, figure, seconds=seconds, gb_s=1e-9 * rate,
            share=share,
        )  # fmt: skip

    def model(self) -> None:
        """A synthetic model: prompt and generation, with a graph and without."""
        plan = self.plan
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "synthetic.gguf"
            synthesize(blueprint(plan.preset, plan.layers), path)
            context = max(plan.prompt, plan.generate) + 16
            with pnrt.load(path, backend=CudaBackend(self.device), context=context) as model:
                weights = (model.session.weights[name] for name in model.program.matrices())
                nbytes = sum(w.nbytes for w in weights)
                for graph in (True, False):
                    model.session.use_graph(graph)
                    runs = bench(model, plan.prompt if graph else 0, plan.generate, plan.repeats)
                    for run in runs["runs"]:
                        rate = run["median"]
                        figure = f"{rate:.2f} tokens/s, {runs['launches']} launches a token"
                        if run["name"].startswith("tg"):
                            figure += f", {1e-9 * rate * nbytes:.1f} GB/s of weights"
                        what = f"{run['name']}, graph {'on' if graph else 'off'}"
                        self.add("synthetic", what, None, figure, tokens_s=rate, nbytes=nbytes)


@kernel(name="check_read", threads=256)
def read_kernel(x: u64, n: u32, sums: u64):
    """Read n times 16 bytes, four loads of a thread under way together."""
    total, step = u32(0), blocks() * threads()
    w = registers()
    for i in range(index(), n, 4 * step):
        for j in unroll(4):
            w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3] = fetch_u32x4(
                at(x, min(i + j * step, n - 1), 16)
            )
        for j in unroll(16):
            total = total ^ w[j]
    store_u32(at(sums, index(), 4), total)


@kernel(name="check_copy", threads=256)
def copy_kernel(x: u64, n: u32, y: u64):
    """Copy n times 16 bytes."""
    for i in range(index(), n, blocks() * threads()):
        a, b, c, d = fetch_u32x4(at(x, i, 16))
        store_u32x4(at(y, i, 16), a, b, c, d)


def _compile(number: int, capability: tuple[int, int]) -> None:
    build.cached(build.kernels()[number], capability)


def _same(expected: np.ndarray, got: np.ndarray) -> bool:
    a, b = (np.ascontiguousarray(v, np.float32).view(np.uint32) for v in (expected, got))
    return a.shape == b.shape and bool((a == b).all())


def facts(device: Any) -> dict[str, Any]:
    """What the figures belong to."""
    known = getattr(device, "facts", None)
    found = {"name": device.name, "processors": device.processors}
    if known:
        found |= known._asdict()
    names = ("numba", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvjitlink-cu12")
    return {**found, "versions": versions(names)}


def main(argv: list[str] | None = None) -> int:
    """Check this machine's GPU; 0 if all is equal, 1 if something differs, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="perf.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the table there")
    parser.add_argument("--layers", type=int, default=Plan().layers, help="of the synthetic model")
    parser.add_argument("--seconds", type=float, default=Plan().seconds, help="for everything")
    a = parser.parse_args(argv)
    try:
        device = launch.open_device()
    except DeviceError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return 2
    about = facts(device)
    print(json.dumps(about))
    check = Check(device, Plan(layers=a.layers, seconds=a.seconds), print)
    failed = ""
    try:
        check.all()
    except PnrtError as error:
        failed = f"{type(error).__name__}: {error}"
        print(failed, file=sys.stderr)
    finally:
        taken = time.perf_counter() - check.began
        if a.json:
            data = {"device": about, "seconds": taken, "failed": failed, "rows": check.rows}
            a.json.write_text(json.dumps(data, indent=1) + "\n")
    judged = sum(row["ok"] is not None for row in check.rows)
    print(f"{judged} comparisons, {check.wrong} wrong, {taken:.0f} s")
    return 1 if check.wrong or failed or not judged else 0


if __name__ == "__main__":
    sys.exit(main())
