"""The GGUF writer: what it wrote is read back by us and by the gguf package, and nothing is left
behind when it fails."""

import os

import gguf as peer
import numpy as np
import pytest

from pnrt.container import writer
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.errors import FileError, PnrtError
from pnrt.formats import FORMATS

KEYS = [
    ("general.architecture", "string", "llama"),
    ("a.flag", "bool", True),
    ("a.small", "int8", -3),
    ("a.big", "uint64", 2**63 + 1),
    ("a.eps", "float32", 1e-5),
    ("a.exact", "float64", 0.1),
    ("a.words", "array[string]", ["", "é", "🙂"]),
    ("a.ids", "array[int32]", [1, -2, 3]),
    ("a.none", "array[float32]", []),
    ("a.bits", "array[bool]", [True, False]),
]


def plan(name, kind, shape, raw, pieces=3) -> TensorPlan:
    raw = np.ascontiguousarray(raw).reshape(-1)
    each = FORMATS[kind]
    return TensorPlan(
        name, shape, each.type_id, raw.nbytes, lambda: np.array_split(raw, min(pieces, raw.size))
    )


def plans(rng, kinds=("f32", "f16", "q8_0", "q4_0")) -> tuple[list[TensorPlan], dict]:
    rows = {
        kind: rng.integers(0, 256, (5, 2 * FORMATS[kind].row_bytes(320)), np.uint8)
        for kind in kinds
    }
    return [plan(f"w.{kind}", kind, (5, 640), raw) for kind, raw in rows.items()], rows


def test_round_trip(tmp_path):
    path = tmp_path / "m.gguf"
    tensors, rows = plans(np.random.default_rng(0), ("f32", "pn3t", "pn4t", "q4_1"))
    tensors.append(plan("v", "f32", (3,), rows["f32"][0, :12]))
    calls = []
    write_gguf(path, KEYS, tensors, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (path.stat().st_size,) * 2
    assert os.listdir(tmp_path) == ["m.gguf"]
    with open_gguf(path) as file:
        assert file.version == 3
        assert file.notes == []
        for key, kind, value in KEYS:
            expected = np.float32(value) if kind == "float32" else value
            assert file.metadata[key] == expected
            assert file.metadata_type(key) == kind
        for kind, raw in rows.items():
            assert file.tensors[f"w.{kind}"].offset % 32 == 0
            assert np.array_equal(file.rows(f"w.{kind}"), raw)
        assert file.tensors["v"].shape == (3,)


def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = tmp_path / "m.gguf"
    tensors, rows = plans(np.random.default_rng(1))
    write_gguf(path, KEYS, tensors)
    reader = peer.GGUFReader(path)
    assert reader.fields["a.big"].contents() == 2**63 + 1
    assert reader.fields["a.words"].contents() == ["", "é", "🙂"]
    assert reader.fields["a.ids"].contents() == [1, -2, 3]
    assert {each.name for each in reader.tensors} == {f"w.{kind}" for kind in rows}
    for each in reader.tensors:
        raw = rows[each.name[2:]]
        assert list(each.shape) == [640, 5]
        assert each.data.tobytes() == raw.tobytes()


def test_raw_metadata_passes_through(tmp_path):
    tensors, _ = plans(np.random.default_rng(2))
    write_gguf(tmp_path / "a.gguf", KEYS, tensors)
    with open_gguf(tmp_path / "a.gguf") as file:
        raw = file.raw_metadata()
    write_gguf(tmp_path / "b.gguf", raw, tensors)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_custom_alignment(tmp_path):
    path = tmp_path / "m.gguf"
    tensors, _ = plans(np.random.default_rng(3))
    write_gguf(path, [], tensors, alignment=256)
    with open_gguf(path) as file:
        assert file.alignment == 256
        assert file.metadata["general.alignment"] == 256
        assert all(each.offset % 256 == 0 for each in file.tensors.values())


def test_no_tensors(tmp_path):
    write_gguf(tmp_path / "m.gguf", KEYS, [])
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.tensors == {}


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def broken():
        yield bytes(32)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_gguf(path, [], [TensorPlan("t", (16,), 0, 64, broken)])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_interrupt_leaves_nothing(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "m.gguf", [], plans(np.random.default_rng(4))[0], progress=stop)
    assert os.listdir(tmp_path) == []


def test_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(writer.os, "fsync", lambda fd: (events.append("fsync"), fsync(fd)))
    monkeypatch.setattr(writer.os, "replace", lambda *a: (events.append("replace"), replace(*a)))
    write_gguf(tmp_path / "m.gguf", [], [])
    assert events == ["fsync", "replace", "fsync"]


def refusal(message: str, *words: str):
    head, _, todo = message.partition(". ")
    assert "; " in head, message
    assert todo.endswith("."), message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("keys", "tensors", "words"),
    [
        ([("k", "uint8", 256)], [], ["does not fit", "uint8"]),
        ([("k", "uint9", 1)], [], ["uint9", "array[...]"]),
        ([("k", "string", 1)], [], ["does not fit", "string"]),
        ([("k", "array[array[uint8]]", [[1]])], [], ["array[uint8]"]),
        ([("k", "uint8", 1), ("k", "uint8", 1)], [], ["given twice"]),
        ([("", "uint8", 1)], [], ["empty"]),
        ([("general.alignment", "uint32", 64)], [], ["general.alignment", "32"]),
        ([], [("t", (0, 3), 0)], ["shape [0, 3]", "at least 1"]),
        ([], [("t", (1, 1, 1, 1, 1), 4)], ["at most 4"]),
        ([], [("t" * 64, (1,), 4)], ["longer than 63"]),
        ([], [("t", (1,), 4), ("t", (1,), 4)], ["given twice"]),
        ([], [("t", (2,), 8)], ["its data has 4 bytes", "take 8"]),
        ([], [("t", (1,), 2)], ["more than 2 bytes", "take 2"]),
    ],
)
def test_refusals(tmp_path, keys, tensors, words):
    tensors = [TensorPlan(*spec[:2], 0, spec[2], lambda: [bytes(4)]) for spec in tensors]
    with pytest.raises(PnrtError) as caught:
        write_gguf(tmp_path / "m.gguf", keys, tensors)
    refusal(str(caught.value), *words)
    assert os.listdir(tmp_path) == []


def test_bad_alignment(tmp_path):
    with pytest.raises(FileError) as caught:
        write_gguf(tmp_path / "m.gguf", [], [], alignment=48)
    refusal(str(caught.value), "48", "power of two")


def test_unusable_targets(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target, words in (
        (tmp_path, ["is a directory"]),
        (tmp_path / "no" / "m", ["No such"]),
        (pipe, ["is a device or a pipe"]),
    ):
        with pytest.raises(FileError) as caught:
            write_gguf(target, [], [])
        refusal(str(caught.value), *words)


def test_a_full_disk_is_told_before_writing(tmp_path):
    huge = TensorPlan("t", (1 << 50,), 0, 4 << 50, lambda: pytest.fail("must not be asked"))
    with pytest.raises(FileError) as caught:
        write_gguf(tmp_path / "m.gguf", [], [huge])
    refusal(str(caught.value), "bytes; ", "are free on that disk", "Free some space")
