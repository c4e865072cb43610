"""The planes of pnrt.cuda.pack in NumPy, from the parts of a format: what packers.py is held to."""

import numpy as np

from pnrt.cuda.pack import CODECS, groups_of, layout
from pnrt.formats import FORMATS, fp8
from pnrt.formats.base import field
from pnrt.formats.kquant import unpack_scales


def plain_rows(name, rows, K):
    """rows [n, row bytes] uint8 of a format -> each plane [n, its row bytes] uint8."""
    codec, units = CODECS[name], layout(name, 1, K).units
    planes = _PACKERS[codec.layout](name, np.ascontiguousarray(rows), units)
    return tuple(np.ascontiguousarray(p).reshape(len(rows), -1).view(np.uint8) for p in planes)


def quads(words: np.ndarray) -> np.ndarray:
    """[n, units, words] -> [n, quad, units, 4]."""
    n, units, count = words.shape
    return words.reshape(n, units, count // 4, 4).transpose(0, 2, 1, 3)


def _padded(a: np.ndarray, width: int) -> np.ndarray:
    return np.pad(a, ((0, 0), (0, width - a.shape[1])))


def _pack_pn3t(name, rows, units):
    blocks = rows.reshape(len(rows), -1, 34)
    blocks = np.pad(blocks, ((0, 0), (0, units * 2 - blocks.shape[1]), (0, 0)))
    flat = blocks.reshape(-1, 34)
    # kernels rely on the reserved bits being zero
    words = field(flat, 2, 8, np.uint32).reshape(len(rows), units, 16) & np.uint32(0x7FFF7FFF)
    return quads(words), field(flat, 0, 1, np.uint16)


def _unsigned(name, rows, units):
    """Stored codes [n, units, 32] uint8, zeros of the format behind the last."""
    form, zero = FORMATS[name], CODECS[name].zero
    codes = form.parts(rows).codes + zero
    codes = np.pad(codes, ((0, 0), (0, units * 32 - codes.shape[1])), constant_values=zero)
    return codes.astype(np.uint8).reshape(len(rows), units, 32)


def _pack_nibble(name, rows, units):
    if name == "pn4t":
        flat = rows.reshape(-1, 34)
        words = field(flat, 2, 8, np.uint32).reshape(len(rows), units, 4)
        return quads(words ^ np.uint32(0x80008000)), field(flat, 0, 1, np.uint16)
    codes = _unsigned(name, rows, units).reshape(len(rows), units, 4, 4, 2).astype(np.uint32)
    shifts = (4 * np.arange(4)[:, None] + 16 * np.arange(2)).astype(np.uint32)
    words = np.bitwise_or.reduce(codes << shifts, axis=(3, 4)) ^ np.uint32(0x80008000)
    return quads(words), *_nibble_scales(name, rows, units)


def _nibble_scales(name, rows, units):
    flat = rows.reshape(-1, FORMATS[name].nbytes)
    if name == "q4_0":
        return (field(flat, 0, 1, np.uint16),)
    if name == "q4_1":
        return (field(flat, 0, 1, np.uint32),)
    scales, minima = unpack_scales(flat[:, 4:16])
    return field(flat, 0, 1, np.uint32), np.stack([scales, minima], axis=-1)


def _pack_three(name, rows, units):
    codes = _unsigned(name, rows, units).reshape(len(rows), units, 16, 2).astype(np.uint32)
    words = np.zeros((len(rows), units, 4), np.uint32)
    shifts = (3 * np.arange(5)[:, None] + 16 * np.arange(2)).astype(np.uint32)
    for w in range(3):
        words[..., w] = np.bitwise_or.reduce(codes[:, :, 5 * w : 5 * w + 5] << shifts, axis=(2, 3))
        top = (codes[:, :, 15] >> np.uint32(w)) & np.uint32(1)
        words[..., w] |= top[..., 0] << np.uint32(15) | top[..., 1] << np.uint32(31)
    flat = rows.reshape(-1, FORMATS[name].nbytes)
    d = field(flat, 108, 1, np.uint16).astype(np.uint32).repeat(8, axis=1)
    small = _q3_scales(flat).reshape(-1, 8, 2).view(np.uint8).astype(np.uint32)
    words[..., 3] = (d | small[..., 0] << 16 | small[..., 1] << 24).reshape(len(rows), units)
    return (words,)


def _q3_scales(flat: np.ndarray) -> np.ndarray:
    """The signed 6-bit scales of q3_K blocks: [n, 110] -> [n, 16] int8."""
    low, high = flat[:, 96:104], flat[:, 104:108]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    twos = (high[:, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    return ((nibbles | twos << 4).astype(np.int8) - np.int8(32)).astype(np.int8)


def _group_planes(name, rows, units, scale, offset):
    groups, width = groups_of(name), FORMATS[name].group
    if width > 32:
        scale = scale.repeat(width // 32, axis=1)
    wanted = units * groups
    planes = [p for p in (scale, offset) if p is not None]
    # behind the end of a row the codes are zero and any scale does
    planes = [np.pad(p, ((0, 0), (0, max(0, wanted - p.shape[1]))), mode="edge") for p in planes]
    planes = [p[:, :wanted].astype(np.float32) for p in planes]
    return planes


def _pack_byte(name, rows, units):
    codes, scale, offset = FORMATS[name].parts(rows)
    codes = _padded(codes, units * 32).astype(np.int8).view(np.uint8)
    codes[:, ::2] ^= 0x80
    words = quads(codes.view(np.uint32).reshape(len(rows), units, 8))
    if name == "q8_0":
        return words, field(rows.reshape(-1, 34), 0, 1, np.uint16)
    if CODECS[name].scale == "cyb":
        whole = field(rows.reshape(-1, FORMATS[name].nbytes), 0, 1, np.int16).astype(np.float32)
        offset = (whole / np.float32(256)).reshape(len(rows), -1)
    return words, *_group_planes(name, rows, units, scale, offset)


def _pack_e4m3(name, rows, units):
    codes, scale, offset = FORMATS[name].parts(rows)
    order = np.argsort(fp8.INTEGERS, kind="stable")
    found = np.searchsorted(fp8.INTEGERS, _padded(codes, units * 32), sorter=order)
    words = order[found].astype(np.uint8).view(np.uint32).reshape(len(rows), units, 8)
    return quads(words), *_group_planes(name, rows, units, scale, offset)


def _pack_floats(name, rows, units):
    dtype = {"f16": np.uint16, "bf16": np.uint16}.get(name, np.float32)
    values = rows.view(dtype) if name in ("f16", "bf16") else FORMATS[name].decode(rows)
    words = _padded(values, units * 32).view(np.uint32).reshape(len(rows), units, -1)
    return (quads(words),)


_PACKERS = {
    "pn3t": _pack_pn3t, "nibble": _pack_nibble, "three": _pack_three, "byte": _pack_byte,
    "e4m3": _pack_e4m3, "f32": _pack_floats, "half": _pack_floats, "bf16": _pack_floats,
}  # fmt: skip
