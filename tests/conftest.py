"""What holds for the whole suite: a cache of its own, and zero cases is red."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hypothesis import settings

from pnrt.demo import cached_model
from pnrt.machine import default_threads

# the same examples in every run
settings.register_profile("pnrt", derandomize=True, deadline=None, database=None)
settings.load_profile("pnrt")

RAN = ("passed", "failed", "error", "xfailed", "xpassed")
_own_cache: Path | None = None
# cases in a run that is worth compiling beside
MANY = 1000
_warming: list[subprocess.Popen] = []


def pytest_configure(config):
    """Compile into an empty cache, once a session; processes that tests start share it.

    A PNRT_CACHE from outside is used as it is. The demo's real model is looked up in the user's
    cache and linked, so that its tests run and nothing is written beside it.
    """
    global _own_cache
    if "PNRT_CACHE" in os.environ:
        return
    model = cached_model()
    _own_cache = Path(tempfile.mkdtemp(prefix="pnrt-tests-"))
    os.environ["PNRT_CACHE"] = str(_own_cache)
    if model:
        (_own_cache / "models").mkdir()
        # where links are not allowed the tests of the real model say that they were skipped
        with contextlib.suppress(OSError):
            (_own_cache / "models" / model.name).symlink_to(model)


def pytest_collection_finish(session):
    """Where all tests run, another CPU compiles kernels meanwhile."""
    if len(session.items) > MANY and default_threads()[0] > 1:
        command, root = [sys.executable, "-m", "tests.warm"], Path(__file__).parents[1]
        _warming.append(subprocess.Popen(command, cwd=root, start_new_session=True))


def pytest_unconfigure(config):
    """Remove the session's cache."""
    for process in _warming:
        # what it started, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if _own_cache:
        os.environ.pop("PNRT_CACHE", None)
        shutil.rmtree(_own_cache, ignore_errors=True)


def _all_skipped(stats: dict[str, list]) -> bool:
    return bool(stats.get("skipped")) and not any(stats.get(kind) for kind in RAN)


def pytest_sessionfinish(session, exitstatus):
    """A run in which every case was skipped proves nothing and fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter and _all_skipped(reporter.stats):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Say so; the skips themselves are counted by reason by pytest's -rs."""
    if _all_skipped(terminalreporter.stats):
        terminalreporter.write_line("no case ran: a suite that skips everything fails")
