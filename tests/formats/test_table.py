"""The table of formats: sizes, ids, and what a user of it may rely on."""

import subprocess
import sys

import gguf
import numpy as np
import pytest

from pnrt.errors import FormatError
from pnrt.formats import FORMATS, STOCK, by_id, get

# gguf's python package gives q8_1 four bytes too many; the struct in C has 36
WRONG_IN_GGUF = {9}


def test_sizes_agree_with_gguf():
    ours = {f.type_id: (f.block, f.nbytes) for f in FORMATS.values() if f.type_id is not None}
    ours |= {type_id: row[1:] for type_id, row in STOCK.items()}
    theirs = {int(t): size for t, size in gguf.GGML_QUANT_SIZES.items()}
    assert len(theirs) > 30
    for type_id in theirs.keys() - WRONG_IN_GGUF:
        assert ours[type_id] == theirs[type_id], type_id


def test_ids():
    assert by_id(124) is FORMATS["pn3t"]
    assert by_id(125) is FORMATS["pn4t"]
    assert by_id(42) is None
    assert STOCK[42] == ("q2_0", 64, 18)
    assert by_id(42, {42: "e4m3"}) is FORMATS["e4m3"]
    assert by_id(999) is None
    ids = [f.type_id for f in FORMATS.values() if f.type_id is not None]
    assert len(ids) == len(set(ids))
    assert not set(ids) & set(STOCK)


def test_unknown_name_lists_the_names():
    with pytest.raises(FormatError, match="pn3t"):
        get("q9_9")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_shapes(form):
    assert form.unit == (160 if form.name == "pn3t" else 32)
    assert form.bits_per_weight == 8 * form.nbytes / form.block
    columns = 6 * max(form.block, form.group)
    assert form.columns(form.row_bytes(columns)) == columns
    rows = form.quantize(np.zeros((3, columns), np.float32))
    assert rows.shape == (3, form.row_bytes(columns))
    assert not form.decode(rows).any()
    assert form.findings(rows) == []
    assert form.decode(rows[:0]).shape == (0, columns)
    assert form.quantize(np.zeros((0, columns), np.float32)).shape == (0, rows.shape[1])
    if form.group:
        parts = form.parts(rows)
        assert parts.codes.dtype == np.int32
        assert parts.codes.shape == (3, columns)
        assert parts.scale.dtype == np.float32
        assert parts.scale.shape == (3, columns // form.group)
        has_offset = form.name in ("q4_1", "q5_1", "q2_K", "q4_K", "q5_K")
        assert (parts.offset is not None) == has_offset
        assert form.parts(rows[:0]).scale.shape == (0, columns // form.group)
    else:
        with pytest.raises(FormatError, match="Use decode"):
            form.parts(rows)


def test_activation_formats_are_no_weights():
    assert [f.name for f in FORMATS.values() if not f.weight] == ["q8_1", "q8_K"]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_wrong_arrays_are_refused(form):
    with pytest.raises(FormatError, match="uint8"):
        form.decode(np.zeros((1, form.nbytes), np.int8))
    with pytest.raises(FormatError, match="uint8"):
        form.findings(np.zeros(form.nbytes, np.uint8))
    with pytest.raises(FormatError, match="float32"):
        form.quantize(np.zeros((1, 32 * form.block)))
    with pytest.raises(FormatError, match="row of 0"):
        form.row_bytes(0)


def test_import_is_light():
    """Importing the formats starts no compiler."""
    code = "import sys, pnrt.formats; sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
