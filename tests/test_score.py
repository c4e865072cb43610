"""pnrt.score against definitions written out by hand, on models that are plain functions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pnrt.demo import cached_model, evaluation_text
from pnrt.errors import ModelError
from pnrt.score import compare, perplexity, text_windows, windows

V = 11


class Fake:
    """A model whose logits depend on position and on every token before, and on a seed."""

    def __init__(self, seed: int = 0, vocabulary: int = V, scale: float = 3.0, context: int = 64):
        rng = np.random.default_rng(seed)
        self.table = (rng.standard_normal((64, vocabulary)) * scale).astype(np.float32)
        self.config = SimpleNamespace(context_length=context)
        self.reset()

    def reset(self) -> None:
        self.seen: list[int] = []

    def eval(self, tokens, chunk=512, all=False):
        rows = []
        for token in tokens:
            self.seen.append(token)
            rows.append(np.roll(self.table[len(self.seen)], sum(self.seen)))
        return np.stack(rows) if all else rows[-1]


def by_hand(model: Fake, window) -> list[tuple[np.ndarray, int]]:
    """(log-probabilities, next token) of each scored position, one token at a time."""
    model.reset()
    out = []
    for i, token in enumerate(window):
        x = model.eval([int(token)]).astype(np.float64)
        if len(window) // 2 <= i < len(window) - 1:
            out.append((x - math.log(np.exp(x).sum()), int(window[i + 1])))
    return out


TEXT = [int(t) for t in np.random.default_rng(5).integers(0, V, 45)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_have_no_perplexity(bad):
    model = Fake()
    model.table[7, 3] = bad
    cut = windows(TEXT, 10, 1, None)
    for steps in (perplexity(model, cut), compare(Fake(), model, cut)):
        with pytest.raises(ModelError, match="at position 6 of a window; a perplexity needs"):
            list(steps)


def test_windows_drop_the_rest_and_put_bos_first():
    cut = windows(TEXT, 10, None, None)
    assert cut.shape == (4, 10)
    assert cut.ravel().tolist() == TEXT[:40]
    assert windows(TEXT, 10, 2, None).shape == (2, 10)
    marked = windows(TEXT, 10, None, 7)
    assert marked[:, 0].tolist() == [7] * 4
    assert (marked[:, 1:] == cut[:, 1:]).all()


@pytest.mark.parametrize(
    ("ctx", "chunks", "words"),
    [(3, None, "--ctx 3"), (10, 0, "--chunks 0"), (46, None, "45 tokens")],
)
def test_windows_that_cannot_be_cut_say_why(ctx, chunks, words):
    with pytest.raises(ModelError, match=words):
        windows(TEXT, ctx, chunks, None)


def test_a_window_beyond_the_context_is_refused():
    with pytest.raises(ModelError, match="context is 64"):
        text_windows(Fake(), "x", 65)


def test_text_windows_follow_the_bos_rule():
    model = Fake()
    model.tokenizer = SimpleNamespace(encode=lambda text: TEXT, bos=3, add_bos=True)
    assert (text_windows(model, "x", 10)[:, 0] == 3).all()
    model.tokenizer.add_bos = False
    assert text_windows(model, "x", 10)[0, 0] == TEXT[0]


@pytest.mark.parametrize("ctx", [4, 10, 11])
def test_perplexity_is_the_definition(ctx):
    model = Fake()
    cut = windows(TEXT, ctx, None, None)
    results = list(perplexity(model, cut))
    values: list[float] = []
    for i, window in enumerate(cut):
        values += [-log_p[target] for log_p, target in by_hand(model, window)]
        mean = sum(values) / len(values)
        assert results[i].tokens == len(values) == (i + 1) * (ctx - ctx // 2 - 1)
        assert results[i].perplexity.value == pytest.approx(math.exp(mean), rel=1e-12)
    square = sum(v * v for v in values) / len(values) - mean * mean
    error = math.sqrt(square / (len(values) - 1))
    assert results[-1].mean_nll.error == pytest.approx(error, rel=1e-9)
    assert results[-1].perplexity.error == pytest.approx(error * math.exp(mean), rel=1e-9)


def test_comparison_is_the_definition():
    base, model = Fake(0), Fake(0)
    model.table = model.table + Fake(1, scale=1.5).table
    cut = windows(TEXT, 10, None, None)
    last = list(compare(base, model, cut))[-1]
    kld, same, ratio, flips = [], [], [], []
    for w, window in enumerate(cut):
        pairs = zip(by_hand(base, window), by_hand(model, window), strict=True)
        for i, ((p, target), (q, _)) in enumerate(pairs):
            kld.append(float((np.exp(p) * (p - q)).sum()))
            same.append(p.argmax() == q.argmax())
            ratio.append(p[target] - q[target])
            if not same[-1]:
                flips.append((w * 10 + 5 + i, float(np.sort(p)[-1] - np.sort(p)[-2])))
    n = len(kld)
    assert last.tokens == n == 16
    assert last.kld.value == pytest.approx(np.mean(kld), rel=1e-12)
    assert last.kld.error == pytest.approx(np.std(kld) / math.sqrt(n - 1), rel=1e-9)
    assert last.kld_median == pytest.approx(np.median(kld), rel=1e-12)
    for q in (90, 95, 99):
        assert getattr(last, f"kld_p{q}") == pytest.approx(np.quantile(kld, q / 100), rel=1e-12)
    assert last.kld_max == pytest.approx(max(kld), rel=1e-12)
    share = sum(same) / n
    assert 0 < share < 1
    assert last.same_top.value == pytest.approx(share)
    assert last.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
    assert last.first_flip[0] == flips[0][0]
    assert last.first_flip[1] == pytest.approx(flips[0][1], rel=1e-5)
    assert last.log_ratio.value == pytest.approx(np.mean(ratio), rel=1e-9)
    assert math.log(last.model.value / last.base.value) == pytest.approx(np.mean(ratio), rel=1e-9)


def test_a_model_is_at_distance_zero_from_itself():
    last = list(compare(Fake(), Fake(), windows(TEXT, 10, None, None)))[-1]
    assert last.kld.value == last.kld_max == 0.0
    assert last.same_top.value == 1.0
    assert last.first_flip is None
    assert last.log_ratio.value == 0.0


def test_probabilities_that_underflow_do_not_make_nan():
    base, model = Fake(0, scale=2000.0), Fake(1, scale=2000.0)
    last = list(compare(base, model, windows(TEXT, 10, None, None)))[-1]
    assert math.isfinite(last.kld.value)
    assert last.kld.value > 1


def test_different_vocabularies_are_refused():
    with pytest.raises(ModelError, match="11 and 12 tokens"):
        next(compare(Fake(), Fake(vocabulary=12), windows(TEXT, 10, None, None)))


def test_slices_do_not_change_the_result(monkeypatch):
    cut = windows(TEXT, 20, None, None)
    whole = list(perplexity(Fake(), cut))[-1]
    monkeypatch.setattr("pnrt.score.SLICE", 3 * V)
    assert list(perplexity(Fake(), cut))[-1] == whole


def test_smollm2_has_the_perplexity_llama_cpp_gives_it():
    # llama.cpp b11434 on the exactly dequantized model: after windows 1 and 2 of 512
    wanted = [21.767076396934485, 27.012464427942085]
    path = cached_model()
    if path is None:
        pytest.skip("SmolLM2 is not in the cache: run `pnrt demo` once to fetch it")
    import pnrt

    with pnrt.load(path, activations="f32", kv="f32", context=512) as model:
        steps = perplexity(model, text_windows(model, evaluation_text(), 512, 2))
        assert [s.perplexity.value for s in steps] == pytest.approx(wanted, rel=1e-4)
