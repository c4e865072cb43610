"""The reference as a backend: a program run op by op with the judge's arithmetic, in NumPy.

Slow on purpose. It takes what the other backends take and returns the bits they must return, so it
can stand wherever a backend can: `pnrt diff FILE cpu reference`, `pnrt trace --backend reference`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pnrt import reference
from pnrt.backend import ACTIVATIONS, CACHE_TYPES, Tap, check_choice
from pnrt.errors import FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.program import Program, Step


class Matrix(NamedTuple):
    """A weight as the file has it: rows [N, row bytes] uint8 of a format."""

    format: str
    rows: np.ndarray
    K: int

    @property
    def N(self) -> int:
        return len(self.rows)


class ReferenceBackend:
    """The ops of pnrt.reference under the names a program uses."""

    name = "reference"
    threads = 1

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (op, format or '-', kernel name)."""
        rows = [(op, "-", op) for op in ReferenceSession.OPS if op not in ("matmul", "embed")]
        for form in (f for f in FORMATS.values() if f.weight):
            rows += [("matmul", form.name, "matmul"), ("embed", form.name, "embed")]
        return sorted(rows)

    def pack(self, format: str, rows: np.ndarray, K: int) -> Matrix:
        """Nothing to arrange: the reference reads the file's bytes."""
        return Matrix(format, rows, K)

    def matmul(self, weight: Matrix, x: np.ndarray, activations: str = "q8_0") -> np.ndarray:
        """x [T, K] float32 times a matrix -> [T, N] float32."""
        return reference.matmul(weight.format, weight.rows, x, activations)

    def bind(
        self, program: Program, weights: Mapping[str, Any], **options: Any
    ) -> ReferenceSession:
        """Bind a program; see ReferenceSession for the options."""
        return ReferenceSession(program, weights, **options)


