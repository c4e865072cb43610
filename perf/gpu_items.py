"""What perf.gpu_check does on a GPU, item by item; serve() does it in a process of its own."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pnrt
import pnrt.generate
from pnrt import reference
from pnrt.bench import bench, versions
from pnrt.cuda import build, launch, matmul, pack, paper
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.control import index
from pnrt.cuda.kernel import Call, Kernel, kernel, registers, unroll
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
from pnrt.debug.selftest import OPS, selftest
from pnrt.errors import DeviceError
from pnrt.formats import FORMATS
from pnrt.models.config import read_config
from pnrt.models.presets import blueprint
from pnrt.models.rotation import read_rotation
from pnrt.program import FORMAT_OPS
from pnrt.reading import WeightReader
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
    formats: tuple[str, ...] = tuple(pack.CODECS)
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


class Item(NamedTuple):
    """A line or a few of the table: part names the method of Check, args are its arguments.

    seconds: what it may take; the first of a part on its way shows the others better.
    """

    part: str
    args: tuple
    seconds: float

    @property
    def what(self) -> str:
        return " ".join(map(str, self.args))


def items(plan: Plan) -> list[Item]:
    """Everything, in order."""
    # a kernel of a product takes a processor 1 to 2 s; those in the cache take nothing
    compiling = 10 + 1.5 * len(wanted(plan)) / (os.cpu_count() or 1)
    return [
        Item("compile", (), compiling),
        *(Item("op", (op,), 10) for op in plan.ops),
        *(Item("product", (name,), 10) for name in plan.formats),
        *(Item("model", (name,), 30) for name in plan.models),
        Item("memory", (), 15),
        *(Item("speed", shape, 25) for shape in plan.shapes),
        Item("synthetic", (plan.preset,), 100),
    ]


def width(name: str) -> int:
    """Columns of the matrix a format's products are judged with."""
    return 1024 // FORMATS[name].block * FORMATS[name].block


class OfPreset(NamedTuple):
    """A kernel that a preset's model launches for T tokens, by its name."""

    preset: str
    layers: int | None
    T: int
    kernel: str


# a number in build.kernels(); a product by format, columns, activations and tokens
Key = int | tuple[str, int, str, int] | OfPreset


def wanted(plan: Plan) -> list[Key]:
    """Kernels that will be needed."""
    found: list[Key] = [(name, width(name), mode, T) for name in plan.formats
                        for mode in ("q8_0", "f32") for T in (1, 5)]  # fmt: skip
    found += [(name, K, "q8_0", T) for name, _, K in plan.shapes for T in (1, plan.prompt)]
    for T in (1, plan.prompt):
        names = _of_preset(plan.preset, plan.layers, T)
        found += [OfPreset(plan.preset, plan.layers, T, name) for name in names]
    known = {k.name for k in build.kernels()}
    kept = {_kernel(key).name: key for key in found}
    return [*range(len(known)), *(key for name, key in kept.items() if name not in known)]


@functools.cache
def _of_preset(preset: str, layers: int | None, T: int) -> dict[str, Kernel]:
    file = blueprint(preset, layers)
    rotation = read_rotation(file)
    program = pnrt.generate.build_program(read_config(file), file.tensors, rotation)
    calls = paper.launches(program, WeightReader(file, rotation).shape, T)
    return {call.kernel.name: call.kernel for call in calls}


def _kernel(key: Key) -> Kernel:
    if isinstance(key, int):
        return build.kernels()[key]
    if isinstance(key, OfPreset):
        return _of_preset(key.preset, key.layers, key.T)[key.kernel]
    name, K, mode, T = key
    view = matmul.view_of(name, K, mode, T)
    return matmul.multiply(pack.layout(name, 1, K), 0, view, 0, 0, 1, T).kernel


def _compile(key: Key, capability: tuple[int, int]) -> str:
    which = _kernel(key)
    try:
        build.cached(which, capability)
    # whatever the compilers raise, the other kernels go on
    except Exception as error:
        return f"{which.name}: {type(error).__name__}: {error}"
    return ""


