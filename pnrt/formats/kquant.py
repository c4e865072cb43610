"""ggml's superblocks of 256 weights with small scales inside: q2_K to q6_K, q8_K activations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pnrt.formats.base import Format, Parts, Searched, field, half, join, largest
from pnrt.formats.fit import TINY, affine_levels, divide, round_scales


def unpack_planes(raw: np.ndarray) -> np.ndarray:
    """64 bytes of 2-bit codes: [n, 64] uint8 -> [n, 256]; 32 bytes hold 4 planes of 32 weights."""
    planes = raw.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return planes.reshape(len(raw), 256)


def pack_planes(codes: np.ndarray) -> np.ndarray:
    """[n, 256] codes 0..3 -> [n, 64] uint8."""
    planes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    shifted = planes << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(len(codes), 64)


def unpack_bits(raw: np.ndarray) -> np.ndarray:
    """32 bytes, bit r of byte i for weight 32 r + i: [n, 32] uint8 -> [n, 256] of 0 and 1."""
    bits = raw[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return bits.reshape(len(raw), 256)


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """[n, 256] of 0 and 1 -> [n, 32] uint8."""
    shifted = bits.astype(np.uint8).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=1)


def unpack_runs(raw: np.ndarray) -> np.ndarray:
    """128 bytes of nibbles; 32 bytes hold a run of 32 low and one of 32 high: -> [n, 256]."""
    runs = raw.reshape(-1, 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(len(raw), 256)


def pack_runs(codes: np.ndarray) -> np.ndarray:
    """[n, 256] codes 0..15 -> [n, 128] uint8."""
    runs = codes.astype(np.uint8).reshape(-1, 4, 2, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(len(codes), 128)


def unpack_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes of eight 6-bit scales and eight 6-bit minima: [n, 12] -> two [n, 8] uint8."""
    a, b, c = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    return scales, np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)