class ReferenceSession:
    """A program with weights and caches, as CpuSession, in NumPy.

    Args:
        weights: matrices as Matrix, vectors as float32 arrays, the embedding as (format, rows)
            under its name with ":rows" added.
        rope_tables: (cos, sin) float32 [positions, pairs].
        positions: tokens it may hold; chunk: tokens at most per run.
        kv: 'f16' or 'f32'; activations: 'q8_0' or 'f32'.
    """

    threads = 1

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Any],
        *,
        rope_tables: tuple[np.ndarray, np.ndarray],
        positions: int,
        chunk: int = 512,
        kv: str = "f16",
        activations: str = "q8_0",
    ):
        self.kv = check_choice("kv", kv, CACHE_TYPES)
        self.activations = check_choice("activations", activations, ACTIVATIONS)
        self.program, self.weights = program, weights
        self.rope_tables, self.limit = rope_tables, positions
        self.chunk = min(chunk, positions)
        self.observer: Callable[[Tap], None] | None = None
        self.progress = None
        self.reset()

    def prepare(self) -> None:
        """Nothing is compiled here."""

    def reset(self) -> None:
        """Forget every token."""
        self.position = 0
        # slot of a cache -> [positions, 2 G E]: keys, then values
        self.caches: dict[str, np.ndarray] = {}

    def close(self) -> None:
        """Drop the weights and caches."""
        self.weights, self.caches = {}, {}

    def run(self, tokens: np.ndarray, wanted: int = 1) -> np.ndarray:
        """Feed 1 .. chunk tokens; float32 logits [wanted, V] of the last `wanted` of them.

        Raises: ModelError when the context is full or a value does not fit 8-bit activations.
        """
        T, first = len(tokens), self.position
        if first + T > self.limit:
            raise ModelError(
                f"the context is full: {first} + {T} tokens, it holds {self.limit}. "
                "Use a shorter prompt or a larger context"
            )
        slots = {"tokens": np.asarray(tokens, np.int64)}
        for step in self.program.body:
            self._step(step, slots, first)
        if wanted:
            slots = {slot: x[T - wanted :] for slot, x in slots.items()}
            for step in self.program.head:
                self._step(step, slots, first + T - wanted)
        self.position += T
        V = self.program.slots[self.program.logits]
        return slots[self.program.logits] if wanted else np.empty((0, V), np.float32)

    def _step(self, step: Step, slots: dict[str, np.ndarray], start: int) -> None:
        began = time.perf_counter()
        y = self.compute(step, slots, start)
        seconds = time.perf_counter() - began
        if step.output.startswith("cache."):
            past = self.caches.get(step.output)
            self.caches[step.output] = y if past is None else np.concatenate([past, y])
        else:
            slots[step.output] = y
        if self.observer:
            size = self.weights[step.weights[0]].rows.nbytes if step.op == "matmul" else 0
            self.observer(Tap(step, start, len(y), lambda: y, ((step.op, seconds, size),)))

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """Run one step alone; see pnrt.backend.Session."""
        step = next(step for step in self.program.steps if step.name == name)
        return self.compute(step, inputs, start)

    def compute(self, step: Step, slots: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """The output [T, width] of a step whose first row is at position `start`.

        Raises: ModelError naming the step where the reference refuses its input.
        """
        try:
            return self.OPS[step.op](self, step, slots, start)
        except FormatError as error:
            raise ModelError(f"{step.name}: {error}") from error

    def _embed(self, step, slots, start):
        form, rows = self.weights[f"{step.weights[0]}:rows"]
        return reference.embedding(form, rows, slots["tokens"])

    def _matmul(self, step, slots, start):
        weight = self.weights[step.weights[0]]
        return reference.matmul(weight.format, weight.rows, slots[step.inputs[0]], self.activations)

    def _rms_norm(self, step, slots, start):
        x, n = slots[step.inputs[0]], step.numbers
        shaped = _heads(x, n["heads"])
        return reference.rms_norm(shaped, self.weights[step.weights[0]], n["eps"]).reshape(x.shape)

    def _add_bias(self, step, slots, start):
        x = slots[step.output]
        return reference.add(x, np.broadcast_to(self.weights[step.weights[0]], x.shape))

    def _rope(self, step, slots, start):
        x, n = slots[step.output], step.numbers
        cos, sin = (table[start : start + len(x)] for table in self.rope_tables)
        return reference.rope(_heads(x, n["heads"]), cos, sin, n["neox"]).reshape(x.shape)

    def _store_kv(self, step, slots, start):
        kind = np.float16 if self.kv == "f16" else np.float32
        with np.errstate(over="ignore"):
            stored = [slots[i].astype(kind).astype(np.float32) for i in step.inputs]
        return np.concatenate(stored, axis=1)

    def _attention(self, step, slots, start):
        n, (q, cache) = step.numbers, step.inputs
        x, held = slots[q], slots[cache] if cache in slots else self.caches[cache]
        groups, dim = self.program.caches[n["cache"]]
        k, v = np.split(held[: start + len(x)].reshape(-1, 2 * groups, dim), 2, axis=1)
        y = reference.attention(_heads(x, n["heads"]), k, v, start, n["scale"])
        return y.reshape(len(x), -1)

    def _swiglu(self, step, slots, start):
        return reference.swiglu(*(slots[i] for i in step.inputs))

    def _add(self, step, slots, start):
        return reference.add(*(slots[i] for i in step.inputs))

    def _take(self, step, slots, start):
        return slots[step.inputs[0]].copy()

    OPS: ClassVar[dict[str, Callable[..., np.ndarray]]] = {
        "add": _add,
        "add_bias": _add_bias,
        "attention": _attention,
        "embed": _embed,
        "matmul": _matmul,
        "rms_norm": _rms_norm,
        "rope": _rope,
        "store_kv": _store_kv,
        "swiglu": _swiglu,
        "take": _take,
    }


def _heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(len(x), count, -1)
