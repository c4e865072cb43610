"""A program bound to weights, buffers and state on one device, one token or a prompt at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pnrt.backend import ACTIVATIONS, CACHE_TYPES, Tap, check_choice, check_run, not_coded
from pnrt.cuda import argmax, embed, memory, tap
from pnrt.cuda.binder import BODY, HEAD, PARTS, Binder
from pnrt.cuda.kernel import Call, Sequence
from pnrt.models.state import Snapshot
from pnrt.program import Program

if TYPE_CHECKING:
    from pnrt.cuda.backend import CudaBackend


class CudaSession:
    """A program with weights, buffers and caches on the device; feeds tokens, returns logits.

    Args:
        weights: matrices as Weight, vectors as float32 arrays, the embedding as (format, rows)
            under its name with ":rows" added.
        rope_tables: (cos, sin) float32 [positions, pairs].
        positions: tokens the cache holds.
        chunk: tokens at most per run.
        kv: 'f16' or 'f32'; activations: 'q8_0' or 'f32'.
    """

    threads = 1

    def __init__(
        self,
        backend: CudaBackend,
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
        self.size = memory.sizes(program, positions, chunk, kv, activations)
        self.limit, self.chunk, self.position = positions, self.size.chunk, 0
        self.observer: Callable[[Tap], None] | None = None
        self.progress: Callable[[int, int, str, float], None] | None = None
        self._spoiled = ""
        self._flags = [step.name for step in program.steps if step.op == "matmul"]
        self._bound: dict[tuple[str, int, bool], Binder] = {}
        self._ready: dict[tuple[str, int] | str, Sequence] = {}
        wanted = memory.regions(program, self._shape, self.size)
        # address of each region
        self.at = {region: backend._take(nbytes) for region, nbytes in wanted.items()}
        self._write_constants(rope_tables)
        self.reset()

    def _shape(self, name: str) -> tuple[str, int, int]:
        w = self.weights[name]
        return ("f32", 1, w.size) if isinstance(w, np.ndarray) else (w.format, w.N, w.K)

    def _write_constants(self, rope_tables: tuple[np.ndarray, np.ndarray]) -> None:
        device = self.backend.device
        if any(step.op == "rope" for step in self.program.steps):
            for name, values in zip(("cos", "sin"), rope_tables, strict=True):
                device.write(self.at[name], np.ascontiguousarray(values, np.float32))
        for step in self.program.steps:
            for name in step.weights if step.op not in ("matmul", "embed") else ():
                values = self.weights[name]
                if step.op == "conv_silu":
                    # neighbouring threads are neighbouring channels
                    values = values.reshape(step.numbers["n"], step.numbers["taps"]).T
                device.write(self.at[name], np.ascontiguousarray(values, np.float32))
        self.clear_flags()

    def clear_flags(self) -> None:
        """No step has reported anything."""
        self.backend.device.write(self.at["flags"], np.zeros(len(self._flags), np.uint32))

    def rows(self, slot: str) -> int:
        """Rows a slot has room for."""
        in_head = slot in {step.output for step in self.program.head}
        return memory.rows_of(in_head, self.size)

    def flag(self, step: str) -> int:
        """Address of where a step reports that its input was not finite."""
        return self.at["flags"] + 4 * self._flags.index(step)

    def bound(self, part: str, T: int, fusing: bool = True) -> Binder:
        """The launches of 'body', 'head' or 'both' for T tokens; fusing: fewer of them."""
        key = (part, T, fusing)
        if key not in self._bound:
            # of prompts, the last length is kept beside whole chunks and single tokens
            for other in [k for k in self._bound if k[0] == part and k[1] not in (1, self.chunk)]:
                self._bound.pop(other), self._ready.pop(other[:2], None)
            binder = Binder(self, fusing)
            if part != "head":
                binder.bind(self.program.body, BODY, T)
            if part != "body":
                binder.bind(self.program.head, HEAD, T)
            self._bound[key] = binder
        return self._bound[key]

    def sequence(self, part: str, T: int) -> Sequence:
        """Those launches, prepared; of a token captured as a graph."""
        calls = self.bound(part, T).calls
        if (part, T) not in self._ready:
            graph = self.backend.graph and T == 1
            self._ready[part, T] = self.backend.device.sequence(calls, graph)
        return self._ready[part, T]

    def prepare(self) -> None:
        """Compile (or load) every kernel a prompt and a generation need."""
        rows = min(memory.HEAD_ROWS, self.chunk)
        parts = (("both", 1), ("head", 1), ("body", self.chunk), ("head", rows))
        calls = [call for part, T in parts for call in self.bound(part, T).calls]
        calls += self._largest()
        first = {call.kernel: call for call in calls}
        for done, call in enumerate(first.values()):
            began = time.perf_counter()
            self.backend.device.sequence([call])
            if self.progress:
                seconds = time.perf_counter() - began
                self.progress(done + 1, len(first), call.kernel.name, seconds)
        self.sequence("both", 1)

    def use_graph(self, on: bool) -> None:
        """Start a token's launches as one graph, or one by one."""
        self.backend.graph = on
        self._ready.clear()

    def launches(self) -> dict[str, int]:
        """Launches from the host and kernels in the graph, per generated token."""
        sequence = self.sequence("both", 1)
        return {"launches": sequence.launches, "graph_nodes": sequence.nodes}

    def run(self, tokens: np.ndarray, wanted: int = 1) -> np.ndarray:
        """Feed 1 .. chunk tokens.

        Args:
            tokens: [T] token ids.
            wanted: logits of how many of the last tokens.
        Returns: [wanted, V] float32.
        Raises: ModelError when the context is full, a value is not finite, or was not in a run
            before and the states have not been reset since.
        """
        V = self.program.slots[self.program.logits]
        logits = np.empty((wanted, V), np.float32)
        for first, rows in self._advance(np.asarray(tokens, np.int64), wanted):
            logits[first : first + rows] = self.backend.device.read(self._logits, (rows, V))
        return logits

    def run_greedy(self, tokens: np.ndarray) -> tuple[int, float]:
        """Feed tokens; the likeliest next one and its logit, found on the device.

        The token is numpy.argmax of the logits: of equal ones the first, NaN counting as largest.
        """
        if "argmax" not in self._ready:
            self._ready["argmax"] = self.backend.device.sequence(
                self._largest(), self.backend.graph
            )
        for _ in self._advance(np.asarray(tokens, np.int64), 1):
            self._ready["argmax"].run()
        found = self.backend.device.read(self.at["argmax"], 2, np.int32)
        return int(found[1]), float(found[:1].view(np.float32)[0])

    def _largest(self) -> list[Call]:
        n = self.program.slots[self.program.logits]
        return argmax.largest(self._logits, n, self.at["argmax"])

    @property
    def _logits(self) -> int:
        return self.at[self.program.logits]

    def _advance(self, tokens: np.ndarray, wanted: int):
        """Run tokens; yields (first, rows) each time the logits of some rows are there."""
        T = len(tokens)
        check_run(self.position, T, self.limit, self._spoiled)
        self.embed(tokens)
        if T == 1 and wanted == 1:
            self.write_control(T, self.position, 1, 0)
            self._start("both", 1)
            yield 0, 1
        else:
            self.write_control(T, self.position, 0, 0)
            self._start("body", T)
            for first in range(0, wanted, memory.HEAD_ROWS):
                rows = min(memory.HEAD_ROWS, wanted - first)
                self.write_control(T, self.position, rows, T - wanted + first)
                self._start("head", rows)
                yield first, rows
        self._check()
        self.position += T

    def embed(self, tokens: np.ndarray) -> None:
        """Decode the rows of tokens on the host, into their slots; tells the observer."""
        for step in self.program.body:
            if step.op != "embed":
                continue
            began = time.perf_counter()
            form, rows = self.weights[f"{step.weights[0]}:rows"]
            values = embed.lookup(form, rows, tokens)
            self.backend.device.write(self.at[step.output], values)
            if self.observer:
                taken = time.perf_counter() - began
                kernels = ((f"embed_{form}_host", taken, 0),)
                self.observer(Tap(step, self.position, len(tokens), lambda v=values: v, kernels))

    def write_control(self, T: int, start: int, rows: int, first: int) -> None:
        """Tell kernels of the body T tokens from position start on, those of the head their rows.

        Attention's parts follow: tokens of each, position of its first.
        """
        numbers = np.zeros((PARTS + self.size.batches, 2), np.uint32)
        numbers[BODY], numbers[HEAD] = (T, start), (rows, first)
        begin = np.arange(self.size.batches) * self.size.attended
        numbers[PARTS:, 0] = np.clip(T - begin, 0, self.size.attended)
        numbers[PARTS:, 1] = start + begin
        self.backend.device.write(self.at["control"], numbers)

    def _start(self, part: str, T: int) -> None:
        if self.observer is None:
            self.sequence(part, T).run()
        else:
            tap.walk(self, self.bound(part, T, fusing=False))

    def _check(self) -> None:
        """Wait, and refuse what a product could not code; the first flag names the cause."""
        flags = self.backend.device.read(self.at["flags"], len(self._flags), np.uint32)
        if flags.any():
            bad = self._flags[int(flags.argmax())]
            self.clear_flags()
            # a cache is written again at the same positions, a state has moved on
            self._spoiled = bad if self.program.states else ""
            raise not_coded(bad, self.position)

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """Run one step alone; see pnrt.backend.Session."""
        return tap.redo(self, name, inputs, start)

    def reset(self) -> None:
        """Forget every token."""
        self.position, self._spoiled = 0, ""
        for name, shape in self.program.states.items():
            self.backend.device.write(self.at[name], np.zeros(shape, np.float32))

    def snapshot(self) -> Snapshot:
        """A copy of caches and states after the tokens read so far."""
        return tap.snapshot(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Put caches and states back.

        Raises: ModelError for a snapshot of another model, another kv or too many tokens.
        """
        snapshot.check(self.program, self.kv, self.limit)
        tap.restore(self, snapshot)
        self.position, self._spoiled = snapshot.position, ""

    def close(self) -> None:
        """Give everything on the device back, the weights too."""
        self.weights, self.at = {}, {}
        self._bound.clear()
        self._ready.clear()
        self.backend.close()
