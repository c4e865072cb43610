"""One GPU: what it is, its memory in one arena, launches through cuda.core, one graph per token.

`open_device` starts the driver; nothing before it does. `Gpu` and standin.StandIn have the same
methods, so what runs on one runs on the other.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pnrt.cuda import build
from pnrt.cuda.kernel import TYPES, Call, Sequence
from pnrt.errors import DeviceError

ALIGNMENT = 256
LOWEST = (6, 0)
# bytes of each of the two pinned buffers that host memory goes through
STAGING = 64 << 20
_INSTALL = "pip install 'pnrt[cuda]'"
_NO_DEVICE = 100


class Facts(NamedTuple):
    """What is known of a GPU before anything is allocated."""

    name: str
    capability: tuple[int, int]
    processors: int
    driver: tuple[int, int]
    free: int
    total: int


def require_packages() -> None:
    """Raise DeviceError where the packages that compile and launch are missing."""
    for module, package in (("numba_cuda", "numba-cuda"), ("cuda.core", "cuda-core")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise DeviceError(
                f"backend cuda: the package {package} is not installed; GPU kernels are compiled "
                f"and launched with it. Install it: {_INSTALL}"
            )


def start_driver() -> Any:
    """Load libcuda and initialize it: the module of its functions.

    Raises: DeviceError where there is no driver or no GPU.
    """
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    # what cuda.bindings raises without libcuda has changed its class from release to release
    except Exception as error:
        raise DeviceError(
            f"backend cuda: the NVIDIA driver library (libcuda) cannot be loaded "
            f"({type(error).__name__}); a driver must be installed and visible here. Install one "
            "(for a P100 of the 580 branch, the last that knows it), or use --backend cpu."
        ) from error
    if int(status) == _NO_DEVICE:
        raise DeviceError(
            "backend cuda: the driver finds no GPU; one of compute capability 6.0 or later is "
            "needed. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --backend cpu."
        )
    checked(status, "cuInit")
    return driver


def checked(result: Any, what: str) -> Any:
    """What a driver call returned, without its status.

    Raises: DeviceError with the driver's name of what went wrong.
    """
    status, *values = result if isinstance(result, tuple) else (result,)
    if int(status):
        name = getattr(status, "name", str(int(status)))
        raise DeviceError(
            f"backend cuda: {what} failed with {name}. If it repeats, run `pnrt doctor` and look "
            "at the system's log for messages of the driver (Xid)."
        )
    return values[0] if len(values) == 1 else tuple(values)


def check_facts(facts: Facts, toolkit: tuple[int, int], architectures: Iterable[int]) -> None:
    """Raise DeviceError where this GPU, driver and toolkit cannot work together.

    Args:
        toolkit: version of the CUDA libraries that were found. architectures: those it compiles
        for, as 60 for 6.0.
    """
    here = "{}.{}".format(*facts.capability)
    if facts.capability < LOWEST:
        raise DeviceError(
            f"{facts.name}: its compute capability is {here}; 6.0 (Pascal) is the lowest pnrt "
            "runs on. Use --backend cpu."
        )
    if facts.driver < (toolkit[0], 0):
        raise DeviceError(
            "{}: the driver supports CUDA {}.{}; the installed CUDA {}.{} libraries need one for "
            "CUDA {}.0 or later. Update the driver.".format(
                facts.name, *facts.driver, *toolkit, toolkit[0]
            )
        )
    known = sorted(architectures)
    if known and facts.capability[0] * 10 + facts.capability[1] < known[0]:
        raise DeviceError(
            "{}: its compute capability is {}; the installed CUDA {}.{} compiler starts at "
            "{}.{}. Install the CUDA 12 packages: pip install 'numba-cuda[cu12]' in a fresh "
            "environment.".format(facts.name, here, *toolkit, known[0] // 10, known[0] % 10)
        )


def check_memory(name: str, needed: int, free: int, total: int) -> None:
    """Raise DeviceError where the GPU's free memory does not hold what is needed."""
    if needed > free:
        raise DeviceError(
            f"{name}: {needed / 2**30:.2f} GiB are needed; {free / 2**30:.2f} of its "
            f"{total / 2**30:.2f} GiB are free. Use a smaller --context, a model of fewer bits, or "
            "--backend cpu; nvidia-smi shows who uses the rest."
        )


