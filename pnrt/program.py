"""A model as data: an ordered list of steps over named slots, which a backend binds and runs.

Printing a program reads like the paper:

    blk.0.attn_norm    h [576]      = rms_norm(x; blk.0.attn_norm.weight)
    blk.0.q            q [576]      = matmul(h; blk.0.attn_q.weight)

Trace, diff and the dispatch report read this list too, so they cannot disagree with what ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# ops of the table that work on weights of a format; the others know float32 slots only
FORMAT_OPS = ("embed", "matmul")
# ops whose element n is made of the inputs' elements n
ELEMENTWISE = ("add", "add_bias", "scale", "sigmoid", "swiglu", "take")


@dataclass(frozen=True)
class Step:
    """One operation.

    name: stable, `blk.3.attn_norm`; op: entry of the backend's table; inputs: slots read (a state
    or cache among them is also written); weights: tensors read, or a rotation's signs under
    `rotation.signs.K`; output: slot written; numbers: sizes and constants of the op.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    output: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """What one architecture computes for T tokens.

    slots: name -> width of a [T, width] float32 array; body: steps from token ids to the last
    hidden state; head: steps from there to the logits, needed only for the rows whose logits are
    wanted; caches: (kv heads, head dim) per attention layer; states: name -> shape of a float32
    array that a recurrent step reads and overwrites, zeros before the first token; logits: the last
    slot.
    """

    architecture: str
    slots: Mapping[str, int]
    body: tuple[Step, ...]
    head: tuple[Step, ...]
    caches: tuple[tuple[int, int], ...]
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    logits: str = "logits"

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.body + self.head

    def matrices(self) -> list[str]:
        """Names of the tensors that matmul steps read, in order, each once."""
        names = (w for s in self.steps if s.op == "matmul" for w in s.weights)
        return list(dict.fromkeys(names))

    def widths(self, rows: Callable[[str], int]) -> dict[str, int]:
        """Step name -> width of its output, which may be less than its slot's.

        Args:
            rows: tensor name -> N of a matrix.
        """
        now, found = dict(self.slots), {}
        for s in self.steps:
            n = s.numbers
            if s.op == "matmul":
                width = rows(s.weights[0])
            elif s.op == "store_kv":
                width = 2 * self.caches[n["cache"]][0] * self.caches[n["cache"]][1]
            elif s.op == "attention":
                width = n["heads"] * self.caches[n["cache"]][1]
            elif "n" in n:
                width = n["n"] * n.get("heads", 1)
            elif s.output in s.inputs:
                width = now[s.output]
            else:
                width = self.slots[s.output]
            found[s.name] = now[s.output] = width
        return found

    def __str__(self) -> str:
        rows = []
        for s in self.steps:
            arguments = "; ".join(filter(None, (", ".join(s.inputs), ", ".join(s.weights))))
            target = f"{s.output} [{self.slots[s.output]}]" if s.output in self.slots else s.output
            rows.append(f"{s.name:<24} {target:<14} = {s.op}({arguments})")
        return "\n".join(rows)
