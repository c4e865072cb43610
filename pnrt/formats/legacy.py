"""ggml's block formats of 32 weights: q8_0, q8_1, q4_0, q4_1, q5_0, q5_1.

Byte j of the nibbles holds weight j in its low and weight j + 16 in its high half.
The quantizers compute in float32, one rounding per operation, and match ggml's bytes.
"""

from __future__ import annotations

import numpy as np

from pnrt.formats.base import (
    Format,
    Parts,
    field,
    half,
    inverse,
    join,
    largest,
    most,
    round_away,
    whole_codes,
)


def unpack_nibbles(raw: np.ndarray) -> np.ndarray:
    """[n, 16] uint8 -> [n, 32] int32, low halves first."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.int32)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """[n, 32] codes 0..15 -> [n, 16] uint8, low halves first."""
    codes = codes.astype(np.uint8)
    return codes[:, :16] | codes[:, 16:] << 4


def unpack_fifth(bits: np.ndarray) -> np.ndarray:
    """Fifth bits of 32 codes, bit i for weight i: [n, 1] uint32 -> [n, 32] of 0 and 16."""
    return (bits >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(np.int32) * 16


def pack_fifth(codes: np.ndarray) -> np.ndarray:
    """[n, 32] codes 0..31 -> [n] uint32."""
    bits = codes.astype(np.uint32) >> np.uint32(4)
    return np.bitwise_or.reduce(bits << np.arange(32, dtype=np.uint32), axis=1)


class Bytes(Format):
    """q8_0: d * n with signed bytes n; also the format of activations."""

    def block_parts(self, blocks: np.ndarray) -> Parts:
        codes = field(blocks, self.nbytes - 32, 32, np.int8)
        return Parts(codes.astype(np.int32), half(blocks, 0)[:, None])

    def codes(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [n, 32] -> d [n] float32, codes [n, 32] int8."""
        d = most(np.abs(x)) / np.float32(127)
        factor = inverse(d)
        # where 1 / d overflows C leaves the codes undefined: here they stay within one byte
        codes = whole_codes(round_away(x * factor[:, None]), factor, -127, 127)
        return d, codes.astype(np.int8)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d, codes = self.codes(x)
        return join(d.astype(np.float16), codes)


class BytesWithSum(Bytes):
    """q8_1: as q8_0 with s = d * (sum of codes); activations only."""

    halves = ((0, "d"), (2, "s"))
    weight = False

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d, codes = self.codes(x)
        s = d * codes.sum(axis=1, dtype=np.int32).astype(np.float32)
        return join(d.astype(np.float16), s.astype(np.float16), codes)


class Centred(Format):
    """q4_0: d * (n - 8), the extreme weight on code 0, so d has the opposite sign."""

    zero = 8

    def block_parts(self, blocks: np.ndarray) -> Parts:
        return Parts(unpack_nibbles(blocks[:, 2:]) - self.zero, half(blocks, 0)[:, None])

    def codes(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [n, 32] -> d [n] float32, codes [n, 32] uint8."""
        # adding +0 makes the extreme of an all-zero block +0, so that its d is -0 as in ggml
        d = (largest(x) + np.float32(0)) / np.float32(-self.zero)
        factor = inverse(d)
        n = x * factor[:, None] + np.float32(self.zero + 0.5)
        # where 1 / d overflows C leaves the codes undefined: here they are clamped
        return d, whole_codes(n, factor, 0, 2 * self.zero - 1).astype(np.uint8)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d, codes = self.codes(x)
        return join(d.astype(np.float16), pack_nibbles(codes))


class Centred5(Centred):
    """q5_0: d * (n - 16), the fifth bits in a word of their own."""

    zero = 16

    def block_parts(self, blocks: np.ndarray) -> Parts:
        codes = unpack_nibbles(blocks[:, 6:]) + unpack_fifth(field(blocks, 2, 1, np.uint32))
        return Parts(codes - self.zero, half(blocks, 0)[:, None])

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d, codes = self.codes(x)
        return join(d.astype(np.float16), pack_fifth(codes), pack_nibbles(codes & 15))


class Offset(Format):
    """q4_1: d * n + m."""

    halves = ((0, "d"), (2, "m"))
    top = 15

    def block_parts(self, blocks: np.ndarray) -> Parts:
        d, m = half(blocks, 0)[:, None], half(blocks, 2)[:, None]
        return Parts(unpack_nibbles(blocks[:, 4:]), d, m)

    def codes(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [n, 32] -> d, m [n] float32, codes [n, 32] uint8."""
        # the first of equals decides the sign of a zero minimum
        m = np.take_along_axis(x, x.argmin(axis=1)[:, None], axis=1)
        # a block of zeros of both signs has the range +0
        d = (most(x) - m[:, 0] + np.float32(0)) / np.float32(self.top)
        factor = inverse(d)
        n = (x - m) * factor[:, None] + np.float32(0.5)
        return d, m[:, 0], whole_codes(n, factor, 0, self.top).astype(np.uint8)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d, m, codes = self.codes(x)
        return join(d.astype(np.float16), m.astype(np.float16), pack_nibbles(codes))


class Offset5(Offset):
    """q5_1: d * n + m, the fifth bits in a word of their own."""

    top = 31

    def block_parts(self, blocks: np.ndarray) -> Parts:
        codes = unpack_nibbles(blocks[:, 8:]) + unpack_fifth(field(blocks, 4, 1, np.uint32))
        return Parts(codes, half(blocks, 0)[:, None], half(blocks, 2)[:, None])

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d, m, codes = self.codes(x)
        fifth = pack_fifth(codes)
        return join(d.astype(np.float16), m.astype(np.float16), fifth, pack_nibbles(codes & 15))
