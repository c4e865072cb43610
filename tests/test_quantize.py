"""pnrt.quantize: plans, files, refusals; every model here is tiny and built on the spot."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf
from pnrt.demo import write_tiny_model
from pnrt.errors import FileError, FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.quantize import MIXES, plan, quantize_file

KEYS = [("general.architecture", "string", "llama"), ("a.list", "array[string]", ["x", "y"])]


def write(path, tensors, keys=KEYS, type_id=0):
    """Write float32 arrays (or bytes of another type with shapes) as a GGUF file."""
    plans = [
        TensorPlan(name, x.shape, type_id, x.nbytes, lambda x=x: iter([x]))
        for name, x in tensors.items()
    ]
    write_gguf(path, keys, plans)
    return path


def matrix(n, k, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype("<f4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path


def targets(path, mix, overrides=()):
    with open_gguf(path) as file:
        return {d.name: d for d in plan(file, mix, overrides)}


@pytest.mark.parametrize(
    ("mix", "attn", "down", "embedding"),
    [
        ("pn3", "pn3t", "pn4t", "q8_0"),
        ("pn4", "pn4t", "pn4t", "q8_0"),
        ("q8_0", "q8_0", "q8_0", "q8_0"),
        ("q4_0", "q4_0", "q4_0", "q8_0"),
        ("f16", "f16", "f16", "f16"),
    ],
)
def test_mixes_choose_by_class_and_width(tiny, mix, attn, down, embedding):
    decided = targets(tiny, mix)
    assert decided["blk.0.attn_q.weight"].target == attn
    assert decided["blk.1.ffn_down.weight"].target == down
    assert decided["token_embd.weight"].target == embedding
    assert decided["blk.0.attn_norm.weight"].kept
    assert decided["output_norm.weight"].kept


@pytest.mark.parametrize(
    ("k", "target", "reasons"),
    [
        (320, "pn3t", []),
        (192, "pn4t", ["pn3t's 80"]),
        (96, "q8_0", ["pn3t's 80", "pn4t's 64"]),
        (40, "f16", ["pn3t's 80", "pn4t's 64", "q8_0's 32"]),
    ],
)
def test_the_fallback_is_stated_step_by_step(tmp_path, k, target, reasons):
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": matrix(4, k)})
    decision = targets(path, "pn3")["blk.0.ffn_up.weight"]
    assert decision.target == target
    assert [r in decision.reason for r in reasons] == [True] * len(reasons)
    assert decision.target_bytes == 4 * FORMATS[target].row_bytes(k)


def test_overrides_win_in_order(tiny):
    decided = targets(tiny, "pn3", [(r"blk\.0\.ffn_", "q8_0"), (r"ffn_up", "f16")])
    assert decided["blk.0.ffn_up.weight"].target == "q8_0"
    assert decided["blk.1.ffn_up.weight"].target == "f16"
    assert decided["blk.1.ffn_gate.weight"].target == "pn3t"


@pytest.mark.parametrize(
    ("mix", "overrides", "error", "words"),
    [
        ("pn5", [], ModelError, "--mix pn5: no such mix. pnrt has pn3, pn4"),
        ("pn3", [("ffn", "q9")], ModelError, "no format 'q9' can be written"),
        ("pn3", [("ffn(", "q8_0")], ModelError, "not a regular expression"),
        ("pn3", [("nothing_here", "q8_0")], ModelError, "matches no weight matrix"),
        ("pn3", [("attn_norm", "q8_0")], ModelError, "matches no weight matrix"),
        ("pn3", [("ffn_down", "pn3t")], FormatError, "rows of 576 weights; pn3t needs a multiple"),
    ],
)
def test_plans_that_make_no_sense_are_refused(tiny, mix, overrides, error, words):
    with pytest.raises(error) as caught:
        targets(tiny, mix, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize("mix", MIXES)
def test_written_bytes_are_the_formats_bytes(tiny, tmp_path, mix):
    out = tmp_path / "out.gguf"
    reports = quantize_file(tiny, out, mix)
    with open_gguf(tiny) as source, open_gguf(out) as file:
        decided = plan(source, mix)
        assert list(file.tensors) == [d.name for d in decided]
        for d in decided:
            info = file.tensors[d.name]
            assert info.type_name == d.target
            assert info.nbytes == d.target_bytes
            if d.kept:
                assert np.array_equal(source.data(d.name), file.data(d.name))
                continue
            x = source.tensors[d.name].format.decode(source.rows(d.name))
            assert np.array_equal(FORMATS[d.target].quantize(x), file.rows(d.name))
    assert [r.name for r in reports] == [d.name for d in decided if not d.kept]


def test_metadata_travels_and_says_the_weights_are_not_rotated(tiny, tmp_path):
    quantize_file(tiny, tmp_path / "pn.gguf", "pn4")
    quantize_file(tiny, tmp_path / "q8.gguf", "q8_0")
    with (
        open_gguf(tiny) as a,
        open_gguf(tmp_path / "pn.gguf") as pn,
        open_gguf(tmp_path / "q8.gguf") as q8,
    ):
        for key, value in a.metadata.items():
            assert pn.metadata[key] == value
            assert pn.metadata_type(key) == a.metadata_type(key)
        assert pn.metadata["pnrt.rotation.type"] == "none"
        assert pn.metadata["pnrt.rotation.version"] == 1
        assert "general.file_type" not in pn.metadata
        assert q8.metadata["general.file_type"] == 7
        assert "pnrt.rotation.type" not in q8.metadata


def test_a_pn_source_must_say_whether_it_is_rotated(tiny, tmp_path):
    quantize_file(tiny, tmp_path / "pn.gguf", "pn4")
    with open_gguf(tmp_path / "pn.gguf") as file:
        silent = [e for e in file.raw_metadata() if not e[0].startswith("pnrt.")]
        plans = [
            TensorPlan(t.name, t.shape, t.type_id, t.nbytes, lambda t=t: iter([file.data(t.name)]))
            for t in file.tensors.values()
        ]
        write_gguf(tmp_path / "silent.gguf", silent, plans)
    with pytest.raises(ModelError, match="rotat"):
        quantize_file(tmp_path / "silent.gguf", tmp_path / "x.gguf", "q8_0")
    assert not (tmp_path / "x.gguf").exists()
    quantize_file(tmp_path / "silent.gguf", tmp_path / "x.gguf", "q8_0", rotation="none")
    with open_gguf(tmp_path / "x.gguf") as file:
        assert file.metadata["pnrt.rotation.type"] == "none"


def test_quantized_tensors_are_decoded_first(tiny, tmp_path):
    quantize_file(tiny, tmp_path / "q8.gguf", "q8_0")
    quantize_file(tmp_path / "q8.gguf", tmp_path / "pn.gguf", "pn4")
    with open_gguf(tmp_path / "q8.gguf") as q8, open_gguf(tmp_path / "pn.gguf") as pn:
        name = "blk.0.attn_q.weight"
        x = FORMATS["q8_0"].decode(q8.rows(name))
        assert np.array_equal(pn.rows(name), FORMATS["pn4t"].quantize(x))
        assert np.array_equal(pn.data("token_embd.weight"), q8.data("token_embd.weight"))


@pytest.mark.parametrize("mix", ["pn3", "q4_0"])
def test_bytes_do_not_depend_on_threads_or_chunks(tiny, tmp_path, monkeypatch, mix):
    digests = set()
    for threads, chunk in ((1, 1 << 22), (2, 1 << 22), (1, 1000)):
        monkeypatch.setattr("pnrt.quantize.CHUNK", chunk)
        out = tmp_path / f"{threads}-{chunk}.gguf"
        quantize_file(tiny, out, mix, threads=threads)
        digests.add(hashlib.sha256(out.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_the_report_is_the_distance(tmp_path):
    x = matrix(6, 128)
    x[4, 70:100] *= 50
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": x})
    (report,) = quantize_file(path, tmp_path / "o.gguf", "pn4")
    y = FORMATS["pn4t"].decode(FORMATS["pn4t"].quantize(x)).astype(np.float64)
    wanted = np.sqrt(((y - x) ** 2).sum() / (x.astype(np.float64) ** 2).sum())
    assert report.relative_rms == pytest.approx(wanted, rel=1e-12)
    assert report.max_error == pytest.approx(np.abs(y - x).max(), rel=1e-12)
    assert report.worst_block[:2] == (4, 1)
    assert (report.source, report.target) == ("f32", "pn4t")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "blk.0.ffn_norm.weight"])
def test_what_is_not_finite_is_refused_with_its_place(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr("pnrt.quantize.CHUNK", 256)
    x = matrix(9, 128) if "up" in name else matrix(1, 640)[0]
    x.reshape(-1)[599] = value
    path = write(tmp_path / "m.gguf", {name: x})
    with pytest.raises(FormatError) as caught:
        quantize_file(path, tmp_path / "o.gguf", "pn4")
    place = "row 4 column 87" if "up" in name else "row 0 column 599"
    assert f"{name} {place} is {value}" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_weights_too_large_for_the_format_are_refused(tmp_path):
    x = matrix(9, 128)
    x[5, 3] = 1e30
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": x})
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight"):
        quantize_file(path, tmp_path / "o.gguf", "pn4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_a_kept_tensor_with_a_bad_scale_is_refused(tmp_path):
    rows = FORMATS["pn4t"].quantize(matrix(3, 128))
    rows[2, 35] = 0x7E
    keys = [*KEYS, ("pnrt.rotation.version", "uint32", 1), ("pnrt.rotation.type", "string", "none")]
    one = TensorPlan("blk.0.ffn_up.weight", (3, 128), 125, rows.nbytes, lambda: iter([rows]))
    write_gguf(tmp_path / "m.gguf", keys, [one])
    with pytest.raises(FormatError, match="row 2 block 1"):
        quantize_file(tmp_path / "m.gguf", tmp_path / "o.gguf", "pn4")


def test_source_and_target_must_differ(tiny, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny)
    for same in (tiny, link):
        with pytest.raises(FileError, match="is the source itself"):
            quantize_file(tiny, same, "pn4")
    with pytest.raises(FileError, match="does not exist"):
        quantize_file(tiny, tmp_path / "no" / "folder.gguf", "pn4")


def test_an_existing_target_survives_a_failure(tmp_path):
    x = matrix(2, 64)
    x[0, 0] = np.nan
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": x})
    out = tmp_path / "o.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(FormatError):
        quantize_file(path, out, "pn4")
    assert out.read_bytes() == b"precious"


def test_a_matrix_of_unknown_type_is_refused_and_a_vector_copied(tmp_path):
    x = matrix(1, 64)[0]
    vector = TensorPlan("blk.0.extra", (64,), 24, 64, lambda: iter([bytes(range(64))]))
    up = TensorPlan("blk.0.ffn_up.weight", (1, 64), 0, 256, lambda: iter([x]))
    write_gguf(tmp_path / "m.gguf", KEYS, [vector, up])
    quantize_file(tmp_path / "m.gguf", tmp_path / "o.gguf", "pn4")
    with open_gguf(tmp_path / "o.gguf") as file:
        assert file.data("blk.0.extra")[:64].tobytes() == bytes(range(64))
    bad = TensorPlan("blk.0.ffn_up.weight", (1, 64), 24, 64, lambda: iter([bytes(64)]))
    write_gguf(tmp_path / "m.gguf", KEYS, [bad])
    with pytest.raises(FormatError, match="cannot decode"):
        quantize_file(tmp_path / "m.gguf", tmp_path / "o.gguf", "pn4")


def test_progress_reaches_the_end(tiny, tmp_path):
    seen = []
    quantize_file(tiny, tmp_path / "o.gguf", "pn4", progress=lambda *a: seen.append(a))
    assert all(total == seen[0][2] for _, _, total in seen)
    assert seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
