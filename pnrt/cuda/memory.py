"""What a bound program keeps on the device: every region with its bytes, before any is taken.

A session allocates exactly these regions, so their sum tells beforehand whether a model fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pnrt.cuda import argmax, attention, matmul, pack
from pnrt.program import FORMAT_OPS, Program, Step

# rows of logits computed at a time, whatever the chunk
HEAD_ROWS = 64
# bytes of scratch at most that attention is given, if one token does not need more
SCRATCH = 64 << 20
ALIGNMENT = 256
# blocks in y a launch can have
MOST_ROWS = 65535

# name of a tensor -> its format (as the backend gets it), rows, columns
Shape = Callable[[str], tuple[str, int, int]]


class Sizes(NamedTuple):
    """What the regions of a program depend on.

    positions: of the caches, a multiple of 16; chunk: tokens at most per run; attended: tokens that
    attention takes at a time; kv: 'f16' or 'f32'; activations: 'q8_0' or 'f32'.
    """

    positions: int
    chunk: int
    attended: int
    kv: str
    activations: str

    @property
    def batches(self) -> int:
        """Parts that attention takes a chunk in."""
        return -(-self.chunk // self.attended)


def sizes(program: Program, positions: int, chunk: int, kv: str, activations: str) -> Sizes:
    """Fit a context and a chunk to what kernels take at a time."""
    chunk, positions = min(chunk, positions), -(-positions // 16) * 16
    heads, dim = _widest(program)
    one = attention.scratch_bytes(heads, dim, positions)
    attended = max(1, min(chunk, SCRATCH // max(one, 1), MOST_ROWS // max(heads, 1)))
    return Sizes(positions, chunk, attended, kv, activations)


def regions(program: Program, shape: Shape, size: Sizes) -> dict[object, int]:
    """Region -> bytes, of everything but the matrices.

    Keys: a slot's, vector's or state's name, ("keys", i) and ("values", i) of cache i, "cos",
    "sin", "scratch", "control", "flags", "argmax", and (slot, view, K) of activations.
    """
    found: dict[object, int] = {}
    heads = {step.output for step in program.head}
    for slot, width in program.slots.items():
        found[slot] = rows_of(slot in heads, size) * width * 4
    for step in program.steps:
        if step.op not in FORMAT_OPS:
            found |= {name: math.prod(shape(name)[1:]) * 4 for name in step.weights}
    width = 2 if size.kv == "f16" else 4
    for i, (groups, dim) in enumerate(program.caches):
        for part in ("keys", "values"):
            found[part, i] = groups * size.positions * dim * width
    found |= {name: math.prod(shape) * 4 for name, shape in program.states.items()}
    pairs = max((s.numbers["pairs"] for s in program.steps if s.op == "rope"), default=0)
    found |= dict.fromkeys(("cos", "sin"), size.positions * pairs * 4)
    found["scratch"] = size.attended * attention.scratch_bytes(*_widest(program), size.positions)
    found["control"] = (2 + size.batches) * 8
    found["flags"] = 4 * sum(step.op == "matmul" for step in program.steps)
    found["argmax"] = (argmax.BLOCKS + 1) * 8
    for step in program.steps:
        if step.op == "matmul":
            _activations(found, step, shape(step.weights[0]), step.output in heads, size)
    return found


def _activations(found: dict, step: Step, shape: tuple[str, int, int], head: bool, size: Sizes):
    form, _, K = shape
    for T in (1, rows_of(head, size)):
        view = matmul.view_of(form, K, size.activations, T)
        key = (step.inputs[0], view, K)
        found[key] = max(found.get(key, 0), matmul.view_bytes(view, K, T))


def rows_of(head: bool, size: Sizes) -> int:
    """Rows of a slot of the head or the body."""
    return min(HEAD_ROWS, size.chunk) if head else size.chunk


def _widest(program: Program) -> tuple[int, int]:
    """Most query heads of a layer, largest head dim."""
    heads = max((s.numbers["heads"] for s in program.steps if s.op == "attention"), default=0)
    return heads, max((dim for _, dim in program.caches), default=0)


def whole(nbytes: int) -> int:
    """Bytes an allocation takes."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def needed(program: Program, shape: Shape, size: Sizes) -> Mapping[str, int]:
    """Bytes of a model on the device: its matrices, and everything else."""
    weights = sum(whole(pack.layout(*shape(name)).nbytes) for name in program.matrices())
    rest = sum(whole(n) for n in regions(program, shape, size).values())
    return {"weights": weights, "rest": rest}
