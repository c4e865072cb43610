"""The launches of a program without a device or weights: their kernels and their number."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pnrt.cuda import memory, pack
from pnrt.cuda.backend import Weight
from pnrt.cuda.binder import BODY, HEAD, Binder
from pnrt.cuda.kernel import Call
from pnrt.program import Program

# multiprocessors of a P100
PROCESSORS = 56


class _Addresses(dict):
    """An address for every region; each is a megabyte behind the last."""

    def __missing__(self, region: object) -> int:
        self[region] = (len(self) + 1) << 20
        return self[region]


def launches(
    program: Program,
    shape: memory.Shape,
    T: int = 1,
    *,
    fusing: bool = True,
    kv: str = "f16",
    activations: str = "q8_0",
) -> list[Call]:
    """What a session launches for T tokens, all their logits wanted; the addresses are no one's.

    Args:
        shape: name of a tensor -> format, rows, columns (a vector: 'f32', 1, its length).
        fusing: as Binder.
    """
    weights = {}
    for name in {name for step in program.steps for name in step.weights}:
        form, N, K = shape(name)
        weights[name] = np.empty(K, np.float32)
        if name in program.matrices():
            weights[name] = Weight(pack.layout(form, N, K), 0)
    session = SimpleNamespace(
        at=_Addresses(), program=program, weights=weights, kv=kv, activations=activations,
        size=memory.sizes(program, 4096, T, kv, activations), flag=lambda step: 0,
        backend=SimpleNamespace(device=SimpleNamespace(processors=PROCESSORS)),
    )  # fmt: skip
    binder = Binder(session, fusing)
    binder.bind(program.body, BODY, T)
    binder.bind(program.head, HEAD, min(T, memory.HEAD_ROWS))
    return binder.calls
