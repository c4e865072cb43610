"""Formats whose codes name values of a table: iq4_nl, iq4_xs, mxfp4, nvfp4."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pnrt.formats.base import Parts, Searched, field, half, join, largest, most
from pnrt.formats.fit import E2M1, NL, divide, round_scales
from pnrt.formats.fp8 import E8M0_FINDING, e4m3_magnitude
from pnrt.formats.legacy import pack_nibbles, unpack_nibbles

# what the largest weight is mapped to, one first scale each
NL_TRIES = np.concatenate([[127], np.arange(-7, 8) - 127])


class IQ4NL(Searched):
    """iq4_nl: d * NL[n]."""

    def block_parts(self, blocks: np.ndarray) -> Parts:
        return Parts(NL[unpack_nibbles(blocks[:, 2:])], half(blocks, 0)[:, None])

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        scale = self.fit.fit_nl(x, NL_TRIES)
        codes = self.fit.nl_codes(x, divide(np.float32(1), scale))
        return join(scale.astype(np.float16), pack_nibbles(codes))


class IQ4XS(Searched):
    """iq4_xs: d * (ls - 32) * NL[n], a 6-bit ls per 32 weights of a superblock."""

    def block_parts(self, blocks: np.ndarray) -> Parts:
        r = np.arange(8)
        high = field(blocks, 2, 1, np.uint16) >> (2 * r).astype(np.uint16) & 3
        low = blocks[:, 4 + r // 2] >> (4 * (r % 2)).astype(np.uint8) & 15
        small = (low | high << 4).astype(np.float32) - np.float32(32)
        codes = unpack_nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 256)
        return Parts(NL[codes], half(blocks, 0)[:, None] * small)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        scale = self.fit.fit_nl(x.reshape(-1, 32), NL_TRIES).reshape(-1, 8)
        _, small = round_scales(scale, 32)
        # codes come from the unrounded d, which is -0 for a superblock of zeros
        d = largest(scale) / np.float32(-32)
        step = d[:, None] * small
        codes = self.fit.nl_codes(x.reshape(-1, 32), divide(np.float32(1), step))
        ls = (small + 32).astype(np.uint16)
        high = np.bitwise_or.reduce((ls >> 4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
        low = (ls[:, ::2] & 15 | (ls[:, 1::2] & 15) << 4).astype(np.uint8)
        packed = pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)
        return join(d.astype(np.float16), high, low, packed)


class MXFP4(Searched):
    """mxfp4: 2^(e - 128) * E2M1[n], a power of two as scale."""

    halves = ()

    def block_parts(self, blocks: np.ndarray) -> Parts:
        unit = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        return Parts(E2M1[unpack_nibbles(blocks[:, 1:])], unit)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        amax = most(np.abs(x))
        # the logarithm is a float32, as in ggml: just below a large power of two it may round up
        exponent = np.floor(np.log2(np.where(amax > 0, amax, 1))) - 2 + 127
        e = np.where(amax > 0, np.clip(exponent, 0, 254), 0).astype(np.uint8)
        unit = np.ldexp(np.float32(1), e.astype(np.int32) - 128)
        return join(e, pack_nibbles(self.fit.nearest_e2m1(x, unit)))

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        for i in np.flatnonzero(blocks[:, 0] == 255):
            yield int(i), 0, *E8M0_FINDING


class NVFP4(Searched):
    """nvfp4: half an unsigned 8-bit float per 16 weights times E2M1[n]."""

    halves = ()

    def block_parts(self, blocks: np.ndarray) -> Parts:
        scale = blocks[:, :4]
        # as in ggml 0x7F is zero, and 0xFF is 480 like any code whose top bit is ignored
        unit = np.where(scale == 0x7F, np.float32(0), e4m3_magnitude(scale & 0x7F))
        unit *= np.float32(0.5)
        groups = blocks[:, 4:].reshape(-1, 8)
        codes = np.concatenate([groups & 15, groups >> 4], axis=1)
        return Parts(E2M1[codes].reshape(-1, 64), unit)

    def encode_blocks(self, x: np.ndarray) -> np.ndarray:
        groups = x.reshape(-1, 16)
        scale = self.scale_code(most(np.abs(groups)) / np.float32(6))
        codes = self.fit.nearest_e2m1(groups, e4m3_magnitude(scale) * np.float32(0.5))
        packed = codes[:, :8] | codes[:, 8:] << 4
        return join(scale.reshape(-1, 4), packed.reshape(-1, 32))

    def scale_code(self, u: np.ndarray) -> np.ndarray:
        """The scale byte for u >= 0: halves up; from 248 on 448, as in ggml."""
        bits = np.ascontiguousarray(u, np.float32).view(np.uint32)
        normal = ((bits + np.uint32(1 << 19)) >> np.uint32(20)) - np.uint32((127 - 7) << 3)
        small = np.minimum(np.trunc(u * np.float32(512) + np.float32(0.5)), 7)
        code = np.where(u < np.float32(2.0**-6), small, normal)
        return np.where(u >= 248, 0x7E, code).astype(np.uint8)

    def block_findings(self, blocks: np.ndarray) -> Iterable[tuple[int, int, str, str]]:
        return ()
