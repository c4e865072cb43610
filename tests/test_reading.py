"""Weights on their way from the file: slice by slice, each validated, its pages given back."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import pnrt
from pnrt import backend, reading
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.cpu import pack
from pnrt.cuda.backend import CudaBackend
from pnrt.cuda.standin import StandIn
from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from pnrt.models.presets import blueprint
from pnrt.models.rotation import Rotation
from pnrt.synth import random_blocks, scales, synthesize
from tests.builders import tiny
from tests.ops.cases import random_rows


@pytest.mark.parametrize("name", ["pn3t", "pn4t", "q8_0", "f16"])
@pytest.mark.parametrize("n", [1, 16, 70])
def test_slices_are_packed_as_the_whole_is(monkeypatch, name, n):
    k, told = 320, []
    rows = random_rows(name, n, k)
    whole = pack.pack(name, rows, k, 2)
    monkeypatch.setattr(pack, "SLICE", 33 * rows.shape[1])
    sliced = pack.pack(name, rows, k, 2, lambda *rows: told.append(rows))
    np.testing.assert_array_equal(sliced.data, whole.data)
    assert [first for first, _ in told] == list(range(0, n, 32))
    assert [last for _, last in told] == [min(first + 32, n) for first, _ in told]


def test_every_backend_announces_every_row_once_in_order():
    rows = random_rows("pn4t", 50, 128)
    engines = [backend.open("cpu"), backend.open("reference"), CudaBackend(StandIn(1 << 20))]
    for engine in engines:
        told = []
        engine.pack("pn4t", rows, 128, lambda *rows, told=told: told.append(rows))
        assert told[0][0] == 0
        assert told[-1][1] == 50
        assert all(a[1] == b[0] for a, b in itertools.pairwise(told))


@pytest.mark.parametrize("row", [0, 40, 63])
def test_a_bad_block_is_named_wherever_its_slice_begins(monkeypatch, tmp_path, row):
    monkeypatch.setattr(pack, "SLICE", 1)
    monkeypatch.setattr(reading, "SLICE", 1)
    rows = random_rows("pn4t", 64, 128)
    rows[row, 34:36] = 0, 0x7C
    one = TensorPlan("m.weight", (64, 128), 125, rows.nbytes, lambda: iter([rows]))
    write_gguf(tmp_path / "m.gguf", [], [one])
    with open_gguf(tmp_path / "m.gguf") as file:
        reader = reading.WeightReader(file, Rotation())
        byte = file.tensors["m.weight"].offset + row * 68 + 34
        for read in (
            lambda: reader.rows("m.weight"),
            lambda: reader._pack(backend.open("cpu"), "m.weight", None),
        ):
            with pytest.raises(FormatError, match=rf"row {row} block 1 \(byte {byte:#x}\)"):
                read()
        reader.validate = False
        assert reader._pack(backend.open("cpu"), "m.weight", None).N == 64


def resident(path: Path) -> int:
    """Bytes of a file's pages that this process maps at the moment."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say")
def test_no_page_of_the_file_is_held_after_loading(tmp_path):
    from pnrt.formats import FORMATS

    path = tmp_path / "m.gguf"
    form = FORMATS["pn4t"]
    draw = np.random.Generator(np.random.SFC64(0))
    rows = random_blocks(form, 4096 * 32, draw, scales(form, 0.02)).reshape(4096, -1)
    one = TensorPlan("m.weight", (4096, 2048), 125, rows.nbytes, lambda: iter([rows]))
    write_gguf(path, [], [one])
    with open_gguf(path) as file:
        reader = reading.WeightReader(file, Rotation())
        assert file.data("m.weight").sum() > 0
        assert resident(path) > 4_000_000
        reader.rows("m.weight")
        assert resident(path) < 200_000
        assert file.data("m.weight").sum() > 0
        reader._pack(backend.open("cpu"), "m.weight", None)
        assert resident(path) < 200_000


def test_a_synthetic_model_loads_and_runs(tmp_path):
    """Every format of the 27B model's mix at once; the reference has kernels for all of them."""
    synthesize(blueprint("tiny-qwen35"), tmp_path / "tiny.gguf")
    tokens = [3, 500, 17]
    with pnrt.load(tmp_path / "tiny.gguf", backend="reference", context=8) as model:
        logits = model.logits(tokens)
        assert model.rotation.kind == "hadamard"
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 20


@pytest.mark.parametrize(("name", "byte", "value"), [("e4m3", 5, 0xFF), ("mxfp8", 33, 255)])
def test_codes_that_products_would_not_show_are_refused_always(tmp_path, name, byte, value):
    """As an integer a NaN code is a zero: refused by pack, and by a load that does not validate."""
    rows = np.zeros((3, 2 * FORMATS[name].nbytes), np.uint8)
    rows[2, byte] = value
    block = byte // FORMATS[name].nbytes
    for engine in (backend.open("cpu"), CudaBackend(StandIn(1 << 20))):
        with pytest.raises(FormatError, match=f"row 2 block {block}"):
            engine.pack(name, rows, 64)
    path = tiny(tmp_path / "m.gguf", [], {"t": (4000, (3, 64), rows)})
    with open_gguf(path, extra_types={4000: name}) as file:
        reader = reading.WeightReader(file, Rotation(), validate=False)
        with pytest.raises(FormatError, match=f"t row 2 block {block}"):
            reader.rows("t")
