"""Scalar formats: f32, f16, bf16. One weight is one block; there are no codes and no scales."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats.base import Format, Parts


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bfloat16 bits, to nearest even; a NaN keeps its upper payload, quiet."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), bits >> np.uint32(16) | np.uint32(64), rounded).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bits -> float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Scalar(Format):
    """A plain number per weight."""

    dtype = np.float32
    # all ones in these bits: infinite or not a number
    exponent = 0x7F800000

    def parts(self, rows: np.ndarray) -> Parts:
        raise FormatError(
            f"{self.name}: asked for codes and scales; its weights are plain numbers. Use decode."
        )

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return blocks.view(np.dtype(self.dtype).newbyteorder("<")).astype(np.float32)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.dtype(self.dtype).newbyteorder("<")).view(np.uint8)

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        bits = blocks.view(f"<u{self.nbytes}")[:, 0]
        for i in np.flatnonzero(bits & self.exponent == self.exponent):
            value = self.decode_blocks(blocks[i : i + 1])[0, 0]
            yield int(i), 0, f"the weight is {value}", "it must be finite"


class Half(Scalar):
    """IEEE half precision."""

    dtype = np.float16
    exponent = 0x7C00


class BFloat(Scalar):
    """The upper half of a float32."""

    exponent = 0x7F80

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return bf16_values(blocks.view("<u2"))

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        return bf16_bits(x).astype("<u2").view(np.uint8)
