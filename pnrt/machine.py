"""What this machine is and gives the process: instruction sets, threads, a place for files."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
from pathlib import Path


def user_cache() -> Path:
    """The directory pnrt keeps downloads and compiled kernels in (PNRT_CACHE overrides it)."""
    if chosen := os.environ.get("PNRT_CACHE"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "pnrt"
    try:
        home = Path.home()
    except RuntimeError:
        # a user without a home, as in some containers: nothing can be kept
        home = Path("/nonexistent")
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pnrt"


def cpu_model() -> str:
    """The processor's name as the system states it."""
    # no /proc outside Linux
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def cpu_target() -> tuple[str, str]:
    """CPU name and features LLVM compiles for; NUMBA_CPU_NAME and _FEATURES force another."""
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
def amx_allowed() -> bool:
    """Whether Linux lets this process use AMX tiles; asking for it grants it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def default_threads() -> tuple[int, str]:
    """How many threads to use and why: affinity mask or container quota, not cpu_count."""
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
