"""One step's inputs and output out of a trace, for `explain`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pnrt.debug.trace import Trace
from pnrt.errors import ModelError
from pnrt.program import Program, Step

# op -> roles of its inputs, in the step's order; of a cache the keys and values
ROLES = {
    "rope": ("x",), "rms_norm": ("x",), "swiglu": ("gate", "up"), "attention": ("q", "cache"),
    "delta": ("q", "k", "v", "g", "beta"), "matmul": ("x",),
}  # fmt: skip


def from_trace(
    trace: Trace, program: Program, tensor: str | None, name: str | None, model: Path
) -> tuple[dict[str, np.ndarray], str | None, Step | None]:
    """The numbers of one step.

    Args:
        tensor: the matrix whose product it is, or name: the step.
    Returns: the numbers by role, tensor and step (None for a product).
    Raises: ModelError for a step that is not there or whose inputs were not traced.
    """
    step = _chosen(program, tensor, name)
    if step.name not in trace.steps:
        raise ModelError(
            f"{trace.path}: does not hold step {step.name} of {model}; it holds "
            f"{', '.join(list(trace.steps)[:4])}, ... Record it with --taps '*'."
        )
    if step.op not in ROLES:
        raise ModelError(
            f"step {step.name}: no known mistakes of {step.op}; there are some of "
            f"{', '.join(ROLES)}. Choose such a step."
        )
    y, start = _values(trace, step.name)
    given = {"y": y, "start": np.array(start)}
    for role, slot in zip(ROLES[step.op], step.inputs, strict=False):
        x = _before(trace, program, step, slot)
        if role == "cache":
            groups, dim = program.caches[step.numbers["cache"]]
            given["k"], given["v"] = np.split(x, [groups * dim], axis=1)
            continue
        given[role] = x[len(x) - len(y) :]
    if step.op == "matmul":
        return given, step.weights[0], None
    return given, tensor, step


def _chosen(program: Program, tensor: str | None, name: str | None) -> Step:
    for step in program.steps:
        if step.name == name or (step.op == "matmul" and tensor in step.weights):
            return step
    wanted = f"--step {name}" if name else f"--tensor {tensor}"
    raise ModelError(
        f"{wanted}: the program has no such {'step' if name else 'product'}; it has steps such as "
        f"{', '.join(s.name for s in program.steps[:4])}. `pnrt trace FILE -p TEXT` lists them."
    )


def _values(trace: Trace, name: str) -> tuple[np.ndarray, int]:
    try:
        return np.array(trace.values(name)), trace.steps[name]["start"]
    except ValueError:
        raise ModelError(
            f"{trace.path}: holds digests, no values; values are needed. "
            "Record it again with `pnrt trace --full`."
        ) from None


def _before(trace: Trace, program: Program, step: Step, slot: str) -> np.ndarray:
    """What a slot held when a step read it; of a rotated input, what was rotated."""
    writer = None
    for each in program.steps:
        if each.name == step.name:
            break
        if each.output == slot:
            writer = each
    if writer is None:
        raise ModelError(f"step {step.name}: nothing writes its input {slot} before it.")
    if writer.op == "hadamard" and step.op == "matmul":
        return _before(trace, program, writer, writer.inputs[0])
    if writer.name not in trace.steps:
        raise ModelError(
            f"{trace.path}: holds {step.name}, not its input {writer.name}. "
            "Record it with --taps for both, or without --taps."
        )
    return _values(trace, writer.name)[0]
