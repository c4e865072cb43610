"""Every finding of a file: tensor, row, block, absolute byte; container problems too."""

import dataclasses
import json
import struct

import numpy as np
import pytest

from pnrt.debug import check
from pnrt.debug.check import check_file, iter_findings
from pnrt.errors import FileError
from pnrt.formats import FORMATS
from tests.builders import entry, gguf, info, string, tiny

NAN = np.array([0x00, 0x7E], np.uint8)


def rows(name: str, n: int, columns: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, columns)).astype(np.float32)
    return FORMATS[name].quantize(x)


def write(path, **tensors):
    """tensors: name -> (format name, shape, rows); the file says that nothing is rotated."""
    plan = {n: (FORMATS[f].type_id, shape, raw) for n, (f, shape, raw) in tensors.items()}
    keys = (("version", "uint32", 1), ("type", "string", "none"))
    return tiny(path, [entry(f"pnrt.rotation.{k}", *value) for k, *value in keys], plan)


def test_a_good_file_has_no_findings(tmp_path):
    path = write(
        tmp_path / "m.gguf",
        a=("pn3t", (4, 160), rows("pn3t", 4, 160)),
        b=("q8_0", (3, 64), rows("q8_0", 3, 64)),
        c=("f32", (8,), rows("f32", 1, 8)),
    )
    calls, notes = [], []
    assert check_file(path, notes=notes, progress=lambda *step: calls.append(step)) == []
    assert notes == []
    total = 4 * 68 + 3 * 68 + 32
    assert calls[-1] == (total, total)


# two rows at a time, or all at once: the same findings
@pytest.mark.parametrize("step", [1, 140, 1 << 24])
def test_all_findings_with_their_place(tmp_path, monkeypatch, step):
    monkeypatch.setattr(check, "STEP", step)
    a, b = rows("pn3t", 5, 160), rows("q8_0", 3, 64)
    a[1, 34 + 2 + 4 * 3 + 3] |= 0x80
    a[4, 0:2] = NAN
    b[2, 34:36] = NAN
    c = rows("f32", 1, 8)
    c[0, 8:12] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
    path = write(
        tmp_path / "m.gguf",
        a=("pn3t", (5, 160), a),
        b=("q8_0", (3, 64), b),
        c=("f32", (8,), c),
    )
    raw = path.read_bytes()
    found = check_file(path)
    places = [(f.tensor, f.row, f.block) for f in found]
    assert places == [("a", 1, 1), ("a", 4, 0), ("b", 2, 1), ("c", 0, 2)]
    assert raw[found[0].byte : found[0].byte + 4][-1] & 0x80
    assert raw[found[1].byte : found[1].byte + 2] == NAN.tobytes()
    assert raw[found[2].byte : found[2].byte + 2] == NAN.tobytes()
    assert raw[found[3].byte : found[3].byte + 4] == np.float32(np.inf).tobytes()
    assert "reserved" in found[0].allowed or "bit" in found[0].found
    text = str(found[0])
    assert text.startswith(f"a row 1 block 1 (byte {found[0].byte:#x}): ")
    assert "; " in text
    assert list(iter_findings(path)) == found
    assert json.loads(json.dumps([dataclasses.asdict(f) for f in found]))[0]["tensor"] == "a"


def test_every_format_reports_a_bad_scale_or_has_none(tmp_path):
    """A tensor of 0xFF bytes: the file's findings are the format's own, moved to their place."""
    told = 0
    for name, kind in FORMATS.items():
        if kind.type_id is None or not kind.weight:
            continue
        raw = np.full((3, 2 * kind.nbytes), 0xFF, np.uint8)
        shape = (3, 2 * kind.block)
        path = tiny(tmp_path / f"{name}.gguf", [], {"t": (kind.type_id, shape, raw)})
        start = path.stat().st_size - -(-raw.size // 32) * 32
        found = check_file(path)
        expected = [
            (f.row, f.block, start + f.row * raw.shape[1] + f.byte) for f in kind.findings(raw)
        ]
        assert [(f.row, f.block, f.byte) for f in found] == expected
        told += bool(found)
    assert told >= 6


def test_container_problems_are_findings_beside_the_rest(tmp_path):
    path = tmp_path / "m.gguf"
    bad = np.zeros(68, np.uint8)
    bad[34:36] = NAN
    entries = [
        entry("k", "uint8", 1),
        entry("k", "uint8", 2),
        string("words") + struct.pack("<IIQ", 9, 8, 2) + string("ok") + string(b"\xff"),
    ]
    infos = [info("a", (1, 64), 8, 0), info("b", (8,), 0, 12), info("c", (99,), 0, 96)]
    path.write_bytes(gguf(entries, infos, bad.tobytes() + bytes(60)))
    found = check_file(path)
    text = "\n".join(map(str, found))
    assert [f.tensor for f in found] == ["", "b", "c", "", "a"]
    for words in ("key k occurs twice", "not aligned", "missing in all", "UTF-8", "must be finite"):
        assert words in text, text


def test_what_stops_the_reading_is_one_finding(tmp_path):
    path = tmp_path / "m.gguf"
    for data, words in (
        (b"", "is empty"),
        (b"garbage" * 9, "starts with"),
        (gguf([entry("k", "uint32", 1)])[:40], "the end of the file"),
        (gguf(version=1), "is 1"),
    ):
        path.write_bytes(data)
        (found,) = check_file(path)
        assert words in str(found)
        assert (found.tensor, found.row) == ("", None)


def test_nothing_to_read_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(FileError):
            check_file(path)


def test_notes_are_not_findings(tmp_path):
    path = tmp_path / "m.gguf"
    infos = [info("a", (8,), 0, 0), info("b", (8,), 153, 128)]
    path.write_bytes(gguf([], infos, bytes(160)))
    notes = []
    assert check_file(path, notes=notes) == []
    assert [n.tensor for n in notes] == ["a", "b"]
    assert "128 bytes lie before" in str(notes[0])
    assert "id 153 is not known" in str(notes[1])


def test_ids_mapped_by_hand(tmp_path):
    raw = np.full((4, 68), 0x11, np.uint8)
    raw[2, :2] = NAN
    path = tiny(tmp_path / "m.gguf", [], {"t": (42, (4, 64), raw)})
    assert check_file(path) == []
    (found,) = check_file(path, extra_types={42: "q8_0"})
    assert (found.row, found.block) == (2, 0)


def test_activation_formats_are_no_weights_and_nan_blocks_are_not_dead(tmp_path):
    raw = np.zeros((2, 36), np.uint8)
    path = tiny(tmp_path / "m.gguf", [], {"t": (9, (2, 32), raw), "u": (2, (1, 32), raw[:1, :18])})
    notes, health = [], []
    (found,) = check_file(path, notes=notes, health=health)
    assert (found.tensor, found.found) == ("t", "its type is q8_1")
    path = tiny(tmp_path / "k.gguf", [], {"k": (12, (1, 128), np.zeros((1, 72), np.uint8))})
    notes.clear()
    assert len(check_file(path, notes=notes)) == 1
    assert [note.found for note in notes] == ["rows of 128 weights are no whole q4_K blocks"]
    raw[:, :2] = NAN
    raw[:, 2:18] = 0x88
    path = tiny(tmp_path / "m.gguf", [], {"u": (2, (2, 32), raw[:, :18])})
    notes.clear()
    assert len(check_file(path, notes=notes, health=health)) == 2
    assert notes == []
