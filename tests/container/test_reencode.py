"""`.model` to `.model`: what changes its encoding, what stays, and what nobody may ask for."""

import numpy as np
import pytest

from pnrt.container.cyb_model import open_model, write_model
from pnrt.container.gguf import TensorPlan
from pnrt.container.reencode import reencode_model
from pnrt.errors import FormatError
from pnrt.formats import FORMATS
from tests.commands import pnrt
from tests.container.test_convert import build

K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def test_matrices_change_and_everything_else_stays(tmp_path):
    build(tmp_path / "a.model")
    with open_model(tmp_path / "a.model", scale_encoding="f32") as a:
        rows = reencode_model(a, tmp_path / "b.model", "cyb_q8")
        with open_model(tmp_path / "b.model") as b:
            assert list(b.tensors) == [n for n in a.tensors if n != f"{K_PROJ}.scale"]
            assert [r["name"] for r in rows] == list(b.tensors)
            assert {k: v for k, v in b.sections.items() if k != "tensors"} == {
                k: v for k, v in a.sections.items() if k != "tensors"
            }
            assert b.metadata["cyb.name"] == a.metadata["cyb.name"]
            for name, info in b.tensors.items():
                if len(info.shape) > 1:
                    # the scale of what was ternary is in the weights
                    expected = FORMATS["cyb_q8"].quantize(a.values(name))
                else:
                    expected = a.rows(name)
                np.testing.assert_array_equal(b.rows(name), expected)
        with pytest.raises(FormatError, match="bitnet_ternary is only read"):
            reencode_model(a, tmp_path / "c.model", "bitnet_ternary")


def test_the_bitnet_table_becomes_the_canonical_one(tmp_path):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (3, 5), dtype=np.uint8)
    scale = np.array([0.5, 2, 4], np.float32)
    encodings = {"w": "ternary", "w.scale": "u32"}
    plans = [
        TensorPlan("w", (3, 20), 0, codes.nbytes, lambda: [codes]),
        TensorPlan("w.scale", (3,), 0, scale.nbytes, lambda: [scale]),
    ]
    facts = {"license": "MIT", "made.by": "hand"}
    write_model(tmp_path / "a.model", "n", {}, plans, encodings, facts=facts)
    options = {"scale_encoding": "f32"}
    with open_model(tmp_path / "a.model", ternary="bitnet_ternary", **options) as a:
        reencode_model(a, tmp_path / "b.model", "cyb_ternary")
        with open_model(tmp_path / "b.model", **options) as b:
            np.testing.assert_array_equal(b.values("w"), a.values("w"))
            assert (b.data("w") != a.data("w")).any()
            assert b.encodings == encodings
            assert {k: b.metadata[f"cyb.{k}"] for k in facts} == facts


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["o.gguf", "--to", "cyb_q8"], "GGUF holds f32, "),
        (["o.gguf", "--to", "mxfp8"], "--repack"),
        (["o.model"], "--to is missing"),
        (["o.model", "--to", "q4_0"], "a .model file holds cyb_u32, cyb_u16"),
        (["o.model", "--to", "cyb_q8"], "--scale-encoding f32"),
        (["o.model", "--to", "cyb_q8", "--ternary", "other"], "cyb_ternary, bitnet_ternary"),
    ],
    ids=" ".join,
)
def test_what_a_container_cannot_hold_is_refused(tmp_path, monkeypatch, args, words):
    build(tmp_path / "a.model")
    monkeypatch.chdir(tmp_path)
    refused = pnrt("convert", "a.model", *args)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.model"]
