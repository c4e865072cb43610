"""The sampler: filters and their order, ties, seeds, refusals."""

import numpy as np
import pytest

from pnrt.errors import ModelError, PnrtError
from pnrt.text.sampling import Recorder, Sampler


def logits_of(*probabilities):
    return np.log(np.array(probabilities, np.float64)).astype(np.float32)


def kept(logits, **options):
    options = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0} | options
    ids, probabilities = Sampler(**options).distribution(logits)
    assert probabilities.sum() == pytest.approx(1)
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


FIVE = logits_of(0.1, 0.4, 0.05, 0.3, 0.15)


def test_filters():
    assert list(kept(FIVE)) == [1, 3, 4, 0, 2]
    assert kept(FIVE)[3] == pytest.approx(0.3, abs=1e-6)
    assert list(kept(FIVE, top_k=2)) == [1, 3]
    assert list(kept(FIVE, top_k=9)) == [1, 3, 4, 0, 2]
    assert list(kept(FIVE, top_p=0.69)) == [1, 3]
    assert list(kept(FIVE, top_p=0.71)) == [1, 3, 4]
    assert list(kept(FIVE, top_p=1e-9)) == [1]
    assert list(kept(FIVE, min_p=0.37)) == [1, 3, 4]
    assert list(kept(FIVE, min_p=1)) == [1]


def test_order_of_filters():
    # top-p counts what top-k left: 0.4 and 0.3 of 0.7
    assert list(kept(FIVE, top_k=2, top_p=0.57)) == [1]
    # the temperature comes last and does not widen the choice
    assert list(kept(FIVE, top_p=0.69, min_p=0.1, temperature=100)) == [1, 3]
    assert kept(FIVE, temperature=0.5)[1] == pytest.approx(0.16 / 0.285, abs=1e-6)


def test_ties_go_to_the_lowest_id():
    equal = np.zeros(9, np.float32)
    assert list(kept(equal, top_k=3)) == [0, 1, 2]
    assert list(kept(equal, top_p=0.3)) == [0, 1, 2]
    assert Sampler.greedy().sample(equal) == 0
    assert Sampler.greedy().sample(logits_of(0.1, 0.45, 0.45)) == 1
    two = np.array([1, 3, 2, 2, 2], np.float32)
    assert list(kept(two, top_k=3)) == [1, 2, 3]


def test_greedy_ignores_the_rest():
    greedy = Sampler(temperature=0, top_k=1, top_p=0.1, seed=5)
    assert [greedy.sample(FIVE) for _ in range(3)] == [1, 1, 1]


def test_forbidden_tokens_are_never_drawn():
    logits = FIVE.copy()
    logits[[1, 3]] = -np.inf
    sampler = Sampler(temperature=5, top_k=0, top_p=1, min_p=0, seed=1)
    assert {sampler.sample(logits) for _ in range(200)} == {0, 2, 4}
    assert list(kept(logits, top_k=4)) == [4, 0, 2]


def test_seed_decides():
    def draw(seed):
        sampler = Sampler(temperature=1, top_k=0, top_p=1, min_p=0, seed=seed)
        return [sampler.sample(FIVE) for _ in range(40)]

    # pinned: the same on every machine
    assert draw(7)[:12] == PINNED
    assert draw(7) == draw(7) != draw(8)
    fresh = Sampler()
    again = Sampler(seed=fresh.seed)
    assert [fresh.sample(FIVE) for _ in range(20)] == [again.sample(FIVE) for _ in range(20)]
    assert Sampler().seed != Sampler().seed


PINNED = [3, 0, 4, 1, 1, 0, 1, 4, 4, 3, 1, 1]


def test_frequencies():
    sampler = Sampler(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)
    counts = np.bincount([sampler.sample(FIVE) for _ in range(4000)], minlength=5) / 4000
    assert np.abs(counts - np.exp(FIVE)).max() < 0.03


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (np.nan, "token 2 has nan"),
        (np.inf, "token 2 has inf"),
        (-np.inf, "all are -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits(bad, found, temperature):
    logits = np.zeros(5, np.float32)
    logits[2] = bad
    if bad == -np.inf:
        logits[:] = bad
    with pytest.raises(ModelError, match=found):
        Sampler(temperature=temperature, seed=0).sample(logits)


def test_a_recorder_chooses_the_same_and_knows_how_likely():
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))
    recorder, sampler = Recorder(Sampler(seed=3), 2), Sampler(seed=3)
    chosen = [recorder.sample(logits) for _ in range(9)]
    assert chosen == [sampler.sample(logits) for _ in range(9)]
    for token, row in zip(chosen, recorder.rows, strict=True):
        assert row["token"] == token
        assert row["logprob"] == pytest.approx(logits[token], abs=1e-6)
        assert [i for i, _ in row["top"]] == [1, 3]
    assert Recorder(sampler, 0).sample(logits) in range(4)


@pytest.mark.parametrize("shape", [(0,), (2, 5), ()])
def test_wrong_shape(shape):
    with pytest.raises(PnrtError, match="one position's logits"):
        Sampler.greedy().sample(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
    ],
)
def test_wrong_arguments(options):
    name = next(iter(options))
    with pytest.raises(PnrtError, match=f"{name}: .*; allowed is .*Choose"):
        Sampler(**options)


def slow(logits, k, p, m, temperature):
    """The filters one after another, as the rule is told."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: k or None]

    def shares(of):
        weights = [np.exp(np.float64(logits[i]) / of - logits[ids[0]] / of) for i in ids]
        return [weight / sum(weights) for weight in weights]

    held = np.cumsum(shares(1))
    ids = ids[: next((n for n, x in enumerate(held, 1) if x >= p), len(ids))] if p < 1 else ids
    ids = [i for i, share in zip(ids, shares(1), strict=True) if share >= m * shares(1)[0]]
    return dict(zip(ids, shares(temperature), strict=True))


def test_filters_against_the_rule():
    random = np.random.default_rng(0)
    for _ in range(200):
        # quarters, so that many logits are equal
        logits = np.round(random.normal(0, 3, 60) * 4).astype(np.float32) / 4
        k, p = int(random.choice([0, 1, 5, 40, 60])), float(random.choice([0.3, 0.9, 1]))
        m, temperature = float(random.choice([0, 0.03, 0.4])), float(random.choice([0.5, 1.3]))
        found = kept(logits, top_k=k, top_p=p, min_p=m, temperature=temperature)
        expected = slow(logits, k, p, m, temperature)
        assert list(found) == list(expected)
        assert list(found.values()) == pytest.approx(list(expected.values()))
