"""8-bit floats: e4m3 with an fp16 scale, mxfp8 with a power of two, in two layouts.

A code is a sign, four exponent and three mantissa bits; its value is a multiple of 2^-9, so that
512 * value is the integer code of the arithmetic contract and 2^-9 belongs to the scale.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats.base import Format, Parts, half, inverse, join, most

LARGEST, LEAST_NORMAL = np.float32(448), np.float32(2.0**-6)
E8M0_FINDING = ("the scale exponent is 255, a NaN", "it must be 0 to 254")


def _integers() -> np.ndarray:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    magnitude = np.where(exponent == 0, mantissa, (8 + mantissa) << np.maximum(exponent - 1, 0))
    # the two NaN codes have no integer; they are refused before anyone multiplies
    magnitude[0x7F] = 0
    return np.concatenate([magnitude, -magnitude]).astype(np.int32)


# 512 * value of each code, 0 for the NaN codes 0x7F and 0xFF
INTEGERS = _integers()
# value of each code; 0x80 is -0
VALUES = INTEGERS.astype(np.float32) / np.float32(512)
VALUES[[0x7F, 0x80, 0xFF]] = np.nan, -0.0, np.nan


def e4m3_magnitude(codes: np.ndarray) -> np.ndarray:
    """Values of codes without sign, 0x7F as 480: [...] uint8 -> float32."""
    return np.where(codes == 0x7F, np.float32(480), VALUES[codes])


def encode_away(x: np.ndarray) -> np.ndarray:
    """float32 -> code by the e4m3 proposal: halves away from zero, saturating, NaN and -0 to 0."""
    magnitude = np.minimum(np.abs(x), LARGEST)
    steps = magnitude.view(np.int32) + np.int32(1 << 19) >> np.int32(20)
    small = np.fmin(magnitude, LEAST_NORMAL) * np.float32(512) + np.float32(0.5)
    code = _code(small.astype(np.int32), steps)
    return np.where(np.isnan(x), np.uint8(0), code | (x < 0).astype(np.uint8) << 7)


def encode_even(x: np.ndarray) -> np.ndarray:
    """float32 -> code by the OCP rule: halves to even, saturating, NaN to 0x7F, -0 kept."""
    magnitude = np.minimum(np.abs(x), LARGEST)
    bits = magnitude.view(np.int32)
    odd = bits >> np.int32(20) & np.int32(1)
    steps = bits + (np.int32((1 << 19) - 1) + odd) >> np.int32(20)
    # the last bit of a float32 beside 2^14 is 2^-9, that of a small code: adding rounds to it
    small = np.fmin(magnitude, LEAST_NORMAL) + np.float32(2.0**14)
    code = _code(small.view(np.int32) & np.int32(15), steps)
    code = np.where(np.isnan(x), np.uint8(0x7F), code)
    return code | np.signbit(x).astype(np.uint8) << 7


def _code(small: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The code of multiples of 2^-9, at most 8 of them, and steps of an eighth of a binade above.

    Without a choice between the two, which is slow where it cannot be foreseen.
    """
    return (small + np.maximum(steps - np.int32((127 - 6) << 3), 0)).astype(np.uint8)


class FP8(Format):
    """What the 8-bit floats share: codes in a row, scales that the subclass reads."""

    halves = ()
    first_code = 1

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """blocks -> [n, B] uint8."""
        return blocks[:, self.first_code : self.first_code + self.block]

    def scales(self, blocks: np.ndarray) -> np.ndarray:
        """blocks -> [n, B / 32] float32."""
        raise NotImplementedError

    def block_parts(self, blocks: np.ndarray) -> Parts:
        return Parts(INTEGERS.take(self.codes(blocks)), self.scales(blocks) * np.float32(2.0**-9))

    def decode_blocks(self, blocks: np.ndarray) -> np.ndarray:
        # through the values, which know -0 and NaN
        values = VALUES.take(self.codes(blocks)).reshape(len(blocks), -1, 32)
        return (values * self.scales(blocks)[:, :, None]).reshape(len(blocks), -1)

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        yield from super().block_findings(blocks)
        yield from self.block_lost(blocks)

    def block_lost(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        first, nan = self.first_code, self.codes(blocks) & 0x7F == 0x7F
        # looking for places is slow, and nearly always there are none
        for i, e in np.argwhere(nan) if nan.any() else ():
            code = int(blocks[i, first + e])
            yield int(i), int(first + e), f"code {code:#04x} is a NaN", "codes must be finite"


class E4M3(FP8):
    """e4m3: value * d, the scale a half."""

    halves = ((0, "d"),)
    first_code = 2

    def scales(self, blocks: np.ndarray) -> np.ndarray:
        return half(blocks, 0)[:, None]

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        d = most(np.abs(x)) / LARGEST
        return join(d.astype(np.float16), encode_away(x * inverse(d)[:, None]))


class MXFP8(FP8):
    """mxfp8: value * 2^(e - 127); the exponent, then 32 codes.

    rule: "ceil" never clips (the ggml proposal), "floor" is OCP's, where the largest may saturate.
    """

    first_exponent = 0
    rule = "ceil"

    def with_rule(self, rule: str) -> MXFP8:
        """The same format quantizing by the other scale rule. Raises FormatError."""
        if rule not in ("ceil", "floor"):
            raise FormatError(
                f"{self.name}: scale rule {rule!r}; there are ceil and floor. Choose one of them."
            )
        other = copy.copy(self)
        other.rule = rule
        return other

    def stored_exponents(self, blocks: np.ndarray) -> np.ndarray:
        """blocks -> [n, B / 32] uint8."""
        return blocks[:, self.first_exponent : self.first_exponent + self.block // 32]

    def scales(self, blocks: np.ndarray) -> np.ndarray:
        return exponent_scale(self.stored_exponents(blocks))

    def exponents(self, amax: np.ndarray) -> np.ndarray:
        """Scale exponents for largest magnitudes: [...] float32 -> uint8."""
        if self.rule == "ceil":
            mantissa, exponent = np.frexp(amax / LARGEST)
            e = exponent - (mantissa == 0.5) + 127
            return np.where(amax > 0, np.clip(e, 0, 254), 127).astype(np.uint8)
        exponent = np.frexp(amax)[1] - 1
        return np.where(amax > 0, np.clip(exponent - 8 + 127, 0, 254), 0).astype(np.uint8)

    def encode(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Groups [m, 32] -> exponents [m], codes [m, 32] uint8."""
        e = self.exponents(most(np.abs(x)))
        # a power of two, subnormal at the least: the product is rounded once
        factor = np.ldexp(np.float32(1), 127 - e.astype(np.int32))
        return e, encode_even(x * factor[:, None])

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        return join(*self.encode(x))

    def block_lost(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        yield from super().block_lost(blocks)
        for i, run in np.argwhere(self.stored_exponents(blocks) == 255):
            yield int(i), int(self.first_exponent + run), *E8M0_FINDING


class MXFP8Runs(MXFP8):
    """mxfp8 in superblocks of 256: eight runs of 32 codes, then their eight exponents."""

    first_code, first_exponent = 0, 256

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        e, codes = self.encode(x.reshape(-1, 32))
        return join(codes.reshape(-1, 256), e.reshape(-1, 8))


def exponent_scale(e: np.ndarray) -> np.ndarray:
    """Exponent bytes -> 2^(e - 127) float32, NaN for 255."""
    scale = np.ldexp(np.float32(1), np.minimum(e.astype(np.int32), 254) - 127)
    return np.where(e == 255, np.float32(np.nan), scale)
