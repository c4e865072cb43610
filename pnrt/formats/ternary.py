"""ggml's ternary superblocks of 256: tq1_0 (five digits in a byte), tq2_0 (two bits each)."""

from __future__ import annotations

import numpy as np

from pnrt.formats.base import Format, Parts, half, inverse, join, most, round_away, whole_codes
from pnrt.formats.kquant import pack_planes, unpack_planes

# (first byte, bytes, digits used of five): digit k of byte m is weight bytes * k + m of its part
PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))


class TQ2(Format):
    """tq2_0: d * (t - 1) with 2-bit t."""

    halves = ((64, "d"),)

    def digits(self, blocks: np.ndarray) -> np.ndarray:
        """blocks -> [n, 256] t."""
        return unpack_planes(blocks[:, :64])

    def pack(self, digits: np.ndarray) -> np.ndarray:
        """The reverse of digits."""
        return pack_planes(digits)

    def block_parts(self, blocks: np.ndarray) -> Parts:
        d = half(blocks, self.halves[0][0])[:, None]
        return Parts(self.digits(blocks).astype(np.int32) - 1, d)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d = most(np.abs(x))
        factor = inverse(d)
        # where 1 / d overflows C leaves the codes undefined: here they stay ternary
        digits = whole_codes(round_away(x * factor[:, None]), factor, -1, 1) + 1
        return join(self.pack(digits.astype(np.uint8)), d.astype(np.float16))


class TQ1(TQ2):
    """tq1_0: d * (t - 1), five base-3 digits of a byte as a fraction of 256."""

    halves = ((52, "d"),)

    def digits(self, blocks: np.ndarray) -> np.ndarray:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
        parts = []
        for start, count, used in PARTS:
            fraction = (blocks[:, None, start : start + count] * powers[:used]).astype(np.uint16)
            parts.append((fraction * 3 >> 8).reshape(len(blocks), used * count))
        return np.concatenate(parts, axis=1)

    def pack(self, digits: np.ndarray) -> np.ndarray:
        packed, first = [], 0
        for _, count, used in PARTS:
            part = digits[:, first : first + count * used].reshape(-1, used, count)
            weights = np.array([81, 27, 9, 3, 1], np.uint32)[:used, None]
            # rounded up, so that the digits come back by multiplying and taking the high byte
            packed.append((((part * weights).sum(axis=1) * 256 + 242) // 243).astype(np.uint8))
            first += count * used
        return np.concatenate(packed, axis=1)
