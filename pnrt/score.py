"""How well a model predicts a text, and how far one model's predictions are from another's.

Perplexity follows llama-perplexity's definition: the text is cut into windows of `ctx` tokens, each
starts from an empty state, its first half is only read, and of the second half every token but the
last is asked for its successor. If the tokenizer adds a beginning-of-text token, the first token
of each window is replaced by it.

The Kullback-Leibler divergence is exact: both models' float32 logits, softmax in float64, the whole
vocabulary, no base file. Nothing is rounded to 16 bits or clipped.

Both functions are generators: they yield the running result after every window, the last one is the
answer, and stopping early costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pnrt.errors import ModelError
from pnrt.stream import context

if TYPE_CHECKING:
    from pnrt.generate import Model

# logits turned into float64 at a time: 4 million are 32 MB
SLICE = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log likelihood after `windows` of `total` windows."""

    windows: int
    total: int
    ctx: int
    tokens: int
    perplexity: Estimate
    mean_nll: Estimate


@dataclass(frozen=True)
class Comparison:
    """What changes when `model` stands in for `base`; kld is KL(base || model) in nats.

    Attributes:
        same_top: share of positions where both models put the same token first.
        first_flip: the first position where they do not, or None: (token position in the text,
            base's margin between its first and second token in logits).
        log_ratio: ln(perplexity of model / perplexity of base), with the error of the paired
            difference.
    """

    windows: int
    total: int
    ctx: int
    tokens: int
    base: Estimate
    model: Estimate
    log_ratio: Estimate
    kld: Estimate
    kld_median: float
    kld_p90: float
    kld_p95: float
    kld_p99: float
    kld_max: float
    same_top: Estimate
    first_flip: tuple[int, float] | None


def windows(tokens: Sequence[int], ctx: int, chunks: int | None, bos: int | None) -> np.ndarray:
    """Cut a text into windows.

    Args:
        tokens: the text's ids, with the beginning-of-text token in front if the model adds one.
        ctx: tokens per window, at least 4.
        chunks: use only the first that many windows; None for all.
        bos: id that replaces the first of each window, or None.
    Returns:
        [windows, ctx] int32; what is left at the end of the text is not used.
    Raises:
        ModelError: no full window, or a nonsensical size.
    """
    if ctx < 4:
        raise ModelError(f"--ctx {ctx}: a window needs at least 4 tokens. Use more; 512 is usual.")
    if chunks is not None and chunks < 1:
        raise ModelError(f"--chunks {chunks}: at least 1 is needed. Leave it out for all.")
    count = len(tokens) // ctx
    if count == 0:
        raise ModelError(
            f"the text has {len(tokens)} tokens, less than one window of {ctx}; "
            "use a longer text or a smaller --ctx."
        )
    count = min(count, chunks or count)
    cut = np.array(tokens[: count * ctx], np.int32).reshape(count, ctx)
    if bos is not None:
        cut[:, 0] = bos
    return cut


def text_windows(model: Model, text: str, ctx: int, chunks: int | None = None) -> np.ndarray:
    """Tokenize a text for `model` and cut it: [windows, ctx] int32. See `windows`."""
    limit = context(model)
    if ctx > limit:
        raise ModelError(f"--ctx {ctx}: the model's context is {limit} tokens; use at most that.")
    tokenizer = model.tokenizer
    tokens = tokenizer.encode(text)
    return windows(tokens, ctx, chunks, tokenizer.bos if tokenizer.add_bos else None)


def same_text(other: Model, cut: np.ndarray, text: str, ctx: int, chunks: int | None) -> None:
    """Refuse to compare models that cut the text into other tokens than `cut`."""
    theirs = text_windows(other, text, ctx, chunks)
    if theirs.shape != cut.shape or (theirs != cut).any():
        raise ModelError(
            "the two models' tokenizers cut the text into different tokens; "
            "only models with the same vocabulary can be compared."
        )


def perplexity(model: Model, cut: np.ndarray) -> Iterator[Perplexity]:
    """Perplexity of a model on windows [W, ctx] int32; yields the running result per window."""
    nll = _Sample()
    for done, window in enumerate(cut, 1):
        for logits, targets in _scored(model, window):
            nll.add(_nll(_log_softmax(logits), targets))
        yield Perplexity(done, len(cut), cut.shape[1], nll.n, _exp(nll.mean()), nll.mean())