def pack_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Two [n, 8] of 0..63 -> [n, 12] uint8."""
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    return np.concatenate(
        [
            s[:, :4] | s[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    )


class Affine(Searched):
    """Superblocks of d * sc * n - dmin * mn; subclasses place the fields.

    top: largest code; top_scale: largest group scale; tries: the search's levels; objectives: what
    the search minimizes, see fit_affine's `absolute`: of several the best in squared error is kept.
    """

    top = 15
    top_scale = 63
    tries = affine_levels(15, -1.0, 21)
    objectives = (False,)

    def fields(self, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        """blocks -> codes [n, 256], scales and minima [n, m] uint8, d and dmin [n] float32."""
        raise NotImplementedError

    def assemble(self, codes, scales, minima, d, dmin) -> np.ndarray:
        """The reverse of fields, d and dmin as float16."""
        raise NotImplementedError

    def block_parts(self, blocks: np.ndarray) -> Parts:
        codes, scales, minima, d, dmin = self.fields(blocks)
        return Parts(codes.astype(np.int32), d[:, None] * scales, -(dmin[:, None] * minima))

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        best, *others = (self._searched(x, absolute) for absolute in self.objectives)
        for other in others:
            left, right = (self._error(x, blocks) for blocks in (best, other))
            best = np.where((right < left)[:, None], other, best)
        return best

    def _error(self, x: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        return np.square(self.decode_blocks(blocks) - x, dtype=np.float64).sum(axis=1)

    def _searched(self, x: np.ndarray, absolute: bool) -> np.ndarray:
        groups = x.reshape(-1, self.group)
        scale, low, codes = self.fit.fit_affine(groups, self.top, self.tries, absolute)
        d, scales = self._small(scale.reshape(len(x), -1))
        dmin, minima = self._small(low.reshape(len(x), -1))
        step = d.astype(np.float32)[:, None] * scales
        offset = dmin.astype(np.float32)[:, None] * minima
        codes = self.fit.recode(groups, step, offset, codes, 0, self.top)
        return self.assemble(codes.reshape(len(x), -1), scales, minima, d, dmin)

    def _small(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        top = np.float32(self.top_scale)
        # adding +0 makes a -0 the +0 that ggml starts with
        most = np.maximum(values.max(axis=1), 0) + np.float32(0)
        small = np.clip(np.rint(values * divide(top, most)[:, None]), 0, top)
        return (most / top).astype(np.float16), small


class Q2K(Affine):
    """q2_K: 2-bit codes, groups of 16."""

    halves = ((80, "d"), (82, "dmin"))
    top, top_scale = 3, 15
    tries = affine_levels(3, -0.5, 16)
    # ggml's is the absolute error; the squared one leaves a tenth less error, if not everywhere
    objectives = (False, True)

    def fields(self, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        small = blocks[:, :16]
        codes = unpack_planes(blocks[:, 16:80])
        return codes, small & 15, small >> 4, half(blocks, 80), half(blocks, 82)

    def assemble(self, codes, scales, minima, d, dmin) -> np.ndarray:
        small = scales.astype(np.uint8) | minima.astype(np.uint8) << 4
        return join(small, pack_planes(codes), d, dmin)


class Q4K(Affine):
    """q4_K: 4-bit codes, groups of 32."""

    halves = ((0, "d"), (2, "dmin"))

    def fields(self, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        scales, minima = unpack_scales(blocks[:, 4:16])
        return unpack_runs(blocks[:, 16:]), scales, minima, half(blocks, 0), half(blocks, 2)

    def assemble(self, codes, scales, minima, d, dmin) -> np.ndarray:
        return join(d, dmin, pack_scales(scales, minima), pack_runs(codes))


class Q5K(Affine):
    """q5_K: 5-bit codes, groups of 32; the fifth bits lie apart."""

    halves = ((0, "d"), (2, "dmin"))
    top = 31
    tries = affine_levels(31, -0.5, 16)

    def fields(self, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        scales, minima = unpack_scales(blocks[:, 4:16])
        codes = unpack_runs(blocks[:, 48:]) | unpack_bits(blocks[:, 16:48]) << 4
        return codes, scales, minima, half(blocks, 0), half(blocks, 2)

    def assemble(self, codes, scales, minima, d, dmin) -> np.ndarray:
        codes = codes.astype(np.uint8)
        small = pack_scales(scales, minima)
        return join(d, dmin, small, pack_bits(codes >> 4), pack_runs(codes & 15))


class Q3K(Searched):
    """q3_K: d * s * n, 3-bit codes with their high bits apart, signed 6-bit scales per 16."""

    halves = ((108, "d"),)

    def block_parts(self, blocks: np.ndarray) -> Parts:
        codes = unpack_planes(blocks[:, 32:96]).astype(np.int32)
        codes += 4 * unpack_bits(blocks[:, :32]).astype(np.int32) - 4
        low, high = blocks[:, 96:104], blocks[:, 104:108]
        nibbles = np.concatenate([low & 15, low >> 4], axis=1)
        twos = (high[:, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
        scales = (nibbles | twos << 4).astype(np.float32) - np.float32(32)
        return Parts(codes, half(blocks, 108)[:, None] * scales)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        groups = x.reshape(-1, 16)
        scale, codes = self.fit.refine_symmetric(groups, 4)
        d, scales = round_scales(scale.reshape(-1, 16), 32)
        step = d.astype(np.float32)[:, None] * scales
        codes = self.fit.recode(groups, step, None, codes, -4, 3).reshape(len(x), 256)
        # without any scale ggml leaves the scale bytes 0
        small = np.where(np.any(scales != 0, axis=1, keepdims=True), scales + 32, 0)
        small = small.astype(np.uint8)
        low = small[:, :8] & 15 | (small[:, 8:] & 15) << 4
        twos = (small >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        high = np.bitwise_or.reduce(twos, axis=1)
        return join(pack_bits(codes >> 2), pack_planes(codes & 3), low, high, d)


class Q6K(Searched):
    """q6_K: d * s * n, 6-bit codes with their high pairs apart, int8 scales per 16."""

    halves = ((208, "d"),)
    tries = -(32 + np.concatenate([[0], np.arange(-9, 0), np.arange(1, 10)]) / 10)

    def block_parts(self, blocks: np.ndarray) -> Parts:
        # 64 low bytes hold runs 0 and 1 of a half in their low, 2 and 3 in their high nibbles
        low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
        codes = low.reshape(-1, 256).astype(np.int32)
        codes += 16 * unpack_planes(blocks[:, 128:192]).astype(np.int32) - 32
        scales = field(blocks, 192, 16, np.int8).astype(np.float32)
        return Parts(codes, half(blocks, 208)[:, None] * scales)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        groups = x.reshape(-1, 16)
        scale, codes = self.fit.fit_symmetric(groups, -32, 31, self.tries)
        # like ggml, groups without magnitude take the lowest code; their scale makes it a zero
        codes[scale == 0] = 0
        scale = scale.reshape(-1, 16)
        # a superblock without magnitude is all zero bytes
        scale[np.abs(scale).max(axis=1) < TINY] = 0
        d, scales = round_scales(scale, 128)
        step = d.astype(np.float32)[:, None] * scales
        codes = self.fit.recode(groups, step, None, codes, -32, 31).reshape(len(x), 256)
        runs = (codes & 15).reshape(-1, 2, 2, 64)
        low = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(-1, 128)
        blocks = join(low, pack_planes(codes >> 4), scales.astype(np.int8), d)
        blocks[np.all(scale == 0, axis=1)] = 0
        return blocks


class Q8K(Format):
    """q8_K: d * n with a float32 d and the sums of every 16 codes; activations only."""

    weight = False

    def block_parts(self, blocks: np.ndarray) -> Parts:
        codes = field(blocks, 4, 256, np.int8).astype(np.int32)
        return Parts(codes, field(blocks, 0, 1, np.float32).astype(np.float32))

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        factor = divide(np.float32(-127), largest(x))
        codes = np.minimum(np.rint(x * factor[:, None]), 127).astype(np.int8)
        sums = codes.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
        return join(divide(np.float32(1), factor), codes, sums)

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        d = field(blocks, 0, 1, np.float32)[:, 0]
        for i in np.flatnonzero(~np.isfinite(d)):
            yield int(i), 0, f"scale d is {d[i]}", "it must be finite"