def _facts(driver: Any, device: Any) -> Facts:
    attribute = driver.CUdevice_attribute

    def ask(which):
        return checked(driver.cuDeviceGetAttribute(which, device), "cuDeviceGetAttribute")

    name = checked(driver.cuDeviceGetName(128, device), "cuDeviceGetName")
    version = checked(driver.cuDriverGetVersion(), "cuDriverGetVersion")
    free, total = checked(driver.cuMemGetInfo(), "cuMemGetInfo")
    return Facts(
        name.split(b"\0")[0].decode(),
        (
            ask(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            ask(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        ask(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        (version // 1000, version % 1000 // 10),
        free,
        total,
    )


def _toolkit() -> tuple[tuple[int, int], list[int]]:
    """Version of the CUDA compiler libraries and the architectures they know."""
    from cuda.bindings import nvrtc

    version = checked(nvrtc.nvrtcVersion(), "nvrtcVersion")
    count = checked(nvrtc.nvrtcGetNumSupportedArchs(), "nvrtcGetNumSupportedArchs")
    return version, [int(a) for a in checked(nvrtc.nvrtcGetSupportedArchs(), "archs")[:count]]


def open_device(number: int = 0) -> Gpu:
    """Start the driver and take a GPU.

    Raises: DeviceError that says in one sentence what is missing and what to do.
    """
    require_packages()
    driver = start_driver()
    import cuda.core

    device = cuda.core.Device(number)
    device.set_current()
    facts = _facts(driver, checked(driver.cuDeviceGet(number), "cuDeviceGet"))
    check_facts(facts, *_toolkit())
    return Gpu(driver, device, facts)


class Gpu:
    """Memory and launches of one GPU, on one stream."""

    def __init__(self, driver: Any, device: Any, facts: Facts):
        self.driver, self.device, self.facts = driver, device, facts
        self.name, self.processors = facts.name, facts.processors
        self.stream = device.create_stream()
        self._handle = self.stream.handle
        self._base = self._size = self._used = 0
        self._pinned: list[int] = []
        self._events: list[Any] = []
        self._kernels: dict[Any, Any] = {}

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        return checked(self.driver.cuMemGetInfo(), "cuMemGetInfo")

    def reserve(self, nbytes: int) -> None:
        """Take the one arena that everything is allocated from.

        Raises: DeviceError where the GPU has less free memory.
        """
        check_memory(self.name, nbytes, *self.memory())
        self._base = int(checked(self.driver.cuMemAlloc(nbytes), "cuMemAlloc"))
        self._size, self._used = nbytes, 0

    def allocate(self, nbytes: int) -> int:
        """Address of nbytes of the arena, aligned to 256."""
        address = self._base + self._used
        self._used += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        check_memory(f"{self.name}'s arena", self._used, self._size, self._size)
        return address

    def mark(self) -> int:
        """Where the arena's free part begins, for release."""
        return self._used

    def release(self, mark: int) -> None:
        """Give back what was allocated after a mark; launches that use it must be done."""
        self._used = mark

    def write(self, address: int, values: np.ndarray) -> None:
        """Copy an array to an address through pinned memory; the host may change it afterwards."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for i, start in enumerate(range(0, len(raw), STAGING)):
            part = raw[start : start + STAGING]
            pinned, event = self._staging(i % 2)
            event.sync()
            pinned[: len(part)] = part
            copied = self.driver.cuMemcpyHtoDAsync(
                address + start, pinned.ctypes.data, len(part), self._handle
            )
            checked(copied, "copy to the GPU")
            self.stream.record(event)

    def _staging(self, which: int) -> tuple[np.ndarray, Any]:
        """A pinned buffer and the event of the last copy from it."""
        while len(self._pinned) < 2:
            address = int(checked(self.driver.cuMemHostAlloc(STAGING, 0), "cuMemHostAlloc"))
            self._pinned.append(address)
            self._events.append(self.stream.record())
        buffer = (ctypes.c_uint8 * STAGING).from_address(self._pinned[which])
        return np.ctypeslib.as_array(buffer), self._events[which]

    def read(self, address: int, shape, dtype=np.float32) -> np.ndarray:
        """Wait for the stream and copy an array from an address."""
        out = np.empty(shape, dtype)
        copied = self.driver.cuMemcpyDtoHAsync(out.ctypes.data, address, out.nbytes, self._handle)
        checked(copied, "copy from the GPU")
        self.synchronize()
        return out

    def upload(self, values: np.ndarray) -> int:
        """Allocate, copy, and return the address."""
        address = self.allocate(values.nbytes)
        self.write(address, values)
        return address

    def sequence(self, calls: Iterable[Call], graph: bool = False) -> Sequence:
        """Compile and prepare launches; with a graph they are captured and started as one."""
        prepared = [self._prepare(call) for call in calls]
        if not graph:
            return Sequence(lambda: self._start(self.stream, prepared), len(prepared), 0)
        builder = self.device.create_graph_builder().begin_building()
        self._start(builder, prepared)
        captured = builder.end_building().complete()
        return Sequence(lambda: captured.launch(self.stream), 1, len(prepared))

    def _prepare(self, call: Call) -> tuple:
        from cuda.core import LaunchConfig

        kinds = [TYPES[kind] for _, kind in call.kernel.lowered.params]
        args = tuple(kind(value) for kind, value in zip(kinds, call.args, strict=True))
        config = LaunchConfig(grid=call.grid, block=call.kernel.threads)
        return config, self._kernel(call.kernel), args

    def _kernel(self, kernel):
        if kernel not in self._kernels:
            from cuda.core import ObjectCode

            built = build.cached(kernel, self.facts.capability)
            self._kernels[kernel] = ObjectCode.from_cubin(built.cubin).get_kernel(built.entry)
        return self._kernels[kernel]

    def _start(self, where: Any, prepared: list[tuple]) -> None:
        from cuda.core import launch

        for config, kernel, args in prepared:
            launch(where, config, kernel, *args)

    def run(self, calls: Iterable[Call]) -> None:
        """Launch calls in order, once."""
        self.sequence(calls).run()

    def synchronize(self) -> None:
        """Wait until everything that was started is done."""
        self.stream.sync()

    def close(self) -> None:
        """Give everything back; the object can reserve again."""
        self.synchronize()
        if self._base:
            checked(self.driver.cuMemFree(self._base), "cuMemFree")
        for address in self._pinned:
            checked(self.driver.cuMemFreeHost(address), "cuMemFreeHost")
        self._base = self._size = self._used = 0
        self._pinned.clear()
        self._events.clear()
        self._kernels.clear()
