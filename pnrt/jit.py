"""How pnrt compiles: one policy for every numba kernel, a cache that cannot go stale, threads.

A kernel is a plain Python function `f(a, thread, threads)`: `a` is the address of its argument
block (int64 words: addresses, sizes, bit patterns), `thread` its number among `threads`. It is
compiled to a native function on first use and kept on disk in a directory keyed by a hash of pnrt's
kernel sources, numba's and LLVM's versions and the CPU, because numba's own cache does not notice
edits in imported functions. A cache file carries its own digest: a truncated one is recompiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pnrt.errors import DeviceError
from pnrt.machine import cpu_target, user_cache

log = logging.getLogger("pnrt")

ROOT = Path(__file__).resolve().parent
# the rooms that hold compiled code; an edit anywhere in them makes a new cache directory
SOURCES = (
    "jit.py", "native.py", "emit.py", "simd.py", "rows.py", "scalars.py",
    "cpu/*.py", "cuda/pack*.py", "formats/*.py",
)  # fmt: skip
DIGEST_BYTES = 32
# turns of some 0.6 ns a thread waits at a barrier awake: a core that others want is given away, and
# waking up takes longer than most waits. No pause instruction: many of them in a row trap into the
# hypervisor of a virtual machine, which halved the speed of a token
SPINS = 32768
# the half of a barrier's counter in which threads count themselves
ARRIVED = (1 << 32) - 1


@functools.cache
def source_hash() -> str:
    """Hash of everything that decides what a compiled kernel does."""
    import llvmlite
    import numba

    digest = hashlib.sha256()
    facts = (numba.__version__, llvmlite.__version__, sys.version, platform.machine())
    digest.update(repr((*facts, *cpu_target())).encode())
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def cache_directory() -> Path | None:
    """Where compiled kernels are kept; None, with one line of warning, where not writable."""
    path = user_cache() / "kernels" / source_hash()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        _not_kept(path, error.strerror)
        return None
    return path


@functools.cache
def _not_kept(path: Path, reason: str) -> None:
    """Say once that kernels cannot be kept."""
    log.warning(
        "kernel cache %s is not writable (%s): kernels are compiled anew in every process; "
        "set PNRT_CACHE to a writable directory",
        path,
        reason,
    )


class KernelCache:
    """What numba asks of a cache, one checked file per kernel, keyed by the kernel's name."""

    def __init__(self, name: str):
        directory = cache_directory()
        self.path = directory and directory / f"{name}.kernel"
        self.hit = False

    def load_overload(self, sig, target_context):
        from numba.core.compiler import CompileResult

        if self.path is None:
            return None
        try:
            data = self.path.read_bytes()
        except OSError:
            # not there yet, or another process has just deleted it
            return None
        digest, payload = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            log.warning("kernel cache file %s is damaged: deleted and compiled anew", self.path)
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            return None
        target_context.refresh()
        self.hit = True
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig, result):
        from numba.core.serialize import dumps

        if self.path is None:
            return
        payload = dumps(result._reduce())
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            _not_kept(self.path.parent, error.strerror)

    def enable(self):
        """Asked for by numba; this cache is always on."""

    def flush(self):
        """Asked for by numba; an entry is replaced as a whole."""


class Kernel:
    """One native function, compiled or loaded when its address is first asked for."""

    def __init__(self, function: Callable, name: str):
        self.function, self.name = function, name
        self.seconds = 0.0
        self.cached = False
        self._compiled = None

    @property
    def ready(self) -> bool:
        return self._compiled is not None

    @property
    def address(self) -> int:
        """Address of `void kernel(int64 arguments, int64 thread, int64 threads)`."""
        if self._compiled is None:
            with _compiling:
                if self._compiled is None:
                    self._compile()
        return self._compiled.address

    def _compile(self) -> None:
        from numba import types
        from numba.core.ccallback import CFunc

        start = time.perf_counter()
        signature = ((types.int64, types.int64, types.int64), types.void)
        compiled = CFunc(self.function, signature, {}, {"nopython": True, "error_model": "numpy"})
        compiled._cache = KernelCache(self.name)
        compiled.compile()
        self._compiled, self.cached = compiled, compiled._cache.hit
        self.seconds = time.perf_counter() - start
        log.debug(
            "%s %s in %.2f s", self.name, "loaded" if self.cached else "compiled", self.seconds
        )


def kernel(function: Callable | None = None, *, name: str | None = None):
    """Declare a kernel `f(a, thread, threads)`; nothing is compiled until it is used."""
    if function is None:
        return functools.partial(kernel, name=name)
    return Kernel(
        function, name or f"{function.__module__.removeprefix('pnrt.')}.{function.__name__}"
    )


def inline(function: Callable):
    """Compile a function that kernels call; LLVM folds it into each of them."""
    from numba import njit

    return njit(forceinline=True, error_model="numpy")(function)


def compile_all(
    kernels: Iterable[Kernel], progress: Callable[[int, int, str, float], None] | None = None
) -> float:
    """Compile or load kernels; `progress(done, total, name, seconds)` is told of each. Seconds."""
    waiting = list({k.name: k for k in kernels if not k.ready}.values())
    start = time.perf_counter()
    for done, each in enumerate(waiting):
        if progress:
            progress(done, len(waiting), each.name, time.perf_counter() - start)
        each.address  # noqa: B018  (compiles)
    seconds = time.perf_counter() - start
    if progress and waiting:
        progress(len(waiting), len(waiting), "", seconds)
    return seconds


_lock = threading.Lock()
_compiling = threading.RLock()
_started: dict[str, object] = {}


