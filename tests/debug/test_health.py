"""Oddities that break no rule are counted, with the first place; histograms equal the codes."""

import json

import numpy as np
import pytest

from pnrt.debug import check
from pnrt.debug.check import check_file, rotation_of
from pnrt.debug.health import CODES, Examination
from pnrt.errors import ModelError
from pnrt.formats import FORMATS
from pnrt.formats.codebook import NL
from tests.builders import entry, tiny
from tests.commands import pnrt

f32 = np.float32
NOT_ROTATED = [
    entry("pnrt.rotation.version", "uint32", 1),
    entry("pnrt.rotation.type", "string", "none"),
]


def rows(name, n=6, blocks=4, seed=0, spread=1.0):
    form = FORMATS[name]
    k = blocks * max(form.block, 32)
    x = np.random.default_rng(seed).standard_normal((n, k)).astype(f32)
    return form.quantize(x * f32(spread))


def examined(tmp_path, name, raw, entries=()):
    """Notes, health and bytes of a file with one tensor `t`."""
    form = FORMATS[name]
    shape = (len(raw), form.columns(raw.shape[1]))
    type_id = 4000 if form.type_id is None else form.type_id
    path = tiny(tmp_path / "m.gguf", list(entries), {"t": (type_id, shape, raw)})
    notes, health = [], []
    found = check_file(path, notes=notes, health=health, extra_types={4000: name})
    assert found == []
    return notes, health[0], path.read_bytes()


@pytest.mark.parametrize("name", [*CODES, "pn3t", "pn4t"])
def test_histograms(name, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "STEP", 200)
    raw = rows(name)
    _, health, _ = examined(tmp_path, name, raw, NOT_ROTATED)
    form = FORMATS[name]
    assert sum(health.codes) == 6 * form.columns(raw.shape[1])
    if name in ("mxfp4", "nvfp4", "e4m3", "cyb_ternary", "bitnet_ternary"):
        return
    codes = form.parts(raw).codes
    if name.startswith("iq4"):
        codes = np.searchsorted(NL, codes)
    zero = {"q4_0": 8, "cyb_q4": 8, "q8_0": 128, "cyb_q8": 128, "tq2_0": 1, "pn3t": 4, "pn4t": 8}
    expected = np.bincount((codes + zero.get(name, 0)).ravel(), minlength=len(health.codes))
    assert health.codes == expected.tolist()
    if health.saturated is not None:
        ends = [1, 255] if name in ("q8_0", "cyb_q8") else [0, len(expected) - 1]
        assert health.saturated == pytest.approx(expected[ends].sum() / expected.sum())


def half(value):
    return np.array([value], "<f2").view(np.uint8)


@pytest.mark.parametrize("step", [1, 1 << 24])
@pytest.mark.parametrize("name", ["pn3t", "pn4t", "q4_0", "q8_0", "tq2_0", "iq4_nl", "q6_K"])
def test_scales(name, step, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "STEP", step)
    form, raw = FORMATS[name], rows(name)
    at = form.halves[0][0]
    blocks = raw.reshape(6, -1, form.nbytes)
    blocks[2, 1, at : at + 2] = half(-0.0)
    blocks[3, 2, at : at + 2] = half(3e-6)
    blocks[5, 0, at : at + 2] = half(-3e-6)
    notes, health, data = examined(tmp_path, name, raw, NOT_ROTATED)
    assert health.counts == {"dead": 1, "-0 scale": 1, "subnormal scale": 2}
    assert health.first["-0 scale"][:2] == health.first["dead"][:2] == (2, 1)
    assert health.first["subnormal scale"][:2] == (3, 2)
    byte = health.first["subnormal scale"][2]
    assert data[byte : byte + form.nbytes] == blocks[3, 2].tobytes()
    assert [(n.row, n.block, n.byte) for n in notes] == [
        health.first[kind] for kind in health.counts
    ]


@pytest.mark.parametrize("name", ["pn3t", "pn4t", "q4_0", "q8_0", "tq2_0"])
def test_blocks_of_zero_codes_are_dead(name, tmp_path):
    """The scale is an ordinary one: only the codes say that nothing is there."""
    form = FORMATS[name]
    k = max(form.block, 32)
    x = np.zeros((1, k), f32)
    zero = form.quantize(x)
    raw = rows(name, blocks=3)
    blocks = raw.reshape(6, -1, form.nbytes)
    at = form.halves[0][0]
    keep = blocks[4, 1, at : at + 2].copy()
    blocks[4, 1] = zero[0, : form.nbytes]
    blocks[4, 1, at : at + 2] = keep
    _, health, _ = examined(tmp_path, name, raw, NOT_ROTATED)
    assert health.counts == {"dead": 1}
    assert health.first["dead"][:2] == (4, 1)


