"""numba made boring: each trap of the compiler and its threads, with its test."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import pnrt
from pnrt import jit, machine
from pnrt.errors import DeviceError
from pnrt.native import FUTEX, read_now, write_now
from pnrt.simd import read_i64

PACKAGE = Path(pnrt.__file__).parent

# prepended to every program that is run in a process of its own
PRELUDE = """
import os, sys, threading
import numpy as np
from pnrt import jit, machine
from pnrt.cpu import elementwise

x = np.random.default_rng(1).standard_normal((13, 40)).astype(np.float32)

def run(name, threads):
    out = np.full_like(x, np.nan)
    control = np.array([len(x), 0], np.int64)
    kernel = getattr(elementwise, name + "_kernel")
    jit.run(kernel, x, 40, x, 40, out, 40, 40, control, threads=threads)
    return out
"""


def python(code: str, parent: Path = PACKAGE.parent, **environment: str) -> str:
    """Run a program against the package under a directory; what it printed."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", PRELUDE + textwrap.dedent(code)],
        cwd=parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout.strip()


def add(kernel: jit.Kernel, threads: int = 2) -> None:
    """Run an addition kernel and check every number."""
    x = np.arange(120, dtype=np.float32).reshape(3, 40)
    y, out = x[::-1] * 3, np.full_like(x, np.nan)
    y = np.ascontiguousarray(y)
    jit.run(kernel, x, 40, y, 40, out, 40, 40, np.array([3, 0], np.int64), threads=threads)
    np.testing.assert_array_equal(out, x + y)


