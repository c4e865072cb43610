"""A bound program taken step by step, and what its caches and states hold, on the host."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pnrt.backend import Tap
from pnrt.cuda import embed
from pnrt.cuda.binder import BODY, HEAD, Binder
from pnrt.errors import ModelError
from pnrt.models.state import Snapshot
from pnrt.program import Step

if TYPE_CHECKING:
    from pnrt.cuda.session import CudaSession

# positions of a key block in the cache
BLOCK = 16


def walk(session: CudaSession, binder: Binder) -> None:
    """Launch one after the other and tell the session's observer of each step."""
    steps, widths = _steps(session)
    device, head = session.backend.device, {step.name for step in session.program.head}
    control, at = device.read(session.at["control"], (2, 2), np.uint32), 0
    for name, group in itertools.groupby(binder.names):
        step, kernels = steps[name], []
        for i in range(at, at + len(list(group))):
            call, began = binder.calls[i], time.perf_counter()
            device.run([call])
            device.synchronize()
            seconds = time.perf_counter() - began
            kernels.append((call.kernel.name, seconds, _bytes(session, step, call.kernel.name)))
            at += 1
        rows, first = control[HEAD] if name in head else (control[BODY][0], 0)
        start, rows = session.position + int(first), int(rows)
        values = functools.partial(_values, session, step, widths[name], start, rows)
        session.observer(Tap(step, start, rows, values, tuple(kernels)))


def redo(
    session: CudaSession, name: str, inputs: Mapping[str, np.ndarray], start: int
) -> np.ndarray:
    """Run one step alone, with activations quantized anew; see pnrt.backend.Session."""
    steps, widths = _steps(session)
    step, device, program = steps[name], session.backend.device, session.program
    if step.op == "embed":
        form, rows = session.weights[f"{step.weights[0]}:rows"]
        return embed.lookup(form, rows, np.asarray(inputs["tokens"], np.int64))
    states = {i: _state(session, i) for i in step.inputs if i in program.states}
    for state in states.keys() & inputs.keys():
        device.write(session.at[state], np.asarray(inputs[state], np.float32))
    given = {slot: x for slot, x in inputs.items() if slot in program.slots}
    T, in_head = len(next(iter(given.values()))), step in program.head
    room = min(session.rows(slot) for slot in (*given, *_slots(session, step)))
    if room < T or start + T > session.limit:
        raise ModelError(
            f"{name}: {T} rows from position {start} on; at most {room} at a time, up to position "
            f"{session.limit}, fit. Give fewer rows"
        )
    for slot, x in given.items():
        rows = np.zeros((T, program.slots[slot]), np.float32)
        rows[:, : x.shape[1]] = x
        device.write(session.at[slot], rows)
    session.write_control(T, start, T, 0)
    binder = Binder(session)
    binder.bind([step], HEAD if in_head else BODY, T)
    device.run(binder.calls)
    # a value that was not finite is seen in the result, not reported a second time
    session.clear_flags()
    for state, kept in states.items():
        device.write(session.at[state], kept)
    return _values(session, step, widths[name], start, T)


def _slots(session: CudaSession, step: Step) -> list[str]:
    return [step.output] if step.output in session.program.slots else []


def _steps(session: CudaSession) -> tuple[dict[str, Step], dict[str, int]]:
    steps = {step.name: step for step in session.program.steps}
    return steps, session.program.widths(lambda tensor: session.weights[tensor].N)


def _bytes(session: CudaSession, step: Step, kernel: str) -> int:
    """Weight bytes a launch reads; what prepares activations reads none."""
    if step.op == "matmul" and kernel.startswith("matmul"):
        return session.weights[step.weights[0]].nbytes
    return 0


def _values(session: CudaSession, step: Step, width: int, start: int, rows: int) -> np.ndarray:
    if step.op == "store_kv":
        keys, values = cached(session, step.numbers["cache"], start + rows)
        both = np.concatenate([keys, values], axis=1)[start:]
        return both.reshape(rows, -1).astype(np.float32)
    whole = (rows, session.program.slots[step.output])
    return session.backend.device.read(session.at[step.output], whole)[:, :width]


def _state(session: CudaSession, name: str) -> np.ndarray:
    return session.backend.device.read(session.at[name], session.program.states[name])


def _planes(session: CudaSession, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [G, blocks, E, 16] and values [G, positions, E] of a cache, copied."""
    groups, dim = session.program.caches[index]
    shape, kind = (groups, session.size.positions, dim), np.dtype(session.kv.replace("f", "float"))
    keys, values = (
        session.backend.device.read(session.at[part, index], shape, kind)
        for part in ("keys", "values")
    )
    return keys.reshape(groups, -1, dim, BLOCK), values


def cached(session: CudaSession, index: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [n, G, E] of the first n positions of a cache."""
    keys, values = _planes(session, index)
    keys = keys.transpose(1, 3, 0, 2).reshape(-1, *values.shape[::2])
    return keys[:n].copy(), values.transpose(1, 0, 2)[:n].copy()


def snapshot(session: CudaSession) -> Snapshot:
    """A copy of caches and states after the tokens read so far."""
    program, n = session.program, session.position
    held = [cached(session, i, n) for i in range(len(program.caches))]
    keys, values = zip(*held, strict=True) if held else ((), ())
    states = {name: _state(session, name) for name in program.states}
    return Snapshot(program.architecture, n, session.kv, tuple(keys), tuple(values), states)


def restore(session: CudaSession, snapshot: Snapshot) -> None:
    """Put caches and states back; the snapshot has been checked."""
    device, n = session.backend.device, snapshot.position
    for i, (k, v) in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
        keys, values = _planes(session, i)
        groups, dim = session.program.caches[i]
        flat = np.zeros((session.size.positions, groups, dim), keys.dtype)
        flat[:n] = k
        values[:, :n] = v.transpose(1, 0, 2)
        blocks = flat.reshape(-1, BLOCK, groups, dim).transpose(2, 0, 3, 1)
        device.write(session.at["keys", i], np.ascontiguousarray(blocks))
        device.write(session.at["values", i], values)
    for name, state in snapshot.states.items():
        device.write(session.at[name], state)
