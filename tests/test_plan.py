"""pnrt.plan: sizes against hand-computed ones, limits, and a tiny model's real file."""

from __future__ import annotations

import pytest

from pnrt.container.gguf import open_gguf
from pnrt.demo import write_tiny_model
from pnrt.errors import ModelError, PnrtError
from pnrt.models.presets import blueprint
from pnrt.plan import parse_bytes, plan
from pnrt.quantize import quantize_file

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def paper():
    return blueprint("qwen3.8-27b-pn3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    write_tiny_model(folder / "tiny.gguf")
    quantize_file(folder / "tiny.gguf", folder / "pn.gguf", "pn3")
    return folder / "pn.gguf"


def test_the_27b_model_on_a_p100(paper):
    """The published arithmetic: 65,536 bytes of cache per token, 59 tokens/s at 732 GB/s."""
    result = plan(paper, vram=16280 * MIB, bandwidth=732)
    assert result["model"]["bytes"] == 12_473_886_720
    assert sum(row["bytes"] for row in result["classes"]) == 12_473_886_720
    assert sum(row["count"] for row in result["classes"]) == result["model"]["tensors"] == 851
    assert result["sequence"]["cache_per_token"] == 65_536
    assert result["sequence"]["states"] == {"delta": 150_994_944, "conv": 5_898_240}
    embedding = 546_304_000
    assert result["read"]["weights"] == 12_473_886_720 - embedding + 2_200
    assert result["read"]["state"] == 2 * 156_893_184
    speeds = {row["context"]: row["tokens_per_second"] for row in result["bound"]}
    assert speeds[1] == pytest.approx(59.8, abs=0.1)
    assert speeds[32768] == pytest.approx(50.9, abs=0.1)
    (gpu,) = result["places"]
    assert gpu.weights == 12_473_886_720 - embedding
    assert gpu.fits
    assert 55_000 < gpu.most < 65_000


def test_the_longest_context_is_where_it_stops_fitting(paper):
    most = plan(paper, vram=16 * GIB)["places"][0].most
    assert plan(paper, vram=16 * GIB, context=most)["places"][0].fits
    assert not plan(paper, vram=16 * GIB, context=most + 1)["places"][0].fits
    half = plan(paper, vram=16 * GIB, kv="f32")["places"][0].most
    # a token's cache doubles, its rotary entries do not
    assert half == pytest.approx(most * 65_792 / 131_328, abs=2)


def test_too_little_memory(paper):
    (gpu,) = plan(paper, vram=8 * GIB)["places"]
    assert not gpu.fits
    assert gpu.most == 0


def test_a_file(tiny):
    with open_gguf(tiny) as file:
        result = plan(file, ram=GIB, context=100)
        names = {t.name for t in file.tensors.values()}
        table = file.tensors["token_embd.weight"].nbytes
    assert result["model"]["tensors"] == len(names)
    # two layers, one head of 64 for keys and one for values, two bytes each
    assert result["sequence"]["cache_per_token"] == 2 * 2 * 64 * 2
    assert result["sequence"]["cache"] == 100 * 512
    assert result["sequence"]["states"] == {}
    # tied: the table is the output matrix, and all of it is read
    assert result["read"]["weights"] == result["model"]["bytes"]
    (cpu,) = result["places"]
    assert cpu.weights > table
    assert cpu.most == 2048
    assert not result["bound"]


def test_packed_size_is_what_packing_makes(tiny):
    import pnrt

    with pnrt.load(tiny, context=64) as model:
        weights = model.session.weights
        packed = sum(w.nbytes for w in weights.values() if hasattr(w, "nbytes"))
        (cpu,) = plan(model.file, ram=GIB)["places"]
    # aligned memory and sizes in whole panels on both sides
    assert cpu.weights == pytest.approx(packed, rel=1e-3)


def test_a_silent_pn_file_is_planned_with_a_note(tiny):
    with open_gguf(tiny) as file:
        sizes = plan(file)["model"]
        file.metadata = {k: v for k, v in file.metadata.items() if not k.startswith("pnrt.")}
        result = plan(file)
    assert result["model"] == sizes
    assert any("does not say whether it is rotated" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "--context 0"),
        ({"context": 262145}, "1 to 262144"),
        ({"kv": "q8_0"}, "kv"),
        ({"bandwidth": 0}, "--bandwidth"),
        ({"bandwidth": float("nan")}, "--bandwidth"),
    ],
)
def test_what_makes_no_sense_is_refused(paper, options, words):
    with pytest.raises(PnrtError, match=words):
        plan(paper, **options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16280MiB", 16280 * MIB),
        ("17GB", 17 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        ("24g", 24 * GIB),
        ("4096", 4096),
        ("0", 0),
    ],
)
def test_sizes_in_words(text, nbytes):
    assert parse_bytes(text, "--vram") == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "16 potatoes", "1e9", "nan", "1.2.3GB"])
def test_words_that_are_no_size(text):
    with pytest.raises(ModelError, match="--vram"):
        parse_bytes(text, "--vram")
