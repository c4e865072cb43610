"""The encodings of cyb's .model files, and the bitnet ternary table.

Despite their names u32 and u16 are signed fixed point. Arithmetic is float32; roundings go to
nearest, halves away from zero, and conversions saturate.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats.base import Format, Parts, field, join, most, round_away, whole_codes
from pnrt.formats.fit import divide
from pnrt.formats.floats import Scalar
from pnrt.formats.legacy import pack_nibbles, unpack_nibbles


def to_integer(x: np.ndarray, kind: type) -> np.ndarray:
    """Round float32 to a signed integer type, saturating."""
    limits = np.iinfo(kind)
    wide = round_away(x).astype(np.float64)
    return np.clip(wide, limits.min, limits.max).astype(np.dtype(kind).newbyteorder("<"))


class Fixed(Scalar):
    """Fixed point with half of the bits after the point."""

    def __init__(self, *row, kind: type):
        super().__init__(*row)
        self.kind = np.dtype(kind).newbyteorder("<")
        self.one = np.float32(1 << 4 * self.nbytes)

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return blocks.view(self.kind).astype(np.float32) / self.one

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        return to_integer(x * self.one, self.kind).view(np.uint8)

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        return ()


class Scaled(Format):
    """What cyb_q8 and cyb_q4 share: a 16-bit scale S / 256, the largest magnitude of the block."""

    halves = ()
    # the integer that stands for the largest magnitude, and the least and largest code
    full, range = 127, (-127, 127)

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """blocks -> [n, 32] int32."""
        return field(blocks, 2, 32, np.int8).astype(np.int32)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """[n, 32] float32 codes -> bytes."""
        return codes.astype(np.int8)

    def block_parts(self, blocks: np.ndarray) -> Parts:
        scale = field(blocks, 0, 1, np.int16).astype(np.float32)
        return Parts(self.codes(blocks), scale / np.float32(256 * self.full))

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        # the product is rounded before the division by 127
        scale = field(blocks, 0, 1, np.int16).astype(np.float32) / np.float32(256)
        return self.codes(blocks).astype(np.float32) * scale / np.float32(self.full)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        amax = most(np.abs(x))
        scale = to_integer(amax * np.float32(256), np.int16)
        factor = divide(np.float32(self.full), amax)
        codes = round_away(x * factor[:, None])
        return join(scale, self.pack(whole_codes(codes, factor, *self.range)))

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        scale = field(blocks, 0, 1, np.int16)[:, 0]
        for i in np.flatnonzero(scale < 0):
            yield int(i), 0, f"the scale S is {scale[i]}", "it must not be negative"


class Scaled4(Scaled):
    """cyb_q4: (n - 8) * S / 256 / 8, low nibbles first."""

    full, range = 8, (-8, 7)

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        return unpack_nibbles(blocks[:, 2:]) - 8

    def pack(self, codes: np.ndarray) -> np.ndarray:
        return pack_nibbles(codes + 8)


class Ternary(Format):
    """Two bits per weight by a table, without a scale; weight 4 k + s in bits 2 s of byte k.

    Rows are stored by fours and quantized by 32. A scale, if any, is a tensor of its own.
    """

    halves = ()

    def __init__(self, *row, values: tuple[int, int, int, int]):
        super().__init__(*row)
        self.values = np.array(values, np.int32)
        # the code of -1, 0 and +1: the first that has the value
        self.codes = np.array([values.index(v) for v in (-1, 0, 1)], np.uint8)

    def parts(self, rows: np.ndarray) -> Parts:
        codes = self.block_codes(self._blocks(rows)).reshape(len(rows), self.columns(rows.shape[1]))
        groups = -(-codes.shape[1] // self.group)
        return Parts(codes, np.ones((len(rows), groups), np.float32))

    def block_codes(self, blocks: np.ndarray) -> np.ndarray:
        """blocks [n, 1] -> [n, 4] int32."""
        return self.values[blocks >> np.arange(0, 8, 2, dtype=np.uint8) & 3]

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return self.block_codes(blocks).astype(np.float32)

    def quantize(self, x: np.ndarray, threads: int | None = None) -> np.ndarray:
        if np.ndim(x) == 2 and np.shape(x)[1] % self.group:
            raise FormatError(
                f"{self.name}: a row of {np.shape(x)[1]} weights; quantizing takes a multiple of "
                f"{self.group}. Choose another format for this tensor."
            )
        return super().quantize(x, threads)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        half = np.float32(0.5)
        codes = self.codes[(x >= half).astype(np.int8) - (x <= -half).astype(np.int8) + 1]
        shifted = codes << np.arange(0, 8, 2, dtype=np.uint8)
        return np.bitwise_or.reduce(shifted, axis=1)[:, None]
