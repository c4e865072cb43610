"""What a difference has two of: backends that run here, backends in a process, recorded runs.

A side can record a run of tokens as a full trace, and, if it runs, do one step again from inputs
it is given. `python -m pnrt.debug.sides` is the process behind a side with another instruction
set or thread count: requests and answers are pickled on its standard input and output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pnrt import errors
from pnrt.backend import BACKENDS
from pnrt.backend import open as open_backend
from pnrt.debug.trace import Trace, is_trace, record
from pnrt.errors import DeviceError, FileError, ModelError

# tier -> CPU and features LLVM compiles for; avx512 is this machine without AMX
TIERS = {
    "native": (),
    "avx512": (),
    "avx2": ("haswell", "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"),
    "plain": ("x86-64", "+sse2"),
}
NEEDS = {"avx512": "avx512f", "avx2": "avx2", "plain": "sse2"}


class Recorded:
    """A side that is a trace: it has run, and cannot run again."""

    file: Path | None = None
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, path: Path):
        self.name, self.path = path.name, path
        with Trace(path) as trace:
            self.index = trace.index

    def record(self, tokens: Sequence[int], path: Path, chunk: int, all: bool) -> Path:
        """The trace itself; it has its own tokens and chunks."""
        return self.path

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> None:
        """Not possible: None."""

    def close(self) -> None:
        """Nothing is held."""


class Live:
    """A side that runs a model in this process.

    Args:
        options: of pnrt.load, backend included.
    """

    def __init__(self, name: str, file: Path, options: Mapping[str, Any], progress=None):
        import pnrt

        self.name, self.file, self.options, self.progress = name, file, options, progress
        self.model = pnrt.load(file, progress=progress, **options)

    def record(self, tokens: Sequence[int], path: Path, chunk: int, all: bool) -> Path:
        """Run tokens and write a full trace."""
        record(self.model, tokens, path, full=True, chunk=chunk, all=all, progress=self.progress)
        return path

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """One step alone; see pnrt.backend.Session."""
        return self.model.session.redo(name, inputs, start)

    def close(self) -> None:
        """Close the model."""
        self.model.close()


class Remote:
    """A side that runs a model in a process of its own, compiled for another CPU.

    Args:
        tier: a name of TIERS; options: of pnrt.load.
    Raises: DeviceError for a tier this machine cannot run.
    """

    def __init__(self, name: str, file: Path, tier: str, options: Mapping[str, Any]):
        self.name, self.file, self.options = name, file, options
        environment = {**os.environ, **tier_environment(tier)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # numba never launches more threads than this
        environment["NUMBA_NUM_THREADS"] = str(
            max(options.get("threads") or 1, len(os.sched_getaffinity(0)))
            if hasattr(os, "sched_getaffinity")
            else max(options.get("threads") or 1, os.cpu_count() or 1)
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pnrt.debug.sides"], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            self._ask("load", str(file), dict(options))
        except BaseException:
            self.close()
            raise

    def record(self, tokens: Sequence[int], path: Path, chunk: int, all: bool) -> Path:
        """Run tokens and write a full trace."""
        self._ask("record", [int(t) for t in tokens], str(path), chunk, all)
        return path

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """One step alone; see pnrt.backend.Session."""
        return self._ask("redo", name, {k: np.array(v) for k, v in inputs.items()}, start)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            pickle.dump((what, arguments), self.process.stdin)
            self.process.stdin.flush()
            kind, answer = pickle.load(self.process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise DeviceError(
                f"{self.name}: its process ended (status {self.process.poll()}) while asked to "
                f"{what}; an answer was expected. Its last words are on standard error"
            ) from error
        if kind != "done":
            raise getattr(errors, kind, DeviceError)(f"{self.name}: {answer}")
        return answer


def tier_environment(tier: str) -> dict[str, str]:
    """The environment that makes numba compile for a tier.

    Raises: DeviceError for an unknown tier or one this CPU lacks.
    """
    from pnrt.machine import cpu_features, cpu_target

    if tier not in TIERS:
        raise DeviceError(f"tier {tier!r}: unknown. Allowed: {', '.join(TIERS)}")
    if tier == "native":
        return {}
    if NEEDS[tier] not in cpu_features():
        raise DeviceError(
            f"tier {tier}: this CPU ({cpu_target()[0]}) has no {NEEDS[tier]}; it has "
            f"{', '.join(t for t in TIERS if NEEDS.get(t) in cpu_features()) or 'native only'}"
        )
    name, features = TIERS[tier] or cpu_target()
    if tier == "avx512":
        kept = [flag for flag in features.split(",") if "amx" not in flag]
        features = ",".join([*kept, "-amx-tile", "-amx-int8", "-amx-bf16"])
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}


def check_side(word: str, file: Path | None) -> None:
    """Refuse a side that cannot run, before the other one is loaded.

    Raises: as `open_side` for a name that is none, a backend that is absent, a missing model.
    """
    backend, _, tier = word.partition(":")
    if tier and backend == "cpu":
        tier_environment(tier)
        _needed(word, file)
    elif word in BACKENDS:
        open_backend(word)
        _needed(word, file)
    elif not Path(word).exists():
        raise ModelError(
            f"{word}: is no file and no side; a side is one of {', '.join(BACKENDS)}, "
            f"cpu:{', cpu:'.join(TIERS)}, a trace or a model file. Check the name."
        )


def open_side(
    word: str, file: Path | None, options: Mapping[str, Any], progress=None
) -> Recorded | Live | Remote:
    """A side by the word the user gave: a backend, `cpu:TIER`, a trace, or a model file.

    Args:
        file: the model of a side that is a backend.
        options: of pnrt.load, without the backend.
    Raises: ModelError for a word that is none of these, DeviceError for what cannot run here.
    """
    check_side(word, file)
    backend, _, tier = word.partition(":")
    if tier and backend == "cpu":
        return Remote(word, _needed(word, file), tier, options)
    if word in BACKENDS:
        threads = {} if word == "cpu" else {"threads": None}
        return Live(word, _needed(word, file), {**options, **threads, "backend": word}, progress)
    path = Path(word)
    if is_trace(path):
        return Recorded(path)
    return Live(path.name, path, {**options, "backend": "cpu"}, progress)


def _needed(word: str, file: Path | None) -> Path:
    if file is None:
        raise ModelError(
            f"{word}: needs a model to run and none was given; `pnrt diff MODEL.gguf A B` names it."
        )
    return file


def serve() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    # what a library prints must not come between the answers
    os.dup2(2, 1)
    side: Live | None = None
    with contextlib.suppress(EOFError):
        while True:
            what, arguments = pickle.load(sys.stdin.buffer)
            try:
                if what == "load":
                    file, options = arguments
                    side = Live("", Path(file), {**options, "backend": "cpu"})
                    answer = None
                elif what == "record":
                    tokens, path, chunk, all = arguments
                    answer = str(side.record(tokens, Path(path), chunk, all))
                else:
                    answer = side.redo(*arguments)
                result = ("done", answer)
            except (errors.PnrtError, FileError) as error:
                result = (type(error).__name__, str(error))
            pickle.dump(result, answers)
            answers.flush()


if __name__ == "__main__":
    serve()
