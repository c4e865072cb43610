"""Tokens per second of a loaded model, the way llama-bench counts them.

A prompt run reads `prompt` tokens into an empty state; a generation run reads `generate` tokens one
at a time into an empty state and finds the likeliest after each. Each is repeated after one warm-up
that is not counted. Compile and load times are reported apart, never mixed into a median.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from pnrt import __version__
from pnrt.errors import ModelError
from pnrt.machine import cpu_model, cpu_target, default_threads
from pnrt.stream import context

if TYPE_CHECKING:
    from pnrt.generate import Model


def bench(
    model: Model,
    prompt: int = 512,
    generate: int = 128,
    repeats: int = 3,
    chunk: int = 512,
    progress: Callable[[str, int, int], None] | None = None,
    depth: int = 0,
) -> dict[str, Any]:
    """Time a model.

    Args:
        model: what `pnrt.load` returned.
        prompt, generate: tokens per run; 0 leaves that half out.
        repeats: counted runs of each.
        chunk: tokens per call while the prompt is read.
        progress: called with (what runs, runs done, runs in all).
        depth: tokens the model has read before each run starts.
    Returns:
        a dict ready for JSON: runs (each name, tokens, seconds, and median, low and high in tokens
        per second), backend, threads and machine; of a GPU also its name, and per generated token
        the launches from the host and the kernels in the graph.
    Raises:
        ModelError: sizes that make no sense for this model.
    """
    limit = context(model)
    if min(prompt, generate) < 0 or repeats < 1 or prompt + generate == 0:
        raise ModelError(
            f"bench: {prompt} prompt tokens, {generate} generated, {repeats} repeats; needed are "
            "-p or -n above zero and -r of at least 1. Raise one of them."
        )
    longest = max(prompt, generate)
    if depth + longest > limit:
        raise ModelError(f"{depth + longest} tokens do not fit the context of {limit}; use fewer.")
    # arbitrary but fixed tokens: the time does not depend on which
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, max(longest, depth))
    tokens = [int(t) for t in tokens]

    def read() -> None:
        model.eval(tokens[:prompt], chunk=chunk)

    def write() -> None:
        for token in tokens[:generate]:
            model.next([token])

    after = f" @ d{depth}" if depth else ""
    jobs = [(f"pp{prompt}{after}", prompt, read), (f"tg{generate}{after}", generate, write)]
    jobs = [job for job in jobs if job[1]]
    model.reset()
    if depth:
        model.eval(tokens[:depth], chunk=chunk)
        begun = model.snapshot()
    total = len(jobs) * (repeats + 1)
    runs, done = [], 0
    for name, count, job in jobs:
        seconds = []
        for _ in range(repeats + 1):
            if progress:
                progress(name, done, total)
            if depth:
                model.restore(begun)
            else:
                model.reset()
            start = time.perf_counter()
            job()
            seconds.append(time.perf_counter() - start)
            done += 1
        runs.append(_run(name, count, seconds[1:]))
    model.reset()
    session = model.session
    result = {"runs": runs, "backend": session.backend.name, "threads": model.threads}
    if hasattr(session, "launches"):
        result |= {"device": session.backend.device.name, **session.launches()}
    return {**result, "machine": machine()}


def _run(name: str, tokens: int, seconds: list[float]) -> dict[str, Any]:
    speeds = [tokens / s for s in seconds]
    return {
        "name": name,
        "tokens": tokens,
        "seconds": seconds,
        "median": statistics.median(speeds),
        "low": min(speeds),
        "high": max(speeds),
    }


def versions(names: tuple[str, ...] = ("numba", "llvmlite", "numpy")) -> dict[str, str | None]:
    """Installed versions of packages; None for one that is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """What a measured number needs next to it to mean anything later."""
    threads, reason = default_threads()
    return {
        "cpu": cpu_model(),
        "target": cpu_target()[0],
        "cpus": os.cpu_count(),
        "default_threads": threads,
        "threads_because": reason,
        "system": platform.platform(),
        "python": platform.python_version(),
        "pnrt": __version__,
        **versions(),
    }
