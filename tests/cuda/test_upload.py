"""Matrices arrive packed, whatever the pieces."""

import numpy as np
import pytest

from pnrt.cuda import upload
from pnrt.cuda.pack import layout, pack
from pnrt.cuda.standin import StandIn
from pnrt.errors import FormatError
from pnrt.formats import FORMATS


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
