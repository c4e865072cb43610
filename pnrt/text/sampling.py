"""Choosing the next token from logits: greedy, or drawn from what top-k, top-p and min-p leave."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np

from pnrt.errors import ModelError, PnrtError


class Sampler:
    """Draws tokens; the same seed and the same logits give the same tokens.

    The filters come in llama.cpp's order: top-k, top-p, min-p, and the temperature last, so top-p
    and min-p see the model's own probabilities. Equal logits rank by id, the lowest first.

    Args:
        temperature: divides the logits; 0 = greedy, whatever the other arguments say.
        top_k: keep the k largest logits; 0 = all.
        top_p: then keep the fewest tokens that hold this much probability; 1 = all.
        min_p: then keep tokens with at least this fraction of the largest probability; 0 = all.
        seed: of the generator (PCG64); None = a fresh one, readable as `.seed`.
    Raises: PnrtError for an argument outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
    ):
        _require("temperature", temperature, 0 <= temperature < math.inf, "0 or more, finite")
        _require("top_k", top_k, top_k >= 0, "0 (all) or more")
        _require("top_p", top_p, 0 < top_p <= 1, "above 0, up to 1")
        _require("min_p", min_p, 0 <= min_p <= 1, "0 to 1")
        _require("seed", seed, seed is None or seed >= 0, "0 or more")
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.seed = secrets.randbits(32) if seed is None else seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    @classmethod
    def greedy(cls) -> Sampler:
        """The sampler that always takes the largest logit."""
        return cls(temperature=0, seed=0)

    def sample(self, logits: np.ndarray) -> int:
        """The next token.

        Args:
            logits: [V] float32 - one per token of the vocabulary; -inf forbids a token.
        Raises: ModelError for NaN, +inf or nothing left to choose from.
        """
        _check(logits)
        if self.temperature == 0:
            return int(np.argmax(logits))
        ids, probabilities = self.distribution(logits)
        cumulated = np.cumsum(probabilities)
        place = np.searchsorted(cumulated, self._random.random() * cumulated[-1], side="right")
        return int(ids[min(place, len(ids) - 1)])

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a token is drawn from, for temperatures above 0.

        Args:
            logits: [V] float32, checked by `sample`.
        Returns: ids [n] int64, most probable first, and their probabilities [n] float64.
        """
        ids = _largest(logits, self.top_k)
        kept = logits[ids].astype(np.float64)
        top = kept.max()
        whole = np.exp(kept - top).sum()
        # every filter keeps a beginning of the sorted tokens, so min-p may go before the sorting
        if self.min_p > 0:
            ids = ids[kept >= top + math.log(self.min_p)]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        kept = logits[ids].astype(np.float64) - top
        if self.top_p < 1:
            cumulated = np.cumsum(np.exp(kept) / whole)
            kept = kept[: np.searchsorted(cumulated, self.top_p) + 1]
        weights = np.exp(kept / self.temperature)
        return ids[: len(kept)], weights / weights.sum()


class Recorder:
    """A sampler that also writes down how likely its choices were.

    Args:
        sampler: what chooses; n: how many of the likeliest tokens to keep for each choice.
    rows: a dict per choice: token, logprob (natural logarithm, of the model's own probabilities,
    before any filter), top: the n likeliest as [token, logprob].
    """

    # not 0: also for the likeliest token all logits are asked for
    temperature = math.nan

    def __init__(self, sampler: Sampler, n: int):
        self.sampler, self.n, self.seed = sampler, n, sampler.seed
        self.rows: list[dict[str, Any]] = []

    def sample(self, logits: np.ndarray) -> int:
        """As Sampler.sample."""
        token = self.sampler.sample(logits)
        x = logits.astype(np.float64) - logits.max()
        x -= math.log(np.exp(x).sum())
        ids = _largest(logits, self.n)[: self.n]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = [[int(i), float(x[i])] for i in ids]
        self.rows.append({"token": token, "logprob": float(x[token]), "top": top})
        return token


def _largest(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids, ascending, of the k largest logits (0 = all) above -inf; of equal ones the lowest."""
    if not 0 < k < len(logits):
        return np.flatnonzero(logits > -np.inf)
    least = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > least)
    equal = np.flatnonzero(logits == least)[: k - len(above)]
    ids = np.sort(np.concatenate([above, equal]))
    return ids[logits[ids] > -np.inf]


def _check(logits: np.ndarray) -> None:
    if logits.ndim != 1 or not logits.size:
        raise PnrtError(
            f"logits: shape {logits.shape}; one position's logits [V] are needed. Pass one row."
        )
    top = np.argmax(logits)
    check_largest(int(top), float(logits[top]))


def check_largest(token: int, logit: float) -> None:
    """Raise ModelError where the largest logit (a NaN counts as largest) is not finite."""
    if not math.isfinite(logit):
        found = "all are -inf" if logit == -math.inf else f"token {token} has {logit}"
        raise ModelError(
            f"logits: {found}; sampling needs numbers. "
            "The weights or a kernel are broken: run `pnrt check` on the file."
        )


def _require(name: str, value: float | None, good: bool, allowed: str) -> None:
    if not good:
        raise PnrtError(f"{name}: {value}; allowed is {allowed}. Choose another value.")
