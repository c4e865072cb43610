"""Shared memory of the stand-in: bounds, alignment, and races between threads."""

from __future__ import annotations

import numpy as np

from pnrt.cuda.kernel import KernelError


def number(x):
    """A plain number alone is i32 or f32."""
    return x if isinstance(x, np.generic | np.ndarray) else np.int32(x)


class SharedMemory:
    """Every block's shared memory, and who touched each word since when."""

    def __init__(self, run, nbytes: int):
        self.nbytes = nbytes
        blocks = run.grid[0] * run.grid[1]
        self.words = np.full(blocks * nbytes // 4, 0xFFFFFFFF, np.uint32)
        self.writer, self.reader = (np.full(len(self.words), -1) for _ in range(2))
        self.written, self.read = (np.zeros(len(self.words), np.int64) for _ in range(2))
        self.now = 1
        self.block_sync = np.zeros(run.count, np.int64)
        self.warp_sync = np.zeros(run.count, np.int64)

    def sync(self, run, block: bool) -> None:
        self.now += 1
        times = (self.block_sync, self.warp_sync) if block else (self.warp_sync,)
        for time in times:
            time[slice(None) if run.mask is None else run.mask] = self.now

    def places(self, run, address, size: int, write: bool) -> np.ndarray:
        """Word indices [threads, size / 4], checked for bounds, alignment and races."""
        address = number(address)
        if address.dtype != np.uint32:
            raise KernelError(f"a shared address is u32, not {address.dtype}")
        at = run.vector(address).astype(np.int64)
        if run.mask is not None:
            at = np.where(run.mask, at, at[run.mask][0])
        if ((at % size != 0) | (at + size > self.nbytes)).any():
            raise KernelError(f"shared address out of {self.nbytes} bytes or not aligned to {size}")
        words = (run.block_of * (self.nbytes // 4) + at // 4)[:, None] + np.arange(size // 4)
        active = slice(None) if run.mask is None else run.mask
        self.check(run, words[active], np.arange(run.count)[active], write)
        return words

    def check(self, run, words, me, write: bool) -> None:
        for other, time in ((self.writer, self.written), (self.reader, self.read))[: 1 + write]:
            who, when = other[words], time[words]
            same = run.warp_of[np.maximum(who, 0)] == run.warp_of[me][:, None]
            same &= who >= 0
            last = self.block_sync[me][:, None]
            last = np.where(same, np.maximum(last, self.warp_sync[me][:, None]), last)
            bad = (who != -1) & (who != me[:, None]) & (when >= last)
            if bad.any():
                raise KernelError("a race in shared memory: no barrier since another thread")
        if write:
            self.writer[words], self.written[words] = me[:, None], self.now
        else:
            # -2: several threads read it since the barrier
            fresh = (self.reader[words] == -1) | (self.read[words] < self.block_sync[me][:, None])
            alone = fresh | (self.reader[words] == me[:, None])
            self.reader[words] = np.where(alone, me[:, None], -2)
            self.read[words] = self.now
