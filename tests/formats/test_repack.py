"""e4m3 as mxfp8 at load: which bytes, at what cost, by both scale rules."""

import numpy as np
import pytest

import pnrt
from pnrt.demo import write_tiny_model
from pnrt.errors import FormatError
from pnrt.formats import FORMATS, base
from pnrt.formats.repack import Repack
from pnrt.quantize import quantize_file
from tests.formats.report import assert_blocks_equal


def rows(seed=0, n=7, k=256):
    x = np.random.default_rng(seed).standard_t(3, (n, k)).astype(np.float32)
    return FORMATS["e4m3"].quantize(x)


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_bytes_and_cost(rule, monkeypatch):
    stored, form = rows(), FORMATS["mxfp8"].with_rule(rule)
    x = FORMATS["e4m3"].decode(stored)
    expected = form.quantize(x)
    error = np.square(form.decode(expected).astype(np.float64) - x).sum()
    monkeypatch.setattr(base, "CHUNK", 2 * 256)
    for threads in (1, 2):
        repack = Repack.parse(f"mxfp8:{rule}")
        got = repack.convert("a", FORMATS["e4m3"], stored, threads)
        assert_blocks_equal(rule, expected, got, 33)
        cost = repack.costs["a"]
        assert cost.error == pytest.approx(error)
        assert cost.relative_rms == pytest.approx(np.sqrt(error / np.square(x).sum()), rel=1e-6)


def test_the_rules_differ_and_other_formats_pass():
    ceil, floor = Repack.parse("mxfp8"), Repack.parse("mxfp8:floor")
    a, b = (r.convert("t", FORMATS["e4m3"], rows()) for r in (ceil, floor))
    assert (a != b).any()
    other = FORMATS["q8_0"].quantize(np.ones((2, 64), np.float32))
    assert ceil.convert("other", FORMATS["q8_0"], other) is other
    assert ceil.target_of(FORMATS["q8_0"]) is FORMATS["q8_0"]
    assert list(ceil.costs) == ["t"]
    with pytest.raises(FormatError, match="mxfp8:floor"):
        Repack.parse("mxfp4")


def test_a_model_says_what_it_cost(tmp_path):
    write_tiny_model(tmp_path / "tiny.gguf", layers=1)
    types = {42: "e4m3"}
    quantize_file(tmp_path / "tiny.gguf", tmp_path / "e4.gguf", "e4m3", extra_types=types)
    path, options = tmp_path / "e4.gguf", {"backend": "reference", "extra_types": types}
    with pnrt.load(path, **options) as stored, pnrt.load(path, repack="mxfp8", **options) as model:
        assert stored.notes == ()
        (note,) = model.notes
        assert note.startswith("repacked: 7 tensors from e4m3 to mxfp8, scale rule ceil; ")
        assert "in blk.0." in note
        a, b = (m.logits([1, 2, 3]) for m in (stored, model))
    # nearly the same model, and not the same
    assert (a != b).any()
    assert np.abs(a - b).max() < 0.5 * np.abs(a).max()
