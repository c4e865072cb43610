"""Kernels on numba's own CUDA simulator: a Python thread for each thread of a block.

The lowered source runs as the Python it is, so threads part where Python does. Indices, blocks,
barriers and the shared array are numba's. What its simulator lacks is here: addresses, and values
passed between the lanes of a warp. Arithmetic is the stand-in's, on vectors of one element.
"""

from __future__ import annotations

import functools
import sys
import threading

import numpy as np
from numba import cuda
from numba.cuda.simulator.kernel import FakeCUDAKernel

from pnrt.cuda.kernel import TYPES, Kernel, KernelError, Op
from pnrt.cuda.standin import StandIn
from pnrt.cuda.vectors import WORDS


class Warp:
    """32 lanes that wait for each other and show each other values."""

    def __init__(self, patience: float):
        self.patience, self.arrived, self.stopped = patience, 0, False
        self.lock, self.gates = threading.Lock(), [threading.Lock() for _ in range(32)]
        for gate in self.gates:
            gate.acquire()
        # in turns, so that a lane ahead does not overwrite what others still read
        self.values, self.turns = ([None] * 32, [None] * 32), [0] * 32

    def exchange(self, lane: int, value) -> list:
        """The values of all lanes, once all have come."""
        values = self.values[self.turns[lane]]
        self.turns[lane] ^= 1
        values[lane] = value
        with self.lock:
            self.arrived = (self.arrived + 1) % 32
            last = self.arrived == 0
        if last:
            for other in range(32):
                if other != lane:
                    self.gates[other].release()
        elif not self.gates[lane].acquire(timeout=self.patience):
            raise KernelError(f"lane {lane} waited {self.patience} s for its warp")
        if self.stopped:
            raise KernelError("another thread failed")
        return values

    def stop(self) -> None:
        """Let waiting lanes fail."""
        self.stopped = True
        for gate in self.gates:
            if gate.locked():
                gate.release()


class Simulator(StandIn):
    """Launches run by numba's simulator, on the stand-in's memory.

    patience: seconds a lane waits for its warp.
    """

    name = "simulator"
    patience = 300.0

    def launch(self, kernel: Kernel, grid: int | tuple[int, int], *args) -> None:
        """As StandIn.launch."""
        grid = (grid, 1) if isinstance(grid, int) else grid
        params = zip(kernel.lowered.params, args, strict=True)
        typed = [TYPES[kind](value) for (_, kind), value in params]
        run = _Run(self, kernel, grid)
        # numba's loop over the threads spins and would keep the interpreter for 5 ms each time
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-3)
        try:
            FakeCUDAKernel(run.thread, device=False)[grid, (kernel.threads,)](*typed)
        except Exception as error:
            raise KernelError(f"{kernel.name}: {run.error or error}") from run.error
        finally:
            sys.setswitchinterval(interval)


class _Shared:
    """numba's shared array; whether threads race for it is the stand-in's to say."""

    def __init__(self, nbytes: int):
        self.words = cuda.shared.array(nbytes // 4, np.uint32)

    def places(self, run, address, size: int, write: bool) -> np.ndarray:
        at = address.item()
        if at % size or at + size > 4 * len(self.words):
            raise KernelError(f"shared address {at} for {size} bytes")
        return np.arange(at // 4, (at + size) // 4)[None]


class _Run:
    """One launch; numba puts its simulated `cuda` in place of this module's while it lasts."""

    # what the words of memory ask of a run: here it is one thread, and takes part
    mask = None

    def __init__(self, device: Simulator, kernel: Kernel, grid: tuple[int, int]):
        self.device, self.shared, self.error = device, None, None
        self.lock = threading.Lock()
        places = np.ndindex(*grid, kernel.threads // 32)
        self.warps = {place: Warp(device.patience) for place in places}
        self.names = {
            name: self.meaning(word.name) if isinstance(word, Op) else word
            for name, word in kernel.lowered.words.items()
        }
        exec(kernel.lowered._replace(name="kernel").source, self.names)

    def thread(self, *args) -> None:
        """What every thread runs."""
        try:
            with np.errstate(all="ignore"):
                self.names["kernel"](*args)
        except Exception as error:
            with self.lock:
                first, self.error = self.error is None, self.error or error
            if first:
                for warp in self.warps.values():
                    warp.stop()
            raise

    def meaning(self, name: str):
        own = getattr(self, f"word_{name}", None)
        return own or functools.partial(WORDS[name], self)

    def vector(self, value) -> np.ndarray:
        return np.broadcast_to(value, 1)

    def places(self, address, size: int) -> np.ndarray:
        """The checked offset of an address in the device's memory, [1]."""
        if address.dtype != np.uint64:
            raise KernelError(f"an address is u64, not {address.dtype}")
        at = self.device._range(address.item(), size).start
        if at % size:
            raise KernelError(f"address {address.item():#x} for {size} bytes is not aligned")
        return np.array([at])

    def exchange(self, value) -> list:
        place = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x // 32
        return self.warps[place].exchange(cuda.laneid, value)

    def word_thread(self):
        return np.uint32(cuda.threadIdx.x)

    def word_threads(self):
        return np.uint32(cuda.blockDim.x)

    def word_block(self):
        return np.uint32(cuda.blockIdx.x)

    def word_block_y(self):
        return np.uint32(cuda.blockIdx.y)

    def word_blocks(self):
        return np.uint32(cuda.gridDim.x)

    def word_shared(self, nbytes):
        # numba makes the array when a thread first asks, and two could be first
        with self.lock:
            self.shared = _Shared(nbytes)
        return np.uint32(0)

    def word_syncthreads(self):
        cuda.syncthreads()

    def word_syncwarp(self):
        self.exchange(None)

    def word_shuffle_xor(self, value, m):
        return self.exchange(value)[cuda.laneid ^ m]

    def word_shuffle(self, value, lane):
        return self.exchange(value)[lane.item() % 32]

    def word_any_lane(self, value):
        return np.bool_(any(self.exchange(value)))

    def word_all_lanes(self, value):
        return np.bool_(all(self.exchange(value)))