def _build_region():
    """The one parallel function: threads walk the list of calls and meet at an atomic barrier."""
    from numba import njit, prange

    from pnrt.native import call, fetch_add, read_now, sleep, wake

    @njit(parallel=True, nogil=True, error_model="numpy")
    def region(calls, threads, counter):
        for thread in prange(threads):
            goal = 0
            for i in range(calls.shape[0]):
                call(calls[i, 0], calls[i, 1], thread, threads)
                if calls[i, 2] != 0:
                    goal += threads
                    before = fetch_add(counter)
                    seen = (before & ARRIVED) + 1
                    if before > ARRIVED and seen == goal:
                        wake(counter)
                    spins = 0
                    while seen < goal:
                        if spins < SPINS:
                            spins += 1
                        else:
                            sleep(counter, seen)
                        seen = read_now(counter) & ARRIVED

    region._cache = KernelCache("region")
    return region


def _start(threads: int):
    """Load the threading layer once (omp before workqueue) and compile the region."""
    import numba
    from numba.np.ufunc import parallel

    if "region" not in _started:
        if not parallel._is_initialized:
            numba.config.NUMBA_NUM_THREADS = max(numba.config.NUMBA_NUM_THREADS, threads)
            # numba launches as many as it read when it was imported
            parallel.NUM_THREADS = numba.config.NUMBA_NUM_THREADS
            if numba.config.THREADING_LAYER == "default":
                numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
        region = _build_region()
        parallel._launch_threads()
        region.compile("void(int64[:,::1], int64, int64)")
        _started.update(region=region, pid=os.getpid())
    if _started["pid"] != os.getpid():
        raise DeviceError(
            "this process was forked after pnrt had started its compute threads; they do not "
            "survive a fork. Use multiprocessing's spawn method, or load the model in the child."
        )
    # OpenMP makes threads when a region asks for them; the other layers made theirs at the start
    later = 64 if numba.threading_layer() == "omp" else 0
    if threads > max(numba.config.NUMBA_NUM_THREADS, later):
        raise DeviceError(
            f"threads: {threads} asked for; numba was started with "
            f"{numba.config.NUMBA_NUM_THREADS}. Set NUMBA_NUM_THREADS={threads} in the environment."
        )
    return _started["region"]


def threading_layer() -> str:
    """Name of numba's threading layer ('omp', 'workqueue'), starting it if need be."""
    import numba

    _start(1)
    return numba.threading_layer()


class Call(NamedTuple):
    """One kernel with its argument block.

    arguments: int64 words; keep: the arrays behind the addresses in it; barrier: whether the next
    call must wait until every thread has finished this one.
    """

    kernel: Kernel
    arguments: np.ndarray
    keep: tuple = ()
    barrier: bool = True
    # kernels that this one calls: where in the arguments their addresses go
    calls: tuple[tuple[int, Kernel], ...] = ()


def address(array: np.ndarray) -> int:
    """Address of a C-contiguous array's first byte."""
    if not array.flags.c_contiguous:
        raise ValueError("kernels take C-contiguous arrays")
    return array.ctypes.data


def words(*values) -> np.ndarray:
    """An argument block: arrays by address, floats by their float32 bits, integers as they are."""
    return np.array([_word(v) for v in values], np.int64)


def _word(value) -> int:
    if isinstance(value, np.ndarray):
        return address(value)
    if isinstance(value, float | np.floating):
        return int(np.float32(value).view(np.int32))
    return int(value)


class Script:
    """A list of calls bound to memory, run inside one parallel region."""

    def __init__(self, calls: Iterable[Call]):
        self.calls = list(calls)
        self._table: np.ndarray | None = None
        self._counter = np.zeros(8, np.int64)

    def compile(self, progress: Callable[[int, int, str, float], None] | None = None) -> float:
        """Compile what is not compiled yet; seconds it took."""
        used = [k for call in self.calls for k in (call.kernel, *(k for _, k in call.calls))]
        seconds = compile_all(used, progress)
        for call in self.calls:
            for index, kernel in call.calls:
                call.arguments[index] = kernel.address
        rows = [(c.kernel.address, address(c.arguments), c.barrier) for c in self.calls]
        self._table = np.array(rows, np.int64).reshape(-1, 3)
        return seconds

    def run(self, threads: int, start: int = 0, stop: int | None = None) -> None:
        """Run calls[start:stop] on `threads` threads; returns when all of them are done."""
        import numba
        from numba.np.ufunc import parallel

        if self._table is None:
            self.compile()
        with _lock:
            region = _start(threads)
            before = numba.get_num_threads()
            # not numba.set_num_threads: it knows only the limit of the time numba was imported
            parallel._set_num_threads(threads)
            try:
                if threads > 1 and numba.threading_layer() == "tbb":
                    raise DeviceError(
                        "numba's tbb threading layer may run two shares on one thread, where "
                        "pnrt's barrier would wait for ever: set NUMBA_THREADING_LAYER=omp or "
                        "workqueue"
                    )
                self._counter[0] = 0
                region(self._table[start:stop], threads, address(self._counter))
            finally:
                parallel._set_num_threads(before)


def run(kernel: Kernel, *values, threads: int) -> None:
    """Run one kernel on its arguments and wait for it."""
    if threads == 1:
        call(kernel, *values)
        return
    Script([Call(kernel, words(*values), values)]).run(threads)


def call(kernel: Kernel, *values) -> None:
    """Run one kernel on the calling thread alone; several threads may do so at once."""
    arguments = words(*values)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    # ctypes gives the interpreter away for the time of the call
    function(address(arguments), 0, 1)
