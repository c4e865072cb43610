"""The CPU backend: its table, and programs bound to weights, buffers and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pnrt.backend import (
    ACTIVATIONS,
    CACHE_TYPES,
    Tap,
    check_choice,
    check_rows,
    check_run,
    not_coded,
    refusal,
)
from pnrt.cpu import attention, delta, elementwise, embed, matmul, norm, pack, rope, rotate, tap
from pnrt.cpu.activations import TILE, Activations
from pnrt.cpu.binder import Binder, whole
from pnrt.cpu.codec import CODECS, FLOATS
from pnrt.errors import DeviceError, FormatError
from pnrt.jit import Script
from pnrt.machine import default_threads
from pnrt.models.state import Snapshot
from pnrt.program import Program

# logits are computed for this many rows at a time, whatever the chunk
HEAD_ROWS = 64
FORMATS_HERE = (*CODECS, *FLOATS)
OPS = {
    "add": elementwise.add_kernel,
    "add_bias": elementwise.bias_kernel,
    "attention": attention.attention_kernels["f16"],
    "conv_silu": delta.conv_silu_kernel,
    "decay": delta.decay_kernel,
    "delta": delta.delta_kernel,
    "hadamard": rotate.hadamard_kernel,
    "l2_norm": norm.l2_norm_kernel,
    "regroup": rotate.regroup_kernel,
    "rms_norm": norm.rms_norm_kernel,
    "rope": rope.rope_kernel,
    "scale": elementwise.scale_kernel,
    "sigmoid": elementwise.sigmoid_kernel,
    "sigmoid_gate": elementwise.sigmoid_gate_kernel,
    "store_kv": rope.store_kernel,
    "swiglu": elementwise.swiglu_kernel,
    "take": embed.take_kernel,
}


class CpuBackend:
    """numba kernels with explicit SIMD on `threads` threads."""

    name = "cpu"
    # a sentence about why it was chosen
    note = ""

    def __init__(self, threads: int | None = None):
        if threads is not None and threads < 1:
            raise DeviceError(
                f"threads: found {threads}; at least 1 is needed. Give more, or None."
            )
        self.threads = threads or default_threads()[0]

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (op, format or '-', kernel name): everything this backend can do."""
        rows = [(op, "-", kernel.name) for op, kernel in OPS.items()]
        for form in FORMATS_HERE:
            rows.append(("matmul", form, f"matmul_{form}"))
            rows.append(("embed", form, f"embed_{form}"))
        return sorted(rows)

    def reserve(self, program: Program, shape: Callable, **options: Any) -> None:
        """Nothing to take beforehand: the system gives memory as it is touched."""

    def pack(
        self,
        format: str,
        rows: np.ndarray,
        K: int,
        before: Callable[[int, int], None] | None = None,
    ) -> pack.Weight:
        """Interleave a matrix by 16 rows.

        Args:
            format: name of a format in the table.
            rows: [N, row_bytes] uint8.
            K: weights per row.
            before: see pnrt.backend.Backend.
        Raises: DeviceError for a format without a kernel, FormatError as backend.check_rows.
        """
        if format not in FORMATS_HERE:
            raise refusal(self.name, self.table(), "matmul", format, "pack")
        rows = check_rows(format, rows, K, unseen=before is None)
        return pack.pack(format, rows, K, self.threads, before)

    def matmul(self, weight: pack.Weight, x: np.ndarray, activations: str = "q8_0") -> np.ndarray:
        """Multiply activations by a packed matrix.

        Args:
            x: [T, K] float32, finite.
            activations: 'q8_0' or 'f32'; f32, f16 and bf16 weights always take f32.
        Returns: [T, N] float32.
        Exact: the bits of reference.matmul, for any T, thread count and instruction set.
        Raises: FormatError for another shape or non-finite x.
        """
        check_choice("activations", activations, ACTIVATIONS)
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim != 2 or x.shape[1] != weight.K:
            raise FormatError(f"matmul: x is {list(x.shape)}; needed [T, {weight.K}]")
        if not np.isfinite(x).all():
            t, k = np.argwhere(~np.isfinite(x))[0]
            raise FormatError(f"matmul: x[{t}, {k}] is {x[t, k]}; activations must be finite")
        T, count = len(x), 1 if len(x) == 1 else TILE
        if T == 0:
            return np.empty((0, weight.N), np.float32)
        mode = "f32" if weight.format in FLOATS else activations
        inputs = Activations(weight.K, T, mode, count)
        out = np.full((whole(T, count), weight.panels * pack.ROWS), np.nan, np.float32)
        control, bad = np.array([T, 0], np.int64), np.zeros(1, np.int32)
        scratch = matmul.scratch(self.threads, [weight], mode)
        calls = [
            inputs.fill(x, control, bad),
            matmul.matmul(weight, inputs, out, control, scratch),
        ]
        Script(calls).run(self.threads)
        if bad[0]:
            t = int(np.abs(x).max(1).argmax())
            raise FormatError(
                f"matmul: x[{t}] reaches {np.abs(x[t]).max():g}; q8_0 codes blocks of 32 with "
                "max|x| / 127 below 65520. Use activations='f32'"
            )
        return out[:T, : weight.N].copy()

    def bind(self, program: Program, weights: Mapping[str, Any], **options: Any) -> CpuSession:
        """Bind a program; see CpuSession for the options."""
        return CpuSession(self, program, weights, **options)

    def close(self) -> None:
        """Nothing is held: packed matrices are arrays."""


