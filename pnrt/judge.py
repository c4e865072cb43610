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
from pnrt.backend import ACTIVATIONS, CACHE_TYPES, Tap, check_choice, check_run
from pnrt.errors import FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.models.state import Snapshot
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

    def reserve(self, program: Program, shape: Callable, **options: Any) -> None:
        """Nothing to take beforehand."""

    def pack(
        self,
        format: str,
        rows: np.ndarray,
        K: int,
        before: Callable[[int, int], None] | None = None,
    ) -> Matrix:
        """Nothing to arrange: the reference reads the file's bytes."""
        if before:
            before(0, len(rows))
        return Matrix(format, rows, K)

    def matmul(self, weight: Matrix, x: np.ndarray, activations: str = "q8_0") -> np.ndarray:
        """x [T, K] float32 times a matrix -> [T, N] float32."""
        return reference.matmul(weight.format, weight.rows, x, activations)

    def bind(
        self, program: Program, weights: Mapping[str, Any], **options: Any
    ) -> ReferenceSession:
        """Bind a program; see ReferenceSession for the options."""
        return ReferenceSession(self, program, weights, **options)

    def close(self) -> None:
        """Nothing is held."""


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
        backend: ReferenceBackend,
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
        self.backend, self.program, self.weights = backend, program, weights
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
        self.states = {name: np.zeros(s, np.float32) for name, s in self.program.states.items()}

    def snapshot(self) -> Snapshot:
        """A copy of caches and states after the tokens read so far."""
        kind = np.float16 if self.kv == "f16" else np.float32
        held = []
        for index, (groups, dim) in enumerate(self.program.caches):
            cache = self.caches.get(f"cache.{index}", np.zeros((0, 2 * groups * dim), np.float32))
            held.append(np.split(cache.reshape(-1, 2 * groups, dim).astype(kind), 2, axis=1))
        keys, values = zip(*held, strict=True) if held else ((), ())
        return Snapshot(
            self.program.architecture, self.position, self.kv, keys, values, dict(self.states)
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put caches and states back.

        Raises: ModelError for a snapshot of another model, another kv or too many tokens.
        """
        snapshot.check(self.program, self.kv, self.limit)
        self.position, self.states = snapshot.position, dict(snapshot.states)
        self.caches = {}
        for index, pair in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
            both = np.concatenate(pair, axis=1).astype(np.float32)
            self.caches[f"cache.{index}"] = both.reshape(snapshot.position, -1)

    def close(self) -> None:
        """Drop the weights and caches."""
        self.weights, self.caches, self.states = {}, {}, {}

    def run(self, tokens: np.ndarray, wanted: int = 1) -> np.ndarray:
        """Feed 1 .. chunk tokens; float32 logits [wanted, V] of the last `wanted` of them.

        Raises: ModelError when the context is full or a value does not fit 8-bit activations.
        """
        T, first = len(tokens), self.position
        check_run(first, T, self.limit)
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
        y, state = self.compute(step, slots, start)
        seconds = time.perf_counter() - began
        if step.output.startswith("cache."):
            past = self.caches.get(step.output)
            self.caches[step.output] = y if past is None else np.concatenate([past, y])
        else:
            slots[step.output] = y
        if state is not None:
            self.states[step.inputs[-1]] = state
        if self.observer:
            size = self.weights[step.weights[0]].rows.nbytes if step.op == "matmul" else 0
            self.observer(Tap(step, start, len(y), lambda: y, ((step.op, seconds, size),)))

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """Run one step alone; see pnrt.backend.Session."""
        step = next(step for step in self.program.steps if step.name == name)
        return self.compute(step, inputs, start)[0]

    def compute(
        self, step: Step, slots: Mapping[str, np.ndarray], start: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The output [T, width] of a step whose first row is at position `start`, and its state.

        A recurrent step takes its state, the last of its inputs, from slots or from the session;
        others return None for it.

        Raises: ModelError naming the step where the reference refuses its input.
        """
        try:
            y = self.OPS[step.op](self, step, slots, start)
        except FormatError as error:
            raise ModelError(f"{step.name}: {error}") from error
        return y if isinstance(y, tuple) else (y, None)

    def _embed(self, step, slots, start):
        form, rows = self.weights[f"{step.weights[0]}:rows"]
        return reference.embedding(form, rows, slots["tokens"])

    def _matmul(self, step, slots, start):
        weight = self.weights[step.weights[0]]
        return reference.matmul(weight.format, weight.rows, slots[step.inputs[0]], self.activations)

    def _state(self, step, slots):
        name = step.inputs[-1]
        return slots[name] if name in slots else self.states[name]

    def _rms_norm(self, step, slots, start):
        n = step.numbers
        x = _heads(slots[step.inputs[0]], n["heads"], n["stride"])[..., : n["n"]]
        return _flat(reference.rms_norm(x, self.weights[step.weights[0]], n["eps"]))

    def _l2_norm(self, step, slots, start):
        n = step.numbers
        x = _heads(slots[step.inputs[0]][:, n["first"] :], n["heads"], n["n"])
        return _flat(reference.multiply(reference.l2_norm(x, n["eps"]), np.float32(n["scale"])))

    def _conv_silu(self, step, slots, start):
        n, x = step.numbers, slots[step.inputs[0]]
        taps = self.weights[step.weights[0]].reshape(n["n"], n["taps"])
        y, state = reference.conv(x, taps, self._state(step, slots))
        return reference.silu(y), state

    def _decay(self, step, slots, start):
        rate, dt = (self.weights[name] for name in step.weights)
        x = slots[step.inputs[0]]
        return reference.decay(rate, x, np.broadcast_to(dt, x.shape))

    def _delta(self, step, slots, start):
        n, state = step.numbers, self._state(step, slots)
        q, k, v, g, beta = (slots[i] for i in step.inputs[:5])
        q, k = (_heads(a, n["key_heads"], n["n"]) for a in (q, k))
        v, out = _heads(v[:, n["first"] :], n["heads"], n["n"]), []
        key = np.arange(n["heads"]) % n["key_heads"]
        for t in range(len(v)):
            o, state = reference.delta_step(state, q[t, key], k[t, key], v[t], g[t], beta[t])
            out.append(o)
        return _flat(np.stack(out)), state

    def _sigmoid(self, step, slots, start):
        return reference.sigmoid(slots[step.inputs[0]])

    def _sigmoid_gate(self, step, slots, start):
        n, (x, gate) = step.numbers, (slots[i] for i in step.inputs)
        gate = _heads(gate, n["heads"], n["stride"])[..., n["first"] : n["first"] + n["n"]]
        return reference.sigmoid_gate(x, _flat(gate))

    def _hadamard(self, step, slots, start):
        n, x = step.numbers, slots[step.inputs[0]]
        signs = self.weights[step.weights[0]] if step.weights else None
        return reference.hadamard(x[:, : n["n"]], n["block"], signs, n["inverse"])

    def _regroup(self, step, slots, start):
        n, x = step.numbers, slots[step.inputs[0]]
        tiled = x.reshape(len(x), n["heads"] // n["groups"], n["groups"], n["n"])
        return _flat(tiled.swapaxes(1, 2))

    def _add_bias(self, step, slots, start):
        x = slots[step.output]
        return reference.add(x, np.broadcast_to(self.weights[step.weights[0]], x.shape))

    def _scale(self, step, slots, start):
        return reference.multiply(slots[step.output], self.weights[step.weights[0]])

    def _rope(self, step, slots, start):
        x, n = slots[step.output], step.numbers
        cos, sin = (table[start : start + len(x)] for table in self.rope_tables)
        return reference.rope(_heads(x, n["heads"], n["dim"]), cos, sin, n["neox"]).reshape(x.shape)

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
        y = reference.attention(_heads(x, n["heads"], dim), k, v, start, n["scale"])
        return y.reshape(len(x), -1)

    def _swiglu(self, step, slots, start):
        return reference.swiglu(*(slots[i] for i in step.inputs))

    def _add(self, step, slots, start):
        return reference.add(*(slots[i] for i in step.inputs))

    def _take(self, step, slots, start):
        return slots[step.inputs[0]].copy()

    OPS: ClassVar[dict[str, Callable[..., Any]]] = {
        "add": _add,
        "add_bias": _add_bias,
        "attention": _attention,
        "conv_silu": _conv_silu,
        "decay": _decay,
        "delta": _delta,
        "embed": _embed,
        "hadamard": _hadamard,
        "l2_norm": _l2_norm,
        "matmul": _matmul,
        "regroup": _regroup,
        "rms_norm": _rms_norm,
        "rope": _rope,
        "scale": _scale,
        "sigmoid": _sigmoid,
        "sigmoid_gate": _sigmoid_gate,
        "store_kv": _store_kv,
        "swiglu": _swiglu,
        "take": _take,
    }


def _heads(x: np.ndarray, count: int, n: int) -> np.ndarray:
    """The first count * n columns as [T, count, n]."""
    return x[:, : count * n].reshape(len(x), count, n)


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)
