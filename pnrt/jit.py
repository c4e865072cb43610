"""How pnrt compiles: one policy for every numba kernel, a cache that cannot go stale, threads.

A kernel is a plain Python function `f(a, thread, threads)`: `a` is the address of its argument block
(int64 words: addresses, sizes, bit patterns), `thread` its number among `threads`. It is compiled
to a native function on first use and kept on disk in a directory keyed by a hash of pnrt's
kernel sources, numba's and LLVM's versions and the CPU, because numba's own cache does not notice
edits in imported functions. A cache file carries its own digest: a truncated one is recompiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger("pnrt")

ROOT = Path(__file__).resolve().parent
# the rooms that hold compiled code; an edit anywhere in them makes a new cache directory
SOURCES = ("jit.py", "scalars.py", "cpu/*.py", "formats/*.py")
DIGEST_BYTES = 32


def user_cache() -> Path:
    """The directory pnrt keeps downloads and compiled kernels in (PNRT_CACHE overrides it)."""
    if "PNRT_CACHE" in os.environ:
        return Path(os.environ["PNRT_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pnrt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pnrt"


@functools.cache
def cpu_target() -> tuple[str, str]:
    """The CPU name and feature string LLVM compiles for (NUMBA_CPU_NAME/_FEATURES force another)."""
    from llvmlite import binding
    from numba.core import config

    if config.CPU_NAME:
        return config.CPU_NAME, config.CPU_FEATURES or ""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


@functools.cache
def cpu_features() -> frozenset[str]:
    """Names of the instruction sets kernels may use, e.g. {'avx2', 'avx512vnni', 'f16c'}."""
    flags = cpu_target()[1].split(",")
    return frozenset(flag[1:] for flag in flags if flag.startswith("+"))


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
    """Where compiled kernels are kept; None (with one line of warning) where nothing is writable."""
    path = user_cache() / "kernels" / source_hash()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        log.warning(
            "kernel cache %s is not writable (%s): kernels are compiled anew in every process; "
            "set PNRT_CACHE to a writable directory",
            path,
            error.strerror,
        )
        return None
    return path


class KernelCache:
    """What numba asks of a cache, one checked file per kernel, keyed by the kernel's name."""

    def __init__(self, name: str):
        directory = cache_directory()
        self.path = directory and directory / f"{name}.kernel"
        self.hit = False

    def load_overload(self, sig, target_context):
        from numba.core.compiler import CompileResult

        if self.path is None or not self.path.exists():
            return None
        data = self.path.read_bytes()
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
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, self.path)
        except OSError as error:
            log.warning("kernel cache file %s cannot be written: %s", self.path, error.strerror)

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


def default_threads() -> tuple[int, str]:
    """How many threads to use and why: the affinity mask or the container's quota, not cpu_count."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    reason = f"{allowed} CPUs in the affinity mask"
    quota = cgroup_quota()
    if quota is not None and quota < allowed:
        allowed, reason = max(1, int(quota)), f"container quota of {quota:g} CPUs"
    return allowed or 1, reason


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs this container may use by cgroup v2 or v1, None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period = int((root / "cpu/cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    return None