class Check:
    """The items on one device.

    tell: takes rows of the table: part, what, ok (None for a mere figure), figure, numbers.
    copied: bytes per second that the device copies, where that is known already.
    folder: for the synthetic model.
    """

    def __init__(self, device: Any, plan: Plan, tell: Callable, folder: Path, copied: float = 0.0):
        self.device, self.plan, self.tell = device, plan, tell
        self.folder, self.copied = folder, copied

    def add(self, part: str, what: str, ok: bool | None, figure: str, **numbers: Any) -> None:
        self.tell({"part": part, "what": what, "ok": ok, "figure": figure, **numbers})

    def run(self, item: Item) -> None:
        """Do an item and tell its rows."""
        getattr(self, item.part)(*item.args)

    def compile(self) -> None:
        """Compile every kernel on all CPUs, into the cache on disk."""
        facts = getattr(self.device, "facts", None)
        if facts is None:
            return
        start, keys = time.perf_counter(), wanted(self.plan)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
            failed = list(filter(None, pool.map(_compile, keys, [facts.capability] * len(keys))))
        taken = time.perf_counter() - start
        figure = "; ".join([f"{taken:.1f} s", *failed])
        self.add(
            "compile", f"{len(keys)} kernels", False if failed else None, figure, seconds=taken
        )

    def op(self, op: str) -> None:
        """The self-test's hard inputs for an op that is no product."""
        report = selftest(CudaBackend(self.device), ops=[op])
        first = report.failures[0].case if report.failures else ""
        count = sum(report.executed.values())
        self.add("op", op, count > 0 and not report.failures, f"{count} cases {first}")

    def product(self, name: str) -> None:
        """One token and five, both kinds of activations, at the width that was compiled."""
        engine, K = CudaBackend(self.device), width(name)
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

    def model(self, name: str) -> None:
        """A tiny model: the CPU's logits, prompt and single tokens."""
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

    def speed(self, name: str, N: int, K: int) -> None:
        """A product of the 27B model's shapes, judged, then timed."""
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
        rate = weight.nbytes / seconds
        share = rate / self.copied if self.copied else None
        figure = f"{1e6 * seconds:.1f} us, {1e-9 * rate:.1f} GB/s"
        if share:
            figure += f", {100 * share:.0f} % of the copy"
        if T > 1:
            figure = f"{1e6 * seconds:.1f} us, {2e-9 * T * N * K / seconds:.0f} GFLOP/s"
        self.add(
            "speed", f"{name} {N} x {K}, T = {T}", ok, figure, seconds=seconds, gb_s=1e-9 * rate,
            share=share,
        )  # fmt: skip

    def synthetic(self, preset: str) -> None:
        """A synthetic model: prompt and generation, with a graph and without."""
        plan, path = self.plan, self.folder / "synthetic.gguf"
        synthesize(blueprint(preset, plan.layers), path)
        context = max(plan.prompt, plan.generate) + 16
        with pnrt.load(path, backend=CudaBackend(self.device), context=context) as model:
            nbytes = sum(model.session.weights[name].nbytes for name in model.program.matrices())
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
        path.unlink()


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


def serve(link: Any, plan: Plan, folder: Path, copied: float) -> None:
    """Do the items that come over a connection, until one fails: a GPU may be beyond use then.

    Sends (kind, value): "facts" or "none" (why there is no GPU), "row"s, "done" or "failed".
    """
    # a group of its own: it ends with its compilers, and Ctrl-C is the other process's
    os.setsid()
    try:
        device = launch.open_device()
    except DeviceError as error:
        link.send(("none", str(error)))
        return
    link.send(("facts", facts(device)))
    answer(link, Check(device, plan, lambda row: link.send(("row", row)), folder, copied))


def answer(link: Any, check: Check) -> None:
    """The loop of serve."""
    for item in _received(link):
        try:
            check.run(item)
        # whatever it is belongs into the table
        except Exception as error:
            link.send(("failed", f"{type(error).__name__}: {error}"))
            return
        link.send(("done", ""))


def _received(link: Any) -> Iterator[Item]:
    try:
        while True:
            yield link.recv()
    except EOFError:
        return
