"""PN: pn3t (80 weights of 3 bits) and pn4t (64 weights of 4 bits), 34 bytes each.

A block is an fp16 scale d, signed, and eight 32-bit words. The code of weight t of a word sits at
bit bits * (t div 2) + 16 * (t mod 2): the two weights of a pair lie in the two half-words, at the
same place. The weight is d * (code - zero).

Reading the element index where the pair index belongs is the historical bug of this format.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats.base import Format, Parts, chunks, field, half, join, parallel

WORDS = 8
# the 36 candidate scales, as multiples of amax / zero, in ascending order
MULTIPLES = (50 + 2 * np.arange(36)) / 100


class PN(Format):
    """A PN format: codes per word and bits per code follow from the block.

    Args:
        bits: bits of a code; the zero point is half of the code range.
    """

    def __init__(self, *row, bits: int):
        super().__init__(*row)
        self.bits, self.zero = bits, 1 << bits - 1
        self.per_word = self.block // WORDS
        t = np.arange(self.per_word, dtype=np.uint32)
        self.shifts = np.uint32(bits) * (t // 2) + np.uint32(16) * (t % 2)
        used = np.bitwise_or.reduce(np.uint32(2 * self.zero - 1) << self.shifts)
        self.reserved = ~used

    def block_parts(self, blocks: np.ndarray) -> Parts:
        return Parts(self.codes(field(blocks, 2, WORDS, np.uint32)), half(blocks, 0)[:, None])

    def codes(self, words: np.ndarray) -> np.ndarray:
        """words [n, 8] uint32 -> codes - zero [n, B] int32."""
        codes = words[:, :, None] >> self.shifts & np.uint32(2 * self.zero - 1)
        return codes.reshape(len(words), self.block).astype(np.int32) - self.zero

    def pack(self, d: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """d [n] float16, codes [n, B] from 0 -> blocks [n, 34] uint8."""
        shifted = codes.astype(np.uint32).reshape(len(d), WORDS, -1) << self.shifts
        return join(d, np.bitwise_or.reduce(shifted, axis=2))

    def quantize(self, x: np.ndarray, threads: int | None = None) -> np.ndarray:
        """Quantize with the best of 36 scales: [N, K] float32 -> [N, row_bytes] uint8.

        The compiled search; the bytes are those of `quantize_reference` for any thread count.
        Raises FormatError as Format.quantize does.
        """
        # compiled code is loaded by the first quantization, not by the import
        from pnrt.formats.pn_search import search

        x = self._weights(x)
        out = np.empty((len(x), self.row_bytes(x.shape[1])), np.uint8)
        group = search(x, out, self.bits, threads)
        if group is not None:
            row, block = divmod(group, x.shape[1] // self.block)
            self._refuse_nonfinite(x[row : row + 1], row)
            raise self._too_large(row, block, x[row].reshape(-1, self.block)[block])
        return out

    def quantize_reference(self, x: np.ndarray) -> np.ndarray:
        """The rule itself in NumPy, the judge of the compiled search; same arguments and errors."""
        x = self._weights(x)
        out = np.empty((len(x), self.row_bytes(x.shape[1])), np.uint8)

        def work(part: slice) -> None:
            self._refuse_nonfinite(x[part], part.start)
            blocks, failed = self.encode_reference(x[part].reshape(-1, self.block))
            out[part] = blocks.reshape(-1, out.shape[1])
            for group in np.flatnonzero(failed):
                row, block = divmod(int(group), x.shape[1] // self.block)
                raise self._too_large(
                    part.start + row, block, x[part][row].reshape(-1, self.block)[block]
                )

        parallel(work, chunks(*x.shape), threads=1)
        return out

    def encode_reference(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [n, B] float32 -> blocks [n, 34] uint8, failed [n] bool (no finite scale)."""
        w = x.astype(np.float64)
        amax = np.abs(w).max(axis=1)
        sign = np.where(-w.min(axis=1) > w.max(axis=1), 1.0, -1.0)
        best = np.full(len(w), np.inf)
        scale = np.zeros(len(w), np.float16)
        usable = np.zeros(len(w), bool)
        with np.errstate(over="ignore"):
            for m in MULTIPLES:
                s = (sign * m * amax / self.zero).astype(np.float16)
                usable |= np.isfinite(s)
                error = self._error(w, s)
                # equal errors go to the larger multiple, which comes later
                better = np.isfinite(s) & (s != 0) & (error <= best)
                best = np.where(better, error, best)
                scale = np.where(better, s, scale)
        codes = np.where(scale[:, None] != 0, self._nearest(w, scale), self.zero)
        return self.pack(scale, codes), ~usable

    def _nearest(self, w: np.ndarray, s: np.ndarray) -> np.ndarray:
        wide = s.astype(np.float64)[:, None]
        codes = np.rint(np.divide(w, wide, out=np.zeros_like(w), where=wide != 0)) + self.zero
        return np.clip(codes, 0, 2 * self.zero - 1)

    def _error(self, w: np.ndarray, s: np.ndarray) -> np.ndarray:
        # an infinite scale is skipped by the caller: keep it out of the arithmetic
        s = np.where(np.isfinite(s), s, np.float16(0))
        left = w - s.astype(np.float64)[:, None] * (self._nearest(w, s) - self.zero)
        # summed from the first weight to the last: the order decides equal errors
        return np.cumsum(left * left, axis=1)[:, -1]

    def _too_large(self, row: int, block: int, weights: np.ndarray) -> FormatError:
        return FormatError(
            f"{self.name}: row {row} block {block} has the magnitude {np.abs(weights).max()}; no "
            f"fp16 scale reaches it. The weights are too large for this format: use another."
        )

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        yield from super().block_findings(blocks)
        # a quick look at all half-words first: nearly always there is nothing to find
        halves = np.ascontiguousarray(blocks).view("<u2")
        if not (self.reserved and np.bitwise_or.reduce(halves, axis=0)[1:].max() & 0x8000):
            return
        words = field(blocks, 2, WORDS, np.uint32)
        for i, w in np.argwhere(words & self.reserved):
            bits = [b for b in range(32) if int(words[i, w] & self.reserved) >> b & 1]
            yield (
                int(i),
                int(2 + 4 * w),
                f"word {w} has bit {' and '.join(map(str, bits))} set",
                f"{self.name} reserves bits 15 and 31",
            )
