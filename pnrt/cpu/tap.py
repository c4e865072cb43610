"""A bound program taken step by step: for who watches a run, and for who runs one step again."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pnrt.backend import Tap
from pnrt.cpu import delta, pack
from pnrt.cpu.activations import TILE
from pnrt.cpu.binder import Binder
from pnrt.errors import ModelError
from pnrt.jit import Script
from pnrt.program import Step

if TYPE_CHECKING:
    from pnrt.cpu.session import CpuSession


def walk(session: CpuSession, script: Script, names: list[str]) -> None:
    """Run a script call by call and tell the session's observer of each step.

    Args:
        names: the step of each call.
    """
    steps, widths = _steps(session)
    head = {step.name for step in session.program.head}
    first, at = session.position, 0
    for name, group in itertools.groupby(names):
        step, kernels = steps[name], []
        for i in range(at, at + len(list(group))):
            began = time.perf_counter()
            script.run(session.threads, i, i + 1)
            seconds = time.perf_counter() - began
            which = script.calls[i].kernel.name
            kernels.append((which, seconds, _bytes(session, step, which)))
            at += 1
        rows, offset = session.head_control if name in head else (session.control[0], 0)
        start, rows = first + int(offset), int(rows)
        values = functools.partial(_values, session, step, widths[name], start, rows)
        session.observer(Tap(step, start, rows, values, tuple(kernels)))


def redo(
    session: CpuSession, name: str, inputs: Mapping[str, np.ndarray], start: int
) -> np.ndarray:
    """Run one step alone, with activations quantized anew; see pnrt.backend.Session."""
    steps, widths = _steps(session)
    step = steps[name]
    memory = {**session.slots, "tokens": session.tokens}
    states = {i: session.states[i] for i in step.inputs if i in session.states}
    before = {name: state.copy() for name, state in states.items()}
    for state in states.keys() & inputs.keys():
        delta.write_state(states[state], inputs[state])
    given = {slot: x for slot, x in inputs.items() if slot in memory}
    T = len(next(iter(given.values())))
    in_head = step in session.program.head
    room = min(len(memory[slot]) for slot in given)
    if room < T or start + T > session.limit:
        raise ModelError(
            f"{name}: {T} rows from position {start} on; at most {room} at a time, up to position "
            f"{session.limit}, fit. Give fewer rows"
        )
    for slot, x in given.items():
        memory[slot][(slice(T), *map(slice, x.shape[1:]))] = x
    control = session.head_control if in_head else session.control
    control[:] = T, 0 if in_head else start
    binder = Binder(session, 1 if T == 1 else TILE)
    flags = len(session._flags)
    binder.bind([step], control, T)
    binder.script().run(session.threads)
    # a value that was not finite is seen in the result, not reported a second time
    del session._flags[flags:]
    for state, kept in before.items():
        states[state][...] = kept
    return _values(session, step, widths[name], start, T).copy()


def _steps(session: CpuSession) -> tuple[dict[str, Step], dict[str, int]]:
    steps = {step.name: step for step in session.program.steps}
    return steps, session.program.widths(lambda tensor: session.weights[tensor].N)


def _bytes(session: CpuSession, step: Step, kernel: str) -> int:
    """Weight bytes a call reads; what prepares activations reads none."""
    if step.op == "matmul" and kernel.startswith("matmul"):
        return session.weights[step.weights[0]].nbytes
    return 0


def _values(session: CpuSession, step: Step, width: int, start: int, rows: int) -> np.ndarray:
    if step.op == "store_kv":
        return stored(session, step.numbers["cache"], start, rows)
    return session.slots[step.output][:rows, :width]


def stored(session: CpuSession, cache: int, start: int, rows: int) -> np.ndarray:
    """Cached keys, then values, of `rows` positions: [rows, 2 G E] float32."""
    groups, dim = session.program.caches[cache]
    kind = np.float16 if session.kv == "f16" else np.float32
    keys, values = (plane.view(kind) for plane in session.caches[cache])
    # keys lie as [G, block of 16 positions, E, position in it], values as [G, position, E]
    keys = keys.reshape(groups, -1, dim, pack.ROWS).transpose(1, 3, 0, 2)
    values = values.reshape(groups, -1, dim).transpose(1, 0, 2)
    block = start // pack.ROWS
    near = keys[block : (start + rows - 1) // pack.ROWS + 1].reshape(-1, groups * dim)
    near = near[start - block * pack.ROWS :][:rows]
    far = values[start : start + rows].reshape(rows, -1)
    return np.concatenate([near, far], axis=1).astype(np.float32)