class CpuSession:
    """A program with weights, buffers and caches; feeds tokens and returns logits.

    Args:
        weights: matrices as Weight, vectors as float32 arrays, the embedding as (format, rows)
            under its name with ":rows" added.
        rope_tables: (cos, sin) float32 [positions, pairs].
        positions: tokens the cache holds.
        chunk: tokens at most per run.
        kv: 'f16' or 'f32'; activations: 'q8_0' or 'f32'.
    """

    def __init__(
        self,
        backend: CpuBackend,
        program: Program,
        weights: Mapping[str, Any],
        *,
        rope_tables: tuple[np.ndarray, np.ndarray],
        positions: int,
        chunk: int = 512,
        kv: str = "f16",
        activations: str = "q8_0",
        progress: Callable[[int, int, str, float], None] | None = None,
    ):
        self.kv = check_choice("kv", kv, CACHE_TYPES)
        self.activations = check_choice("activations", activations, ACTIVATIONS)
        self.backend, self.program, self.weights = backend, program, weights
        self.threads, self.progress = backend.threads, progress
        self.rope_tables = tuple(np.ascontiguousarray(t, np.float32) for t in rope_tables)
        self.positions = whole(positions, pack.ROWS)
        self.limit = positions
        self.chunk = whole(min(chunk, self.limit), TILE)
        self.position = 0
        self._spoiled = ""
        self._allocate()
        self.observer: Callable[[Tap], None] | None = None
        self._flags: list[tuple[str, np.ndarray]] = []
        self._scripts: dict[tuple[str, int], Script] = {}
        # the step each call of a script belongs to
        self._names: dict[tuple[str, int], list[str]] = {}

    def _allocate(self) -> None:
        kind = np.uint16 if self.kv == "f16" else np.float32
        # room for all heads that share keys and values, so that they are read once
        rooms = (
            step.numbers["heads"] // groups * attention.scratch_bytes(self.positions, dim)
            for step in self.program.body
            if step.op == "attention"
            for groups, dim in [self.program.caches[step.numbers["cache"]]]
        )
        self.scratch_bytes = whole(max(rooms, default=0), 64)
        self.scratch = pack.aligned(self.threads * self.scratch_bytes)
        matrices = [w for w in self.weights.values() if isinstance(w, pack.Weight)]
        self.products = matmul.scratch(self.threads, matrices, self.activations)
        self.tokens = np.zeros(self.chunk, np.int64)
        self.caches = [
            (
                pack.aligned(g * self.positions * dim * kind().itemsize),
                pack.aligned(g * self.positions * dim * kind().itemsize),
            )
            for g, dim in self.program.caches
        ]
        shapes = self.program.states
        self.states = {name: delta.new_state(shape) for name, shape in shapes.items()}
        heads = {step.output for step in self.program.head}
        self.slots = {
            name: self._slot(_rows(name in heads, self.chunk), width)
            for name, width in self.program.slots.items()
        }
        # tokens of the body and the first one's position; rows of the head and the first of them
        self.control, self.head_control = np.zeros(2, np.int64), np.zeros(2, np.int64)

    def _slot(self, rows: int, width: int) -> np.ndarray:
        width = whole(width, pack.ROWS)
        return pack.aligned(rows * width * 4).view(np.float32).reshape(rows, width)

    def vector(self, name: str) -> np.ndarray:
        """A norm weight or bias, float32."""
        return self.weights[name]

    def flag(self, step: str) -> np.ndarray:
        """Where a step reports that its input was not finite."""
        self._flags.append((step, np.zeros(1, np.int32)))
        return self._flags[-1][1]

    def _script(self, part: str, count: int) -> Script:
        """The calls of 'body', 'head' or 'both' for one token or for tiles of them."""
        key = (part, count)
        if key not in self._scripts:
            binder = Binder(self, count)
            capacity = 1 if count == 1 else self.chunk
            if part in ("body", "both"):
                binder.bind(self.program.body, self.control, capacity)
            if part in ("head", "both"):
                binder.bind(self.program.head, self.head_control, min(capacity, HEAD_ROWS))
            self._scripts[key], self._names[key] = binder.script(), binder.names
            self._scripts[key].compile(self.progress)
        return self._scripts[key]

    def prepare(self) -> None:
        """Compile (or load) every kernel a prompt and a generation need."""
        for part, count in (("both", 1), ("body", TILE), ("head", 1), ("head", TILE)):
            self._script(part, count)

    def run(self, tokens: np.ndarray, wanted: int = 1) -> np.ndarray:
        """Feed 1 .. chunk tokens.

        Args:
            tokens: [T] token ids.
            wanted: logits of how many of the last tokens.
        Returns: [wanted, V] float32.
        Raises: ModelError when the context is full, a value is not finite, or was not in a run
            before and the states have not been reset since.
        """
        T = len(tokens)
        check_run(self.position, T, self.limit, self._spoiled)
        self.tokens[:T] = tokens
        self.control[:] = T, self.position
        V = self.program.slots[self.program.logits]
        logits = np.empty((wanted, V), np.float32)
        if T == 1 and wanted == 1:
            self.head_control[:] = 1, 0
            self._run("both", 1)
            logits[0] = self.slots[self.program.logits][0, :V]
        else:
            self._run("body", 1 if T == 1 else TILE)
            for first in range(0, wanted, HEAD_ROWS):
                rows = min(HEAD_ROWS, wanted - first)
                self.head_control[:] = rows, T - wanted + first
                self._run("head", 1 if rows == 1 else TILE)
                logits[first : first + rows] = self.slots[self.program.logits][:rows, :V]
        self.position += T
        return logits

    def _run(self, part: str, count: int) -> None:
        script = self._script(part, count)
        if self.observer is None:
            script.run(self.threads)
        else:
            tap.walk(self, script, self._names[part, count])
        bad = [step for step, flag in self._flags if flag[0]]
        if bad:
            # one bad value spreads to later steps: the first names the cause, and all start clean
            for _, flag in self._flags:
                flag[0] = 0
            # a cache is written again at the same positions, a state has moved on
            self._spoiled = bad[0] if self.program.states else ""
            raise not_coded(bad[0], self.position)

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """Run one step alone; see pnrt.backend.Session."""
        return tap.redo(self, name, inputs, start)

    def reset(self) -> None:
        """Forget every token."""
        self.position, self._spoiled = 0, ""
        for state in self.states.values():
            state[...] = 0

    def snapshot(self) -> Snapshot:
        """A copy of caches and states after the tokens read so far."""
        n = self.position
        keys, values = [], []
        for key, value in self._views():
            keys.append(key[:, : whole(n, pack.ROWS) // pack.ROWS].transpose(1, 3, 0, 2))
            keys[-1] = keys[-1].reshape(-1, *keys[-1].shape[2:])[:n].copy()
            values.append(value[:, :n].transpose(1, 0, 2).copy())
        shapes = self.program.states
        states = {name: delta.read_state(self.states[name], s) for name, s in shapes.items()}
        return Snapshot(self.program.architecture, n, self.kv, tuple(keys), tuple(values), states)

    def restore(self, snapshot: Snapshot) -> None:
        """Put caches and states back.

        Raises: ModelError for a snapshot of another model, another kv or too many tokens.
        """
        snapshot.check(self.program, self.kv, self.limit)
        n = snapshot.position
        for (key, value), k, v in zip(self._views(), snapshot.keys, snapshot.values, strict=True):
            for t in range(n):
                key[:, t // pack.ROWS, :, t % pack.ROWS] = k[t]
            value[:, :n] = v.transpose(1, 0, 2)
        for name, state in snapshot.states.items():
            delta.write_state(self.states[name], state)
        self.position, self._spoiled = n, ""

    def _views(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per attention layer: keys [G, blocks, E, 16] and values [G, positions, E]."""
        kind = np.float16 if self.kv == "f16" else np.float32
        return [
            (
                keys.view(kind).reshape(groups, -1, dim, pack.ROWS),
                values.view(kind).reshape(groups, -1, dim),
            )
            for (keys, values), (groups, dim) in zip(self.caches, self.program.caches, strict=True)
        ]

    def close(self) -> None:
        """Drop the weights and buffers."""
        self.weights, self.slots, self.caches, self.states = {}, {}, [], {}
        self._scripts.clear()


def _rows(in_head: bool, chunk: int) -> int:
    return min(HEAD_ROWS, chunk) if in_head else chunk
