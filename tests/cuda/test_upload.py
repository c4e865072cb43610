"""Matrices arrive packed, whatever the pieces."""

import numpy as np
import pytest

from pnrt.cuda import upload
from pnrt.cuda.pack import CODECS, layout
from pnrt.cuda.packers import pack, pack_rows
from pnrt.cuda.standin import StandIn
from pnrt.errors import FormatError
from pnrt.formats import FORMATS

from .plain_pack import plain_rows
from .test_matmul import random_rows, widths


@pytest.mark.parametrize("name", CODECS)
def test_a_kernel_packs_as_numpy_does(name):
    """Rows of one block, of partial units, of many; together and alone."""
    for k in filter(None, widths(name)):
        rows = random_rows(name, 3, k)
        planes = pack_rows(name, rows, k)
        assert tuple(plane.shape[1] for plane in planes) == layout(name, 3, k).row_bytes
        for packed, expected in zip(planes, plain_rows(name, rows, k), strict=True):
            np.testing.assert_array_equal(packed, expected)
        alone = pack_rows(name, rows[1:2], k)
        for whole, one in zip(planes, alone, strict=True):
            np.testing.assert_array_equal(whole[1:2], one)


def test_eight_bit_floats_without_a_value_are_zero():
    rows = np.zeros((1, 34), np.uint8)
    rows[0, 2:6] = 0x80, 0x7F, 0xFF, 0x81
    codes = pack_rows("e4m3", rows, 32)[0].reshape(-1)
    assert list(codes[:4]) == [0, 0, 0, 0x81]
    np.testing.assert_array_equal(codes, plain_rows("e4m3", rows, 32)[0].reshape(-1))


@pytest.mark.parametrize("piece", [1, 700, 1 << 20])
def test_pieces_make_the_whole(piece, monkeypatch):
    monkeypatch.setattr(upload, "PIECE", piece)
    device, rng, seen = StandIn(1 << 20), np.random.default_rng(0), []
    matrices = []
    for name, n, k in (("pn3t", 7, 240), ("q4_K", 5, 512), ("f16", 3, 33)):
        rows = FORMATS[name].quantize(rng.standard_normal((n, k)).astype(np.float32))
        weight = layout(name, n, k)
        matrices.append(upload.Matrix(weight, rows, device.allocate(weight.nbytes)))
    upload.upload(device, matrices, threads=2, progress=seen.append)
    for matrix in matrices:
        weight, data = pack(matrix.weight.format, matrix.rows, matrix.weight.K)
        got = device.read(matrix.address, weight.nbytes, np.uint8)
        for offset, size in zip(weight.offsets, weight.row_bytes, strict=True):
            used = slice(offset, offset + size * weight.N)
            np.testing.assert_array_equal(got[used], data[used])
    assert sum(seen) == sum(m.rows.size for m in matrices)


def test_what_a_piece_raises_comes_through():
    device, weight = StandIn(1 << 20), layout("q4_0", 2, 64)
    broken = upload.Matrix(weight, np.zeros((2, 35), np.uint8), device.allocate(weight.nbytes))
    with pytest.raises(FormatError, match="a row of 35 bytes"):
        upload.upload(device, [broken])
    broken = broken._replace(rows=np.zeros((2, 54), np.uint8))
    with pytest.raises(FormatError, match="rows of 54 bytes; q4_0 with K = 64 needs 36"):
        upload.upload(device, [broken])