def fresh(name: str) -> jit.Kernel:
    """The addition kernel as a process that has not compiled it yet would see it."""
    from pnrt.cpu.elementwise import add_kernel

    return jit.Kernel(add_kernel.function, name)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty kernel cache for this test; set PNRT_CACHE again before first use to move it."""
    monkeypatch.setenv("PNRT_CACHE", str(tmp_path / "cache"))
    directory = functools.cache(jit.cache_directory.__wrapped__)
    monkeypatch.setattr(jit, "cache_directory", directory)
    return tmp_path / "cache"


def test_an_edit_in_an_imported_function_is_seen(tmp_path):
    """numba's own cache looks at the kernel's file only, and would keep the old silu."""
    code = "print(float(run('swiglu', 1)[0, 0]).hex()); print(elementwise.swiglu_kernel.cached)"
    copy = tmp_path / "pnrt"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    cache = {"PNRT_CACHE": str(tmp_path / "cache")}

    def listing() -> list[Path]:
        return sorted(p for p in copy.rglob("*") if p.is_file())

    files = listing()
    before, cached = python(code, tmp_path, **cache).split()
    assert cached == "False"
    assert python(code, tmp_path, **cache).split() == [before, "True"]

    source = (copy / "scalars.py").read_text()
    edited = source.replace("return mul(x, sigmoid(x))", "return mul(x, add(ONE, sigmoid(x)))")
    assert edited != source
    (copy / "scalars.py").write_text(edited)
    after, cached = python(code, tmp_path, **cache).split()
    assert cached == "False"
    x = np.random.default_rng(1).standard_normal((13, 40)).astype(np.float32)[0, 0]
    assert float.fromhex(after) - float.fromhex(before) == pytest.approx(x * x, rel=1e-5)

    (copy / "scalars.py").write_text(source)
    assert python(code, tmp_path, **cache).split() == [before, "True"]
    # a read-only install works: nothing is ever written beside the sources
    assert listing() == files


def test_an_unwritable_cache_costs_one_line(cache, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PNRT_CACHE", str(tmp_path / "file" / "cache"))
    for name in ("first", "second"):
        kernel = fresh(name)
        add(kernel)
        assert not kernel.cached
    [line] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith(f"kernel cache {tmp_path}/file/cache/kernels/")
    assert line.endswith("set PNRT_CACHE to a writable directory")
    assert "\n" not in line


def test_a_full_disk_costs_one_line_and_leaves_nothing(cache, caplog):
    resource = pytest.importorskip("resource", reason="needs a limit on file sizes")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    jit._not_kept.cache_clear()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        add(fresh("large"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [line] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "is not writable (File too large)" in line
    assert list(cache.rglob("large*")) == []


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("PNRT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert machine.user_cache() == Path("/a")
    monkeypatch.setenv("PNRT_CACHE", "")
    assert machine.user_cache() == Path("/b/pnrt")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert Path("/nonexistent") in machine.user_cache().parents


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_cache_file_is_compiled_anew(cache, caplog, damage):
    add(fresh("victim"))
    [path] = cache.rglob("victim.kernel")
    data = path.read_bytes()
    broken = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
    }
    path.write_bytes(broken[damage])

    kernel = fresh("victim")
    add(kernel)
    assert not kernel.cached
    [line] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line == f"kernel cache file {path} is damaged: deleted and compiled anew"

    kernel = fresh("victim")
    add(kernel)
    assert kernel.cached
    assert [p.name for p in path.parent.iterdir() if p.suffix != ".kernel"] == []


def test_another_cpu_has_kernels_of_its_own():
    code = "print(jit.source_hash(), sorted(machine.cpu_features()))"
    mine = python(code)
    plain = python(code, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert plain.endswith(" []")
    assert mine.split()[0] != plain.split()[0]


SEVEN_ONE_TWO = """
results = {t: run("swiglu", t).tobytes() for t in (7, 1, 2)}
assert len(set(results.values())) == 1
assert not np.isnan(run("swiglu", 7)).any()
print(len(results))
"""


def test_results_do_not_depend_on_the_thread_count():
    """7 threads are more than many machines have cores: some must wait without a core."""
    assert python(SEVEN_ONE_TWO, NUMBA_NUM_THREADS="7") == "3"


def test_more_threads_than_cores_without_a_setting():
    later = SEVEN_ONE_TWO.replace("(7, 1, 2)", "(2, 1, 7)")
    assert python(later, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER="omp") == "3"


def test_workqueue_threads_cannot_be_added_later():
    code = """
    run("add", 2)
    try:
        run("add", 7)
    except jit.DeviceError as error:
        print(error)
    """
    assert python(code, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER="workqueue") == (
        "threads: 7 asked for; numba was started with 2. Set NUMBA_NUM_THREADS=7 in the "
        "environment."
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_the_affinity_mask_bounds_the_threads():
    code = """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(*machine.default_threads(), sep=": ")
    """
    assert python(code) == "1: 1 CPUs in the affinity mask"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "no numbers here\n"}, None),
        ({}, None),
    ],
)
def test_container_quotas_of_both_versions(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cgroup_quota(tmp_path) == expected


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.5, 1), (3.0, 3), (8.0, 4), (None, 4)])
def test_the_quota_bounds_the_threads(monkeypatch, quota, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(machine, "cgroup_quota", lambda: quota)
    found, reason = machine.default_threads()
    assert found == threads
    assert ("quota" in reason) == (threads < 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_gets_a_sentence_not_a_signal():
    code = """
    run("add", 2)
    child = os.fork()
    if child == 0:
        try:
            run("add", 2)
        except jit.DeviceError as error:
            print(error, flush=True)
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    assert np.array_equal(run("add", 2), x + x)
    """
    said = python(code, NUMBA_NUM_THREADS="2")
    assert said.startswith("this process was forked after pnrt had started its compute threads")
    assert "spawn" in said


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_two_python_threads_take_turns(layer):
    """workqueue would abort the process when two threads launch at once."""
    code = """
    run("add", 2)
    right = []

    def work():
        right.extend(np.array_equal(run("add", 2), x + x) for _ in range(100))

    workers = [threading.Thread(target=work) for _ in range(2)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    print(jit.threading_layer(), len(right), all(right))
    """
    said = python(code, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)
    assert said == f"{layer} 200 True"


def patient(a, thread, threads):
    """A kernel whose thread 0 works until another sleeps at the barrier, and says whether one did.

    a: address of the barrier's counter and of an int64 for the answer.
    """
    if thread == 0:
        for _ in range(int(3e9)):
            if read_now(read_i64(a)) > jit.ARRIVED:
                write_now(read_i64(a + 8), 1)
                break


@pytest.mark.skipif(not FUTEX, reason="waiting threads do not sleep on this system")
def test_who_waits_long_sleeps():
    kernel, said = jit.Kernel(patient, "tests.patient"), np.zeros(2, np.int64)
    script = jit.Script([])
    for i in range(2):
        arguments = jit.words(script._counter, said[i:])
        script.calls.append(jit.Call(kernel, arguments, (said,)))
    script.run(2)
    # who slept was woken, or the second call would not have ended
    assert said.tolist() == [1, 1]


def test_the_users_thread_count_is_restored():
    import numba

    kernel = fresh("add")
    add(kernel, threads=1)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        add(kernel, threads=min(2, numba.config.NUMBA_NUM_THREADS))
        assert numba.get_num_threads() == 1
        with pytest.raises(DeviceError, match="threads: 10000 asked for"):
            add(kernel, threads=10_000)
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(before)
