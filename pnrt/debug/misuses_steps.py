"""The known ways to compute other steps wrongly: rope, attention, norms, the delta rule, gates.

Each is a function (numbers of the step, inputs by role, model) that yields Guesses; STEPS has them
by op, with the roles a set of numbers must name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pnrt import reference
from pnrt.debug.misuses import RIGHT, Guess
from pnrt.models.config import Config
from pnrt.models.rope import rope_tables

Arrays = Mapping[str, np.ndarray]


class Context(NamedTuple):
    """What a step knows of its model.

    numbers: the step's; config, factors: for rope tables; groups, dim: of the step's cache;
    weights: its vectors, in order; start: position of the first row.
    """

    numbers: Mapping[str, Any]
    config: Config
    factors: np.ndarray | None
    groups: int
    dim: int
    weights: tuple[np.ndarray, ...]
    start: int


def _heads(x: np.ndarray, count: int, n: int) -> np.ndarray:
    return x[:, : count * n].reshape(len(x), count, n)


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def rope(c: Context, a: Arrays) -> Iterator[Guess]:
    """Pairing, position, direction, base."""
    n = c.numbers
    x, neox = _heads(a["x"], n["heads"], n["dim"]), n["neox"]

    def turned(shift: int = 0, pairing: bool = neox, config: Config = c.config, sign: float = 1):
        positions = np.maximum(np.arange(c.start, c.start + len(x)) + shift, 0)
        cos, sin = rope_tables(config, positions, c.factors)
        return _flat(reference.rope(x, cos, sign * sin, pairing))

    names = ("NORM", "NEOX") if neox else ("NEOX", "NORM")
    yield Guess(RIGHT, "the right rotation", turned())
    says = f"pairs components as {names[0]} does; the model is {names[1]}"
    yield Guess(f"{names[0]} instead of {names[1]} rope", says, turned(pairing=not neox))
    yield Guess("position one too high", "counts positions from 1", turned(1))
    yield Guess("position one too low", "is one position behind", turned(-1))
    yield Guess("rotated backwards", "has the sign of the sine wrong", turned(sign=-1))
    yield Guess("not rotated", "leaves the rotation out", _flat(x))
    zero = np.zeros((len(x), n["pairs"]), np.float32)
    zero = (zero + 1, zero)
    yield Guess(
        "every token at position 0", "does not count", _flat(reference.rope(x, *zero, neox))
    )
    for base in {1e4, 1e6} - {c.config.rope_base}:
        config = c.config.__class__(**{**vars(c.config), "rope_base": base})
        yield Guess(
            f"base {base:g}", f"the model's is {c.config.rope_base:g}", turned(config=config)
        )


def attention(c: Context, a: Arrays) -> Iterator[Guess]:
    """Heads, scale, mask, positions."""
    heads, scale = c.numbers["heads"], c.numbers["scale"]
    q, k, v = (
        _heads(a[role], count, c.dim)
        for role, count in (("q", heads), ("k", c.groups), ("v", c.groups))
    )
    start = len(k) - len(q)

    def attend(q=q, k=k, v=v, start=start, scale=scale):
        return _flat(reference.attention(q, k, v, start, scale))

    yield Guess(RIGHT, "the right attention", attend())
    tiled = np.arange(heads) % c.groups
    says = f"head h reads key head h mod {c.groups}, not h // {heads // c.groups}"
    if 1 < c.groups < heads:
        yield Guess("heads tiled, not grouped", says, attend(k=k[:, tiled], v=v[:, tiled]))
        grouped = np.arange(heads) // (heads // c.groups)
        crossed = attend(k=k[:, grouped], v=v[:, tiled])
        yield Guess("values tiled, keys grouped", "maps heads of values otherwise", crossed)
    yield Guess("scale left out", "does not divide by the root of the width", attend(scale=1.0))
    yield Guess("scale squared", "divides by the width, not its root", attend(scale=scale**2))
    yield Guess("no mask", "lets tokens see what follows them", _unmasked(q, k, v, scale))
    if start + len(q) > 1:
        before = attend(start=start - 1) if start else None
        if before is not None:
            yield Guess("mask one short", "a token does not see itself", before)
        yield Guess("mask one long", "a token sees the next one", attend(start=start + 1))
    half = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    k16, v16 = half
    if not np.array_equal(k16, k) or not np.array_equal(v16, v):
        yield Guess("cache in f16", "keeps keys and values as halves", attend(k=k16, v=v16))


def _unmasked(q, k, v, scale) -> np.ndarray:
    rows = [reference.attention(q[t : t + 1], k, v, len(k) - 1, scale) for t in range(len(q))]
    return _flat(np.concatenate(rows))


def rms_norm(c: Context, a: Arrays) -> Iterator[Guess]:
    """Weight, eps, what the mean is of."""
    n, (w,) = c.numbers, c.weights
    x = _heads(a["x"], n["heads"], n.get("stride", n["n"]))[..., : n["n"]]

    def normed(x=x, w=w, eps=n["eps"]):
        return _flat(reference.rms_norm(x, w, eps))

    ones = np.ones_like(w)
    yield Guess(RIGHT, "the right norm", normed())
    yield Guess("weight left out", "does not multiply by the weight", normed(w=ones))
    yield Guess("weight plus one", "adds 1 to the weight, as gemma does", normed(w=w + ones))
    yield Guess("weight squared", "multiplies by the weight twice", normed(w=w * w))
    for eps in {1e-5, 1e-6, 1e-12} - {n["eps"]}:
        yield Guess(f"eps {eps:g}", f"the model's is {n['eps']:g}", normed(eps=eps))
    centred = x - x.mean(-1, keepdims=True)
    yield Guess("mean subtracted", "a layer norm, not an RMS norm", normed(x=centred))
    if n["heads"] > 1:
        whole = x.reshape(len(x), -1)
        y = reference.rms_norm(whole, np.tile(w, n["heads"]), n["eps"])
        yield Guess("one norm over all heads", "takes the mean over heads too", y)


def delta(c: Context, a: Arrays) -> Iterator[Guess]:
    """Heads, decay, write strength; from an empty state."""
    n = c.numbers
    heads, keys, e = n["heads"], n["key_heads"], n["n"]
    q, k = (_heads(a[role], keys, e) for role in "qk")
    v = _heads(a["v"][:, n["first"] :], heads, e)

    def run(key, g=a["g"], beta=a["beta"], q=q, transpose=False):
        state, out = np.zeros((heads, e, e), np.float32), []
        for t in range(len(v)):
            o, state = reference.delta_step(state, q[t, key], k[t, key], v[t], g[t], beta[t])
            out.append(o)
            state = state.swapaxes(1, 2) if transpose else state
        return _flat(np.stack(out))

    tiled, grouped = np.arange(heads) % keys, np.arange(heads) // (heads // keys)
    yield Guess(RIGHT, "the right rule", run(tiled))
    says = f"value head h reads key head h // {heads // keys}, not h mod {keys}"
    yield Guess("heads grouped, not tiled", says, run(grouped))
    with np.errstate(all="ignore"):
        yield Guess("decay as its logarithm", "does not take exp", run(tiled, g=np.log(a["g"])))
    yield Guess("no decay", "never forgets", run(tiled, g=np.ones_like(a["g"])))
    ones = np.ones_like(a["beta"])
    yield Guess("write strength left out", "writes with strength 1", run(tiled, beta=ones))
    y = run(tiled, q=q * np.float32(e**0.5))
    yield Guess("query not scaled", "leaves out 1 / sqrt(width)", y)
    y = run(tiled, transpose=True)
    yield Guess("state transposed", "exchanges keys and values of the state", y)


def swiglu(c: Context, a: Arrays) -> Iterator[Guess]:
    """Which half, which function."""
    gate, up = a["gate"], a["up"]
    yield Guess(RIGHT, "the right gate", reference.swiglu(gate, up))
    yield Guess(
        "gate and up exchanged", "applies silu to the other one", reference.swiglu(up, gate)
    )
    y = reference.multiply(reference.sigmoid(gate), up)
    yield Guess("sigmoid for silu", "forgets the factor x", y)
    cubic = gate.astype(np.float64) * (1 + 0.044715 * gate.astype(np.float64) ** 2)
    y = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * cubic)) * up
    yield Guess("gelu for silu", "another activation", y)
    yield Guess("gate without silu", "multiplies plainly", reference.multiply(gate, up))


STEPS: dict[str, tuple[tuple[str, ...], Callable[[Context, Arrays], Iterator[Guess]]]] = {
    "rope": (("x",), rope),
    "attention": (("q", "k", "v"), attention),
    "rms_norm": (("x",), rms_norm),
    "delta": (("q", "k", "v", "g", "beta"), delta),
    "swiglu": (("gate", "up"), swiglu),
}
