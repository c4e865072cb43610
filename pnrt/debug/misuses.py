"""The known ways to compute a product wrongly although the weights are read right.

Each is a small function of a Product that yields Guesses: what the result would be then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pnrt import reference
from pnrt.container.mapped import MappedFile
from pnrt.formats import FORMATS
from pnrt.models.rotation import Rotation
from pnrt.reference.product import LANES

f64 = np.float64
RIGHT = "right"
# weights of a matrix read in one step where all of it is needed
STEP = 1 << 22


class Guess(NamedTuple):
    """One way it could have been.

    name, says: what was done; y: what comes out then; noise: relative distance within which that
    counts as the same, where one order of roundings cannot stand for all (0: the caller's).
    """

    name: str
    says: str
    y: np.ndarray
    noise: float = 0.0


@dataclass
class Product:
    """A product to be explained, on some rows of its matrix.

    Attributes:
        file, name: the tensor; index: [n] rows looked at; rows: [n, row_bytes] their bytes.
        x: [T, K] input before any rotation; y: [T, n] the numbers to be explained.
        activations: how the product should see its input; rotation: of the file.
        delta: (state size, value heads, key heads) if the columns are value heads, else None.
    """

    file: MappedFile
    name: str
    index: np.ndarray
    rows: np.ndarray
    x: np.ndarray
    y: np.ndarray
    activations: str
    rotation: Rotation
    delta: tuple[int, int, int] | None = None

    def __post_init__(self):
        self.form = self.file.tensor(self.name).format
        self.w = self.scaled(self.form.decode(self.rows))
        self.input = self.rotated(self.x) if self.block else self.x

    @property
    def block(self) -> int:
        return self.rotation.block_of(self.name, self.x.shape[1])

    def rotated(self, x: np.ndarray, block: int = 0, inverse: bool = False) -> np.ndarray:
        signs = self.rotation.signs.get(x.shape[1]) if self.block else None
        return reference.hadamard(x, block or self.block, signs, inverse)

    def scaled(self, w: np.ndarray) -> np.ndarray:
        """Decoded rows times the tensor's own scale, where it has one."""
        parts = [
            self.file.scaled(self.name, w[i : i + 1], int(n)) for i, n in enumerate(self.index)
        ]
        return np.concatenate(parts)

    def seen(self, x: np.ndarray, mode: str) -> np.ndarray:
        """An input as a product sees it; K may grow to a multiple of 32."""
        if mode == "f32" or not self.form.group:
            return x.astype(f64)
        q, dx = reference.quantize_q8_0(x)
        return (q * np.repeat(dx, 32, axis=1).astype(f64))[:, : x.shape[1]]

    @property
    def modes(self) -> tuple[str, ...]:
        """Kinds of activations to try, the expected one first."""
        if not self.form.group:
            return ("f32",)
        fits = np.abs(self.x).max() / 127 < 30000
        both = (self.activations, "f32" if self.activations == "q8_0" else "q8_0")
        return tuple(mode for mode in both if fits or mode == "f32")

    def times(self, w: np.ndarray, x: np.ndarray | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Products of weights [n, K] with an input: what to add to a name, and the result."""
        x = self.input if x is None else x
        for mode in self.modes:
            with np.errstate(all="ignore"):
                y = self.seen(x, mode) @ w.astype(f64).T
            yield "" if mode == self.modes[0] else f", {mode} activations", y


MISUSES: list[Callable[[Product], Iterator[Guess]]] = []


def _misuse(function):
    MISUSES.append(function)
    return function


@_misuse
def activations(p: Product) -> Iterator[Guess]:
    """Right, and what is only different in how the input is rounded."""
    right, *other = (y for _, y in p.times(p.w))
    yield Guess(RIGHT, "the right weights, the right product", right)
    names = {
        "q8_0": ("activations not quantized", "takes float activations, not 8-bit ones"),
        "f32": ("activations quantized", "takes 8-bit activations, not float ones"),
    }
    for y in other:
        yield Guess(*names[p.modes[0]], y)
    w, x = p.w.astype(f64), p.input
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    yield Guess(
        "activations in f16", "rounds activations to half precision", half.astype(f64) @ w.T
    )
    b = FORMATS["bf16"]
    yield Guess(
        "activations in bf16", "rounds activations to bfloat16", b.decode(b.quantize(x)) @ w.T
    )
    if x.shape[1] % 256 == 0:
        k = FORMATS["q8_K"]
        y = k.decode(k.quantize(x)) @ w.T
        yield Guess(
            "activations in q8_K", "8-bit activations in blocks of 256, as ggml has them", y
        )


@_misuse
def rotations(p: Product) -> Iterator[Guess]:
    """Inputs not rotated, rotated twice, or rotated otherwise than the file says."""
    if p.block:
        for more, y in p.times(p.w, p.x):
            yield Guess(f"activations not rotated{more}", "leaves out the Hadamard rotation", y)
        for more, y in p.times(p.w, p.rotated(p.input)):
            yield Guess(f"activations rotated twice{more}", "rotates what is already rotated", y)
        for more, y in p.times(p.w, p.rotated(p.x, inverse=True)):
            yield Guess(f"activations rotated back{more}", "applies the inverse rotation", y)
    K = p.x.shape[1]
    for block in (b for b in (32, 64, 128, 256, 512, 1024, 2048) if K % b == 0 and b != p.block):
        for more, y in p.times(p.w, p.rotated(p.x, block)):
            what = "other blocks than declared" if p.block else "no rotation is declared"
            yield Guess(f"activations rotated by {block}{more}", what, y)
    if p.block and K in p.rotation.signs:
        for more, y in p.times(p.w, reference.hadamard(p.x, p.block)):
            yield Guess(f"rotation without its signs{more}", "forgets the signs", y)


@_misuse
def head_order(p: Product) -> Iterator[Guess]:
    """Value heads in grouped order where the file's are tiled, or the other way round."""
    if p.delta is None:
        return
    n, heads, keys = p.delta
    for name, shape in (
        ("heads grouped, not tiled", (heads // keys, keys, n)),
        ("heads tiled, not grouped", (keys, heads // keys, n)),
    ):
        x = p.x.reshape(len(p.x), *shape).swapaxes(1, 2).reshape(p.x.shape)
        for more, y in p.times(p.w, p.rotated(x) if p.block else x):
            yield Guess(f"{name}{more}", "feeds value heads in the other order", y)


@_misuse
def transposed(p: Product) -> Iterator[Guess]:
    """The same numbers cut into rows of N: y = x W' with W' [K, N]."""
    info, rows = p.file.tensor(p.name), p.file.rows(p.name)
    N, K = info.rows, info.columns
    w, step = np.zeros((K, len(p.index)), np.float32), max(1, STEP // K)
    for first in range(0, N, step):
        flat = p.form.decode(rows[first : first + step]).reshape(-1)
        low = first * K
        k = np.arange(low // N, min(K, (low + len(flat) - 1) // N + 1))
        at = k[:, None] * N + p.index - low
        here = (at >= 0) & (at < len(flat))
        w[k[0] : k[-1] + 1][here] = flat[at[here]]
    for more, y in p.times(w.T):
        yield Guess(f"transposed weight{more}", "takes rows for columns", y)


@_misuse
def rows_moved(p: Product) -> Iterator[Guess]:
    """The result of the row before or behind."""
    info, rows = p.file.tensor(p.name), p.file.rows(p.name)
    for name, step in (("rows one late", -1), ("rows one early", 1)):
        moved = np.ascontiguousarray(rows[(p.index + step) % info.rows])
        for more, y in p.times(p.form.decode(moved)):
            yield Guess(f"{name}{more}", "gives each row's result to its neighbour", y)


@_misuse
def half_sums(p: Product) -> Iterator[Guess]:
    """Sums kept in half precision; told by every result being a half, in whatever order."""
    with np.errstate(all="ignore"):
        if not (p.y.astype(np.float16) == p.y).all():
            return
        x, w = p.seen(p.input, p.modes[0]).astype(np.float32), p.w
        right = x.astype(f64) @ w.astype(f64).T
        yield Guess(
            "result rounded to f16", "sums in float, keeps a half", right.astype(np.float16)
        )
        one = np.zeros(right.shape, np.float16)
        lanes = np.zeros((LANES, *right.shape), np.float16)
        for k in range(x.shape[1]):
            term = (x[:, k, None] * w[None, :, k]).astype(np.float16)
            one = one + term
            lanes[k // 32 % LANES] += term
    says = "adds products up in half precision"
    for y in (one, lanes.sum(0, dtype=np.float16)):
        size = np.abs(x).astype(f64) @ np.abs(w).astype(f64).T
        # each of K sums may be off by half of 2^-10 of what has been summed so far
        noise = float(np.linalg.norm(size) / np.linalg.norm(right)) * x.shape[1] ** 0.5 * 2.0**-11
        yield Guess("fp16 accumulation", says, y, min(noise, 0.1))


@_misuse
def companions(p: Product) -> Iterator[Guess]:
    """The tensor's own scale left out; its bias already added."""
    plain = p.form.decode(p.rows)
    if not np.array_equal(plain, p.w):
        for more, y in p.times(plain):
            yield Guess(f"tensor scale left out{more}", "does not multiply by the scale tensor", y)
    bias = f"{p.name.removesuffix('.weight')}.bias"
    if bias in p.file.tensors:
        b = p.file.values(bias).reshape(-1)[p.index]
        for more, y in p.times(p.w):
            yield Guess(f"bias added{more}", "the result has its bias in it", y + b)
