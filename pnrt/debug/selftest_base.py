"""What the ops of pnrt selftest share: inputs of every kind, and a backend that runs one step.

An op that is a step of programs runs as a program of one step, through the same `bind` and `run`
that models use: its inputs are rows of float32 tables that `embed` copies, its output is taken as
logits. Before the measured run every buffer has seen NaN, so what is not written cannot pass. A
backend needs nothing but the protocol of pnrt.backend to be tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pnrt.backend import Backend
from pnrt.formats import FORMATS
from pnrt.formats.pn import PN
from pnrt.program import Program, Step

f32 = np.float32
Parameters = Mapping[str, Any]
Arrays = dict[str, np.ndarray]

# what values look like: the ordinary, and what kernels get wrong
DATA = ("normal", "bytes", "subnormal", "zero", "huge", "equal", "onehot", "integer")
FLOAT_DATA = tuple(d for d in DATA if d != "bytes")
# entries of a table that run_steps needs
STEPS_NEED = (("embed", "f32"), ("take", "-"))


class Op:
    """One op under test.

    name: as in a case; axes: arrays with the axes that may be cut when a failing case is shrunk (an
    axis may be cut in pieces of many elements: B is a block of bytes here, of weights there);
    simple: arrays whose values may be replaced by zeros and ones then.
    """

    name = ""
    axes: tuple[str, ...] = ()
    simple: tuple[str, ...] = ("x",)
    # the grid: sizes times all choices
    sizes: tuple[dict[str, Any], ...] = ()
    choices: tuple[tuple[str, tuple], ...] = (("data", FLOAT_DATA),)

    def grid(self, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Parameters of every case; the seed may choose among shapes."""
        names = [name for name, _ in self.choices]
        for size in self.sizes:
            for values in itertools.product(*(values for _, values in self.choices)):
                yield {**size, **dict(zip(names, values, strict=True))}

    def pieces(self, axis: str, p: Parameters, a: Arrays) -> int:
        """How many pieces an axis has: the elements of the arrays it is an axis of."""
        return min(
            a[name].shape[names.index(axis)]
            for name, *names in map(str.split, self.axes)
            if axis in names
        )

    def needs(self, p: Parameters) -> tuple[tuple[str, str], ...]:
        """Entries (op, format) of a backend's table a case needs."""
        raise NotImplementedError

    def make(self, p: Parameters, rng: np.random.Generator) -> Arrays:
        """The inputs of a case."""
        raise NotImplementedError

    def expected(self, p: Parameters, a: Arrays) -> np.ndarray:
        """The reference's result, float32 [T, ...]: the bits to return."""
        raise NotImplementedError

    def truth(self, p: Parameters, a: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The exact result in float64, and how far from it a right one may be."""
        raise NotImplementedError

    def run(self, engine: Backend, p: Parameters, a: Arrays) -> np.ndarray:
        """What the backend returns, shaped like `expected`."""
        raise NotImplementedError


def floats(rng: np.random.Generator, data: str, shape: tuple[int, ...], huge: float) -> np.ndarray:
    """float32 values of one kind of data; `huge` is what huge means here."""
    x = rng.standard_normal(shape)
    if data in ("normal", "bytes"):
        x[rng.random(shape) < 0.02] *= 50
        x = np.where(rng.random(shape) < 0.02, -0.0, x)
    elif data == "subnormal":
        x *= np.where(rng.random(shape) < 0.5, 1e-40, 1e-6)
    elif data == "zero":
        x = np.where(rng.random(shape) < 0.05, x, np.copysign(0.0, x))
    elif data == "huge":
        x = rng.uniform(-huge, huge, shape)
    elif data == "equal":
        x = np.full(shape, x.flat[0] if x.size else 0.0)
    elif data == "onehot":
        x = np.zeros(shape)
        last = rng.integers(0, shape[-1], shape[:-1])
        np.put_along_axis(x, last[..., None], 1.0, axis=-1)
    elif data == "integer":
        x = rng.integers(-8, 9, shape).astype(float)
    return x.astype(f32)


def valid_rows(name: str, rows: np.ndarray) -> np.ndarray:
    """Rows with whatever `findings` objects to set to zero bytes."""
    form = FORMATS[name]
    while bad := form.findings(rows):
        for finding in bad:
            rows[finding.row, finding.byte : finding.byte + 4] = 0
    return rows


def weights(rng: np.random.Generator, name: str, data: str, n: int, k: int) -> np.ndarray:
    """Rows [n, row_bytes] uint8 of a format with one kind of data."""
    form = FORMATS[name]
    if data in ("bytes", "onehot") or (data == "integer" and form.halves and form.group):
        rows = rng.integers(0, 256, (n, form.row_bytes(k)), dtype=np.uint8)
        blocks = rows.reshape(-1, form.nbytes)
        if isinstance(form, PN):
            words = blocks[:, 2:].copy().view("<u4") & ~form.reserved
            blocks[:, 2:] = words.astype("<u4").view(np.uint8)
        valid_rows(name, rows)
        if data == "integer":
            # scales that are powers of two leave nothing to round
            for offset, _ in form.halves:
                power = f32(2) ** rng.integers(-1, 2, len(blocks))
                blocks[:, offset : offset + 2] = power.astype("<f2")[:, None].view(np.uint8)
        return rows
    if data == "integer":
        x = rng.integers(-1, 2, (n, k)).astype(f32)
    else:
        spread = {"normal": 0.05, "subnormal": 1e-7}.get(data, 1.0)
        x = floats(rng, data, (n, k), 6e4) * f32(spread)
    # a format that quantizes by larger groups than it stores gets whole ones, cut again
    whole = -(-k // 32) * 32 if form.block < 32 else k
    x = np.pad(x, ((0, 0), (0, whole - k)))
    return np.ascontiguousarray(form.quantize(x)[:, : form.row_bytes(k)])


def run_steps(
    engine: Backend,
    tables: Arrays,
    steps: list[Step],
    out: str,
    widths: Mapping[str, int],
    *,
    vectors: Arrays | None = None,
    caches: tuple[tuple[int, int], ...] = (),
    states: Mapping[str, tuple[int, ...]] | None = None,
    rope: tuple[np.ndarray, np.ndarray] | None = None,
    start: int = 0,
    kv: str = "f32",
) -> np.ndarray:
    """Run steps on tables of inputs.

    Args:
        tables: slot -> [P, width] float32; token t reads row t.
        steps, out, widths: the program and the slot that is returned, with its width.
        vectors: weights by name; caches, states: as of a Program.
        start: tokens fed before the measured ones.
    Returns: [P - start, width] float32.
    """
    total = len(next(iter(tables.values())))
    slots = {name: table.shape[1] for name, table in tables.items()} | dict(widths)
    slots["logits"] = slots[out]
    bound: dict[str, Any] = dict(vectors or {})
    body = []
    for name, table in tables.items():
        body.append(Step(f"{name}_in", "embed", (), (f"{name}.table",), name))
        # the second half is poison
        rows = np.concatenate([table, np.full_like(table, np.nan)])
        bound[f"{name}.table:rows"] = ("f32", rows.view(np.uint8).reshape(2 * total, -1))
    head = (Step("rows_out", "take", (out,), (), "logits"),)
    program = Program("selftest", slots, (*body, *steps), head, caches, states or {})
    if rope is None:
        rope = (np.ones((total, 1), f32), np.zeros((total, 1), f32))
    session = engine.bind(
        program, bound, rope_tables=rope, positions=total, chunk=total, kv=kv, activations="f32"
    )
    try:
        session.run(np.arange(total, 2 * total), total)
        session.reset()
        if start:
            session.run(np.arange(start), 1)
        return session.run(np.arange(start, total), total - start)
    finally:
        session.close()
