"""Ops of pnrt selftest that read weights of a format: products, activations to q8_0, embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pnrt import reference
from pnrt.backend import ACTIVATIONS
from pnrt.debug.selftest_base import DATA, Op, f32, floats, weights
from pnrt.formats import FORMATS
from pnrt.program import Program, Step
from pnrt.reference import bounds, exact

TOKENS = (1, 2, 8, 19)


class Matmul(Op):
    """A packed matrix times activations."""

    name = "matmul"
    axes = (
        "rows N B",
        "x T B",
    )
    choices = ()

    def grid(self, seed: int = 0) -> Iterator[dict[str, Any]]:
        """All formats, activations and data, each in two of the shapes; the seed says in which."""
        for name, form in FORMATS.items():
            if not form.weight:
                continue
            shapes = self.shapes(form)
            modes = ACTIVATIONS if form.group else ("f32",)
            for j, (mode, data) in enumerate(itertools.product(modes, DATA)):
                for i in (0, 2):
                    n, k = shapes[(i + j + seed) % 4]
                    size = {"format": name, "N": n, "K": k, "T": TOKENS[(i + j // 4 + seed) % 4]}
                    yield {**size, "activations": mode, "data": data}

    def shapes(self, form) -> list[tuple[int, int]]:
        """N around a panel of 16 rows; K of one block, few units, all 32 lanes, more than all."""
        unit, b = form.unit, form.block
        columns = [-(-k // b) * b for k in (1, 3 * 32, 8 * unit + 16, 33 * unit)]
        return list(zip((1, 17, 16, 33), columns, strict=True))

    def pieces(self, axis, p, a):
        if axis == "B":
            return a["rows"].shape[1] // FORMATS[p["format"]].nbytes
        return super().pieces(axis, p, a)

    def needs(self, p):
        return (("matmul", p["format"]),)

    def make(self, p, rng):
        rows = weights(rng, p["format"], p["data"], p["N"], p["K"])
        x = floats(rng, p["data"], (p["T"], p["K"]), 1e6)
        if p["data"] == "integer":
            # one 127 per block of 32 makes the activation scale exactly 1
            x = np.clip(x, -1, 1) * (rng.random(x.shape) < 0.2)
            x[:, ::32] = 127
        return {"rows": rows, "x": x.astype(f32)}

    def expected(self, p, a):
        return reference.matmul(p["format"], a["rows"], a["x"], p["activations"])

    def truth(self, p, a):
        arguments = (p["format"], a["rows"], a["x"], p["activations"])
        y, bound = exact.matmul(*arguments), exact.bound(*arguments)
        bound = np.where(bound < 2.0**104, bound, np.inf)
        if p["data"] in ("onehot", "integer"):
            bound = np.where(self.is_exact(p, a), 0.0, bound)
        return y, bound

    def is_exact(self, p, a) -> np.ndarray:
        """[T, N] bool: all terms are multiples of one unit, and few: no partial sum can round."""
        form, x = FORMATS[p["format"]], a["x"].astype(np.float64)
        if p["activations"] == "f32":
            terms = x[:, None] * form.decode(a["rows"]).astype(np.float64)
        else:
            q, dx = reference.quantize_q8_0(a["x"])
            if not np.isin(dx, (0, 1)).all():
                return np.zeros((len(x), len(a["rows"])), bool)
            x = q[:, None, : x.shape[1]].astype(np.float64)
            codes, scale, offset = form.parts(a["rows"])
            wide = [
                np.repeat(s.astype(np.float64), form.group, axis=1)[:, : codes.shape[1]]
                for s in (scale, offset)
                if s is not None
            ]
            terms = np.concatenate([x * w for w in (wide[0] * codes, *wide[1:])], axis=2)
        size = np.abs(terms).sum(-1)
        return np.isfinite(size) & (size < 2.0**24 * _unit(terms))

    def run(self, engine, p, a):
        weight = engine.pack(p["format"], a["rows"], a["x"].shape[1])
        return engine.matmul(weight, a["x"], p["activations"])


def _unit(terms: np.ndarray) -> np.ndarray:
    """The largest power of two all terms of the last axis are multiples of; inf if all are zero."""
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(np.where(np.isfinite(terms), terms, 0.0))
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        lowest = np.ldexp((whole & -whole).astype(np.float64), exponent - 53)
    return np.where(whole == 0, np.inf, lowest).min(-1)


class Embedding(Op):
    """Rows of a table, decoded: exact, whatever the bytes."""

    name = "embedding"
    axes = (
        "ids T",
        "rows V B",
    )
    simple = ()

    def grid(self, seed: int = 0):
        for name, form in FORMATS.items():
            for k in (form.block, -(-320 // form.block) * form.block):
                for data in ("normal", "bytes", "subnormal", "zero", "huge"):
                    if form.weight:
                        yield {"format": name, "V": 40, "K": k, "T": 5, "data": data}

    def pieces(self, axis, p, a):
        if axis == "B":
            return a["rows"].shape[1] // FORMATS[p["format"]].nbytes
        return super().pieces(axis, p, a)

    def needs(self, p):
        return (("embed", p["format"]), ("take", "-"))

    def make(self, p, rng):
        rows = weights(rng, p["format"], p["data"], p["V"], p["K"])
        return {"rows": rows, "ids": rng.integers(0, p["V"], p["T"])}

    def expected(self, p, a):
        return reference.embedding(p["format"], a["rows"], a["ids"] % len(a["rows"]))

    def truth(self, p, a):
        y = exact.embedding(p["format"], a["rows"], a["ids"] % len(a["rows"]))
        return y, np.zeros_like(y)

    def run(self, engine, p, a):
        width = FORMATS[p["format"]].columns(a["rows"].shape[1])
        step = Step("embed", "embed", (), ("table",), "y")
        head = (Step("rows_out", "take", ("y",), (), "logits"),)
        program = Program("selftest", {"y": width, "logits": width}, (step,), head, ())
        count = len(a["ids"])
        session = engine.bind(
            program, {"table:rows": (p["format"], a["rows"])}, positions=count, chunk=count,
            rope_tables=(np.ones((count, 1), f32), np.zeros((count, 1), f32)),
        )  # fmt: skip
        try:
            return session.run(a["ids"] % len(a["rows"]), count)
        finally:
            session.close()


class Quantize(Op):
    """Activations to q8_0, seen through a product with the unit matrix: y = dx q."""

    name = "quantize"
    axes = ("x T B",)
    sizes = ({"T": 1, "K": 32}, {"T": 5, "K": 96}, {"T": 9, "K": 320})

    def pieces(self, axis, p, a):
        return a["x"].shape[1] // 32 if axis == "B" else super().pieces(axis, p, a)

    def needs(self, p):
        return (("matmul", "q8_0"),)

    def make(self, p, rng):
        x = floats(rng, p["data"], (p["T"], p["K"]), 8e6)
        if p["data"] == "integer":
            # halves of a step: where the rounding rules part
            x = x + f32(0.5)
            x[:, ::32] = 127
        return {"x": x}

    def expected(self, p, a):
        q, dx = reference.quantize_q8_0(a["x"])
        # chains start from +0: a code of zero comes out as +0
        return q.astype(f32) * np.repeat(dx, 32, axis=1) + f32(0)

    def truth(self, p, a):
        return a["x"].astype(np.float64), bounds.quantize_q8_0(a["x"])

    def run(self, engine, p, a):
        k = a["x"].shape[1]
        blocks = np.zeros((k, k // 32, 34), np.uint8)
        blocks[:, :, :2] = np.array([1], "<f2").view(np.uint8)
        i = np.arange(k)
        blocks[i, i // 32, 2 + i % 32] = 1
        weight = engine.pack("q8_0", blocks.reshape(k, -1), k)
        return engine.matmul(weight, a["x"], "q8_0")