def test_offsets(tmp_path):
    """A block whose scale is zero is its minimum; with both zero it is dead."""
    raw = rows("q4_1")
    blocks = raw.reshape(6, -1, 20)
    blocks[1, 1, :2] = 0
    blocks[2, 3, :4] = 0
    _, health, _ = examined(tmp_path, "q4_1", raw)
    assert health.counts == {"dead": 1, "zero scale": 1}
    assert health.first["zero scale"][:2] == (1, 1)
    assert health.first["dead"][:2] == (2, 3)


def test_saturated_and_unused_codes(tmp_path):
    form = FORMATS["pn4t"]
    rng = np.random.default_rng(0)
    codes = rng.choice([0, 15, 7, 9], (1024, 64), p=[0.3, 0.3, 0.2, 0.2])
    raw = form.pack(np.ones(1024, np.float16), codes).reshape(16, -1)
    notes, health, _ = examined(tmp_path, "pn4t", raw, NOT_ROTATED)
    assert health.saturated == pytest.approx(0.6, abs=0.01)
    text = " ".join(n.found for n in notes)
    assert "60% of the weights are on the outermost codes" in text
    assert "code 1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14 never occurs" in text
    assert all(n.row is None for n in notes)


def test_good_tensors_have_no_notes(tmp_path):
    for name, form in FORMATS.items():
        if form.weight:
            raw = rows(name, n=8, blocks=8, spread=0.3)
            notes, health, _ = examined(tmp_path, name, raw, NOT_ROTATED)
            assert notes == [], name
            assert (health.blocks > 0) == bool(form.group)


def test_rotation(tmp_path):
    raw = rows("pn4t")
    notes, _, _ = examined(tmp_path, "pn4t", raw)
    assert "no key" in notes[0].found
    assert "--rotation" in notes[0].allowed
    assert examined(tmp_path, "pn4t", raw, NOT_ROTATED)[0] == []
    assert examined(tmp_path, "q4_0", rows("q4_0"))[0] == []
    damaged = [entry("pnrt.rotation.version", "uint32", 7)]
    path = tiny(tmp_path / "d.gguf", damaged, {"t": (125, (6, 256), raw)})
    (found,) = check_file(path)
    assert "pnrt.rotation.version" in found.found
    from pnrt.container.gguf import open_gguf

    with open_gguf(path) as file, pytest.raises(ModelError):
        rotation_of(file)
    with open_gguf(tmp_path / "m.gguf") as file:
        assert rotation_of(file) == "none (no PN tensors)"


def test_the_command(tmp_path):
    raw = rows("pn4t")
    raw[3, :2] = 0
    path = tiny(tmp_path / "m.gguf", NOT_ROTATED, {"t": (125, (6, 256), raw)})
    done = pnrt("check", path)
    assert done.exit_code == 0
    assert "note: t row 3 block 0" in done.stdout
    assert "nothing is wrong" in done.stdout
    assert "rotation: none (pnrt.rotation.type)" in done.stdout
    assert pnrt("check", path, "--strict").exit_code == 1
    done = pnrt("check", path, "--codes")
    assert "█" in done.stdout
    data = json.loads(pnrt("check", path, "--json").stdout)
    assert data["tensors"][0]["counts"] == {"dead": 1}
    assert data["tensors"][0]["first"]["dead"][:2] == [3, 0]
    assert len(data["tensors"][0]["codes"]) == 16
    assert data["notes"][0]["block"] == 0


def test_many_notes_of_a_kind_are_counted(tmp_path):
    raw = rows("pn4t")
    raw[3, :2] = 0
    tensors = {f"t{i}": (125, (6, 256), raw) for i in range(7)}
    path = tiny(tmp_path / "m.gguf", NOT_ROTATED, tensors)
    text = pnrt("check", path).stdout
    assert text.count("note: t") == 4
    assert "and 3 more of these" in text


def test_floats_are_not_examined(tmp_path):
    class Info:
        name, offset, format = "t", 0, FORMATS["f32"]

    examination = Examination(Info)
    examination.add(np.zeros((3, 8), np.uint8), 0)
    assert examination.done().blocks == 0
