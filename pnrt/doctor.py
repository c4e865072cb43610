"""What this machine offers, what pnrt makes of it, and the exact fix for what is missing."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from pnrt import __version__, jit
from pnrt.errors import PnrtError
from pnrt.machine import cpu_features, cpu_model, cpu_target, default_threads, user_cache

# instruction sets a kernel can gain from, with what to expect without them
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "avxvnni")


def doctor(kernels: bool = False) -> dict[str, Any]:
    """Look at the machine; nothing is changed.

    Args:
        kernels: also list every op and format with the kernel of each backend.
    Returns:
        a dict ready for JSON: pnrt, python, cpu, threads, cache, dependencies, optional, kernels
        (where asked for) and problems: a list of {"problem", "fix"}, empty on a sound machine.
    """
    problems: list[dict[str, str]] = []
    report: dict[str, Any] = {
        "pnrt": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "dependencies": _dependencies(problems),
    }
    if any(d["installed"] is None for d in report["dependencies"]):
        # numba or llvmlite may be what is missing, and the rest of the report asks them
        return {**report, "problems": problems}
    report["cpu"] = _cpu(problems)
    report["threads"] = _threads(problems)
    report["cache"] = _cache(problems)
    report["cuda"] = _cuda()
    if kernels:
        report["kernels"] = _kernels(problems)
    report["problems"] = problems
    return report


def _dependencies(problems: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Each requirement of the package with the version that is installed."""
    try:
        required = metadata.requires("pnrt") or []
    except metadata.PackageNotFoundError:
        required = ["numba", "numpy", "gguf", "rich", "tokenizers", "jinja2", "typer"]
    out = []
    for line in required:
        if "extra ==" in line:
            continue
        name = re.match(r"[A-Za-z0-9._-]+", line).group()
        installed = _version(name)
        wanted = line[len(name) :].split(";")[0].strip()
        out.append({"name": name, "wanted": wanted, "installed": installed})
        fix = f"{sys.executable} -m pip install '{name}{wanted}'"
        if installed is None:
            problems.append({"problem": f"the package {name} is not installed", "fix": fix})
        elif not _at_least(installed, wanted):
            problems.append({"problem": f"{name} {installed} is older than {wanted}", "fix": fix})
    return out


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _at_least(installed: str, wanted: str) -> bool:
    """Whether a version fulfils `>=x.y`; other requirements are left to pip."""
    least = re.search(r">=\s*([0-9.]+)", wanted)
    if not least:
        return True
    numbers = [int(n) for n in re.findall(r"\d+", installed)]
    return numbers >= [int(n) for n in least.group(1).split(".") if n]


def _cpu(problems: list[dict[str, str]]) -> dict[str, Any]:
    from pnrt.cpu.dots import dot_tier

    features = cpu_features()
    tier = _tier(features)
    if tier == "plain":
        forced = os.environ.get("NUMBA_CPU_NAME")
        problems.append(
            {
                "problem": "no AVX2: kernels run in plain form, correct but several times slower",
                "fix": f"unset NUMBA_CPU_NAME (it is {forced})"
                if forced
                else "nothing to install; a CPU with AVX2 or AVX-512 VNNI is faster",
            }
        )
    return {
        "model": cpu_model(),
        "target": cpu_target()[0],
        "tier": tier,
        "products": dot_tier(),
        "features": {name: name in features for name in FEATURES},
    }


def _tier(features: frozenset[str]) -> str:
    """The kernels' tier."""
    if "avx512vnni" in features:
        return "avx512"
    return "avx2" if "avx2" in features else "plain"


def _threads(problems: list[dict[str, str]]) -> dict[str, Any]:
    count, reason = default_threads()
    out = {"default": count, "because": reason, "cpus": os.cpu_count(), **_region(count)}
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        value = os.environ.get(name)
        if value is not None:
            out[name] = value
            if value.isdigit() and int(value) < count:
                problems.append(
                    {
                        "problem": f"{name}={value} is below the {count} threads pnrt would use",
                        "fix": f"unset {name}, or keep it if that is what you want",
                    }
                )
    return out


def _region(threads: int) -> dict[str, Any]:
    """The threading layer and what one parallel region costs with it, in microseconds."""
    layer = jit.threading_layer()
    empty = jit.Script([])
    empty.run(threads)
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        empty.run(threads)
        seconds.append(time.perf_counter() - start)
    return {"layer": layer, "region_us": round(1e6 * sorted(seconds)[100], 1)}


def _cache(problems: list[dict[str, str]]) -> dict[str, Any]:
    path = jit.cache_directory()
    root = user_cache()
    if path is None:
        problems.append(
            {
                "problem": f"{root} is not writable: every start compiles anew",
                "fix": "set PNRT_CACHE to a directory you can write to",
            }
        )
        return {"directory": str(root / "kernels"), "writable": False, "kernels": 0}
    files = list(path.glob("*.kernel"))
    older = [d for d in path.parent.iterdir() if d.is_dir() and d != path]
    free = shutil.disk_usage(path).free
    if free < 1 << 30:
        problems.append(
            {
                "problem": f"{free / 2**20:.0f} MB are left on the disk of {path}",
                "fix": f"free some space, or set PNRT_CACHE; `rm -r {path.parent}` is always safe",
            }
        )
    return {
        "directory": str(path),
        "writable": True,
        "kernels": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "other_versions": len(older),
        "other_bytes": sum(f.stat().st_size for d in older for f in Path(d).glob("*")),
    }


def _cuda() -> dict[str, Any]:
    """Whether the CUDA backend can run here, in one sentence; it is no problem if not."""
    from pnrt.cuda import launch

    found: dict[str, Any] = {"numba_cuda": _version("numba-cuda")}
    try:
        device = launch.open_device()
    except PnrtError as error:
        return {**found, "device": None, "backend": str(error)}
    facts = device.facts
    device.close()
    return {
        **found,
        "device": facts.name,
        "capability": "{}.{}".format(*facts.capability),
        "driver": "{}.{}".format(*facts.driver),
        "free": facts.free,
        "total": facts.total,
        "backend": f"{facts.name}, {facts.free / 2**30:.1f} of {facts.total / 2**30:.1f} GiB free",
    }


def _kernels(problems: list[dict[str, str]]) -> list[dict[str, str | None]]:
    """Every (op, format) with the kernel of each backend, None where it has none."""
    from pnrt import backend
    from pnrt.cuda.backend import table

    try:
        rows = backend.open("cpu").table()
    except PnrtError as error:
        problems.append({"problem": str(error), "fix": "see the message"})
        return []
    cpu, cuda = ({(op, form): kernel for op, form, kernel in t} for t in (rows, table()))
    return [
        {"op": op, "format": form, "cpu": cpu.get((op, form)), "cuda": cuda.get((op, form))}
        for op, form in sorted(cpu.keys() | cuda.keys())
    ]