def compare(base: Model, model: Model, cut: np.ndarray) -> Iterator[Comparison]:
    """Compare two models on windows [W, ctx] int32; yields the running result per window.

    Raises:
        ModelError: their vocabularies differ in size.
    """
    a, b, kld = _Sample(), _Sample(), _Sample()
    same = _Sample()
    flip = None
    ctx = cut.shape[1]
    for done, window in enumerate(cut, 1):
        position = (done - 1) * ctx + ctx // 2
        pairs = zip(_scored(base, window), _scored(model, window), strict=True)
        for (old, targets), (new, _) in pairs:
            _same_vocabulary(old, new)
            p, q = _log_softmax(old), _log_softmax(new)
            a.add(_nll(p, targets))
            b.add(_nll(q, targets))
            kld.add(_divergence(p, q))
            equal = old.argmax(axis=1) == new.argmax(axis=1)
            same.add(equal.astype(np.float64))
            if flip is None and not equal.all():
                first = int(np.argmin(equal))
                flip = (position + first, _margin(old[first]))
            position += len(targets)
        values = kld.values()
        difference = _Sample(b.values() - a.values())
        yield Comparison(
            done, len(cut), ctx, kld.n,
            base=_exp(a.mean()),
            model=_exp(b.mean()),
            log_ratio=difference.mean(),
            kld=kld.mean(),
            kld_median=float(np.median(values)),
            **{f"kld_p{q}": float(np.quantile(values, q / 100)) for q in (90, 95, 99)},
            kld_max=float(values.max()),
            same_top=same.mean(),
            first_flip=flip,
        )  # fmt: skip


def _scored(model: Model, window: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits [T, V] float32 of a window's second half and the tokens [T] that came, in slices."""
    half = len(window) // 2
    model.reset()
    model.eval([int(t) for t in window[:half]])
    logits = model.eval([int(t) for t in window[half:-1]], all=True)
    targets = window[half + 1 :]
    step = max(1, SLICE // logits.shape[1])
    for start in range(0, len(targets), step):
        part = logits[start : start + step]
        if not np.isfinite(part).all():
            row, token = np.argwhere(~np.isfinite(part))[0]
            raise ModelError(
                f"logits: token {token} has {part[row, token]} at position {half + start + row} of "
                "a window; a perplexity needs numbers. The weights or a kernel are broken: "
                "`pnrt trace --nan-stop` names the step, `pnrt check` tests the file."
            )
        yield part, targets[start : start + step]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """[T, V] float32 -> [T, V] float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _nll(log_p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return -log_p[np.arange(len(targets)), targets]


def _divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) per row of log-probabilities [T, V] float64; rounding below zero becomes zero."""
    weight = np.exp(p)
    # where p has underflowed to zero the term is zero, whatever q says
    terms = np.where(weight > 0, weight * (p - q), 0.0)
    return np.maximum(terms.sum(axis=1), 0.0)


def _margin(logits: np.ndarray) -> float:
    """How far the largest of logits [V] is above the second."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def _same_vocabulary(old: np.ndarray, new: np.ndarray) -> None:
    if old.shape != new.shape:
        raise ModelError(
            f"the two models have {old.shape[1]} and {new.shape[1]} tokens in their vocabularies; "
            "only models with the same vocabulary can be compared."
        )


def _exp(mean: Estimate) -> Estimate:
    """exp of an estimate; the error by first order, as llama-perplexity states it."""
    value = math.exp(mean.value) if mean.value < 700 else math.inf
    return Estimate(value, value * mean.error)


class _Sample:
    """Values collected piece by piece, in float64."""

    def __init__(self, values: np.ndarray | None = None):
        self.pieces = [] if values is None else [values]

    @property
    def n(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def add(self, values: np.ndarray) -> None:
        self.pieces.append(values)

    def values(self) -> np.ndarray:
        if len(self.pieces) > 1:
            self.pieces = [np.concatenate(self.pieces)]
        return self.pieces[0]

    def mean(self) -> Estimate:
        values = self.values()
        n = len(values)
        error = float(np.sqrt(values.var() / (n - 1))) if n > 1 else 0.0
        return Estimate(float(values.mean()), error)
