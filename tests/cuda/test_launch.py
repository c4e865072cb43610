"""What the CUDA backend says where it cannot run, and its host side on a driver that only notes."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pnrt.cuda import build, launch
from pnrt.cuda.norm import rms_norm_kernel
from pnrt.cuda.standin import StandIn
from pnrt.errors import DeviceError

P100 = launch.Facts("Tesla P100-PCIE-16GB", (6, 0), 56, (13, 0), 15 << 30, 16 << 30)


def refusal(*args, check=launch.check_facts):
    with pytest.raises(DeviceError) as raised:
        check(*args)
    return str(raised.value)


def test_a_p100_with_cuda_12_is_taken():
    launch.check_facts(P100, (12, 9), [50, 52, 60, 61, 70, 75, 80, 86, 89, 90])
    launch.check_facts(P100._replace(capability=(9, 0)), (13, 0), [75, 80, 90])


def test_cuda_13_on_a_p100():
    said = refusal(P100, (13, 1), [75, 80, 86, 90])
    assert "compute capability is 6.0; the installed CUDA 13.1 compiler starts at 7.5" in said
    assert "pip install 'numba-cuda[cu12]'" in said


def test_a_driver_too_old():
    said = refusal(P100._replace(driver=(11, 4)), (12, 9), [50, 60])
    assert "supports CUDA 11.4; the installed CUDA 12.9 libraries need one for CUDA 12.0" in said
    assert "Update the driver" in said


def test_a_card_too_old():
    said = refusal(P100._replace(name="Tesla M40", capability=(5, 2)), (12, 9), [50, 60])
    assert said.startswith("Tesla M40: its compute capability is 5.2; 6.0 (Pascal) is the lowest")


def test_too_little_memory():
    args = ("Tesla P100", 17 << 30, 15 << 30, 16 << 30)
    said = refusal(*args, check=launch.check_memory)
    assert "17.00 GiB are needed; 15.00 of its 16.00 GiB are free" in said
    assert "--context" in said


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    said = refusal(check=launch.require_packages)
    assert "numba-cuda is not installed" in said
    assert "pip install 'pnrt[cuda]'" in said


def fake_bindings(monkeypatch, cuInit):
    driver = SimpleNamespace(cuInit=cuInit)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=None))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    return driver


def test_no_driver(monkeypatch):
    def missing(flags):
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    fake_bindings(monkeypatch, missing)
    said = refusal(check=launch.start_driver)
    assert "driver library (libcuda) cannot be loaded" in said
    assert "580 branch" in said


def test_no_gpu(monkeypatch):
    fake_bindings(monkeypatch, lambda flags: (100,))
    assert "the driver finds no GPU" in refusal(check=launch.start_driver)


def test_a_driver_that_fails(monkeypatch):
    fake_bindings(monkeypatch, lambda flags: (999,))
    assert "cuInit failed with 999" in refusal(check=launch.start_driver)


class NotingDriver:
    """Driver calls on host memory: what is copied arrives, what is taken must be given back."""

    def __init__(self):
        self.taken: dict[int, object] = {}

    def cuMemGetInfo(self):
        return 0, 1 << 30, 1 << 30

    def cuMemAlloc(self, nbytes):
        memory = np.full(nbytes, 0xFF, np.uint8)
        self.taken[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemHostAlloc(self, nbytes, flags):
        return self.cuMemAlloc(nbytes)

    def cuMemFree(self, address):
        del self.taken[address]
        return (0,)

    cuMemFreeHost = cuMemFree

    def cuMemcpyHtoDAsync(self, to, source, nbytes, stream):
        ctypes.memmove(to, source, nbytes)
        return (0,)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync


@pytest.fixture
def gpu(monkeypatch):
    event = SimpleNamespace(sync=lambda: None)
    stream = SimpleNamespace(handle=7, record=lambda e=None: e or event, sync=lambda: None)
    monkeypatch.setattr(launch, "STAGING", 1 << 12)
    return launch.Gpu(NotingDriver(), SimpleNamespace(create_stream=lambda: stream), P100)


def test_memory_is_one_arena_and_copies_arrive(gpu):
    gpu.reserve(1 << 16)
    values = np.arange(5000, dtype=np.float32)
    first, second = gpu.upload(values), gpu.upload(values[:3] + 1)
    assert (second - first) % 256 == 0
    assert second - first >= values.nbytes
    np.testing.assert_array_equal(gpu.read(first, 5000), values)
    np.testing.assert_array_equal(gpu.read(second, (3, 1)), [[1], [2], [3]])
    with pytest.raises(DeviceError, match=r"arena: .* GiB are needed"):
        gpu.allocate(1 << 16)


def test_close_gives_everything_back_and_can_be_followed_by_another_load(gpu):
    for _ in range(2):
        gpu.reserve(1 << 16)
        gpu.upload(np.ones(10, np.float32))
        assert len(gpu.driver.taken) == 3
        gpu.close()
        assert not gpu.driver.taken


def test_more_than_is_free_is_refused(gpu):
    with pytest.raises(DeviceError, match=r"2\.00 GiB are needed; 1\.00 of its 1\.00 GiB are free"):
        gpu.reserve(2 << 30)


def test_launches_go_through_cuda_core_and_a_graph_replays_them(gpu, monkeypatch):
    started = []

    class Builder(list):
        def begin_building(self):
            return self

        def end_building(self):
            return self

        def complete(self):
            return SimpleNamespace(launch=lambda stream: started.append((stream, list(self))))

    def start(where, config, kernel, *args):
        (where if isinstance(where, Builder) else started).append((config, kernel, args))

    def from_cubin(cubin):
        return SimpleNamespace(get_kernel=lambda entry: (cubin, entry))

    core = SimpleNamespace(
        launch=start,
        LaunchConfig=lambda grid, block: (grid, block),
        ObjectCode=SimpleNamespace(from_cubin=from_cubin),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    built = build.Built("", b"cubin", "entry", 1, 0, 0, 0)
    monkeypatch.setattr(build, "cached", lambda kernel, capability: built)
    gpu.device.create_graph_builder = Builder
    call = launch.Call(rms_norm_kernel, (3, 2), (256, 4, 512, 768, 4, 4, 1, 1, 0.5, 1024))
    gpu.run([call])
    config, kernel, args = started.pop()
    assert (config, kernel) == (((3, 2), 128), (b"cubin", "entry"))
    types = [np.uint64, np.uint32, np.uint64, np.uint64, *[np.uint32] * 4, np.float32, np.uint64]
    assert [type(a) for a in args] == types
    sequence = gpu.sequence([call, call], graph=True)
    assert (sequence.launches, sequence.nodes, started) == (1, 2, [])
    sequence.run()
    ((stream, launches),) = started
    assert stream is gpu.stream
    assert len(launches) == 2


def test_the_standin_has_the_gpus_methods():
    public = {name for name in vars(launch.Gpu) if name[0] != "_"}
    assert public <= set(dir(StandIn))


def test_importing_the_backend_starts_no_driver():
    modules = ", ".join(f"pnrt.cuda.{name}" for name in (*build.MODULES, "launch", "standin"))
    # an installed numba-cuda announces the empty name `cuda` itself
    drivers = "{'numba.cuda', 'cuda.bindings', 'cuda.core'}"
    code = f"import sys, {modules}; print({drivers} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_sequences_replay():
    device = StandIn(1 << 20)
    x = device.upload(np.full(4, 2, np.float32))
    out, control = device.allocate(16), device.upload(np.array([1, 0], np.uint32))
    call = launch.Call(rms_norm_kernel, (1, 1), (x, 4, x, out, 4, 4, 1, 4, 0.0, control))
    sequence = device.sequence([call, call], graph=True)
    assert (sequence.launches, sequence.nodes) == (1, 2)
    sequence.run()
    sequence.run()
    assert device.launches == ["rms_norm"] * 4
    np.testing.assert_array_equal(device.read(out, 4), [2, 2, 2, 2])
