"""From steps to launches with addresses, for one number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pnrt.cuda import (
    attention,
    delta,
    elementwise,
    embed,
    matmul,
    norm,
    rope,
    rotate,
)
from pnrt.cuda.control import elements
from pnrt.cuda.kernel import Call, Kernel
from pnrt.program import Step

if TYPE_CHECKING:
    from pnrt.cuda.session import CudaSession

# which pair of numbers in the control region a launch reads; attention's parts follow
BODY, HEAD, PARTS = 0, 1, 2


class Binder:
    """Turns steps into launches.

    calls: the launches in order; names: the step of each.
    """

    def __init__(self, session: CudaSession):
        self.session = session
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.filled: set[tuple[str, str, int]] = set()

    def bind(self, steps: Iterable[Step], which: int, T: int) -> None:
        """Append the launches of steps over T rows, whose control is BODY or HEAD."""
        self.control, self.T = self.session.at["control"] + 8 * which, T
        for step in steps:
            # what the host decodes takes no launch
            if step.op != "embed":
                getattr(self, step.op)(step)
            self.filled = {key for key in self.filled if key[0] != step.output}

    def emit(self, step: Step, *calls: Call) -> None:
        self.calls += calls
        self.names += [step.name] * len(calls)

    def slot(self, name: str) -> tuple[int, int]:
        """Address and width of a slot."""
        return self.session.at[name], self.session.program.slots[name]

    def simple(self, step: Step, which: Kernel, grid: tuple[int, int], *values) -> None:
        self.emit(step, Call(which, grid, (*values, self.control)))

    def each(self, step: Step, which: Kernel, n: int, *values) -> None:
        """A launch with a thread per element of T rows of n."""
        self.simple(step, which, elements(n, self.T, which), *values)

    def take(self, step) -> None:
        out, n = self.slot(step.output)
        self.each(step, embed.take_kernel, n, *self.slot(step.inputs[0]), out, n, n)

    def rms_norm(self, step) -> None:
        n = step.numbers
        self.simple(
            step, norm.rms_norm_kernel, (n["heads"], self.T), *self.slot(step.inputs[0]),
            self.session.at[step.weights[0]], *self.slot(step.output), n["n"], n["heads"],
            n["stride"], n["eps"],
        )  # fmt: skip

    def l2_norm(self, step) -> None:
        n = step.numbers
        self.simple(
            step, norm.l2_norm_kernel, (n["heads"], self.T), *self.slot(step.inputs[0]),
            n["first"], *self.slot(step.output), n["n"], n["heads"], n["eps"], n["scale"],
        )  # fmt: skip

    def add_bias(self, step) -> None:
        bias = step.weights[0]
        n = self.session.weights[bias].size
        args = (*self.slot(step.output), self.session.at[bias], n)
        self.each(step, elementwise.bias_kernel, n, *args)

    def _pairwise(self, step, which: Kernel, n: int) -> None:
        x, y = (self.slot(name) for name in step.inputs)
        self.each(step, which, n, *x, *y, *self.slot(step.output), n)

    def add(self, step) -> None:
        self._pairwise(step, elementwise.add_kernel, self.slot(step.output)[1])

    def swiglu(self, step) -> None:
        self._pairwise(step, elementwise.swiglu_kernel, step.numbers["n"])

    def sigmoid(self, step) -> None:
        n, x = step.numbers["n"], self.slot(step.inputs[0])
        self.each(step, elementwise.sigmoid_kernel, n, *x, *self.slot(step.output), n)

    def sigmoid_gate(self, step) -> None:
        (x, gate), n = (self.slot(name) for name in step.inputs), step.numbers
        self.each(
            step, elementwise.sigmoid_gate_kernel, n["n"] * n["heads"], *x, *gate,
            *self.slot(step.output), n["n"], n["heads"], n["stride"], n["first"],
        )  # fmt: skip

    def decay(self, step) -> None:
        n, x = step.numbers["n"], self.slot(step.inputs[0])
        rate, dt = (self.session.at[name] for name in step.weights)
        self.each(step, delta.decay_kernel, n, *x, rate, dt, *self.slot(step.output), n)

    def conv_silu(self, step) -> None:
        n, which = step.numbers["n"], delta.conv_silu_kernel
        taps, state = self.session.at[step.weights[0]], self.session.at[step.inputs[1]]
        self.simple(
            step, which, elements(n, 1, which), *self.slot(step.inputs[0]), taps, state,
            *self.slot(step.output), n, step.numbers["taps"],
        )  # fmt: skip

    def delta(self, step) -> None:
        n, which = step.numbers, delta.delta_kernel
        q, k, v, g, beta = (self.slot(name) for name in step.inputs[:5])
        self.simple(
            step, which, elements(n["n"] * n["heads"], 1, which), *q, *k, *v, n["first"], *g, *beta,
            self.session.at[step.inputs[5]], *self.slot(step.output), n["n"], n["heads"],
            n["key_heads"],
        )  # fmt: skip

    def hadamard(self, step) -> None:
        n, size = step.numbers["n"], step.numbers["block"]
        signs = self.session.at[step.weights[0]] if step.weights else 0
        scale = 1 / float(np.sqrt(float(size)))
        self.simple(
            step, rotate.hadamard_kernel, (-(-n // max(size, 32)), self.T),
            *self.slot(step.inputs[0]), signs, *self.slot(step.output), n, size,
            step.numbers["inverse"], scale,
        )  # fmt: skip

    def regroup(self, step) -> None:
        n = step.numbers
        self.each(
            step, rotate.regroup_kernel, n["n"] * n["heads"], *self.slot(step.inputs[0]),
            *self.slot(step.output), n["n"], n["heads"], n["groups"],
        )  # fmt: skip

    def rope(self, step) -> None:
        s, n = self.session, step.numbers
        self.each(
            step, rope.rope_kernel, n["heads"] * n["pairs"], *self.slot(step.output), n["heads"],
            n["dim"], n["pairs"], n["neox"], s.at["cos"], s.at["sin"],
        )  # fmt: skip

    def store_kv(self, step) -> None:
        s, il = self.session, step.numbers["cache"]
        groups, dim = s.program.caches[il]
        k, v = (self.slot(name) for name in step.inputs)
        self.each(
            step, rope.store_kernel, groups * dim, *k, *v, groups, dim, s.at["keys", il],
            s.at["values", il], s.size.positions, s.kv == "f16",
        )  # fmt: skip

    def attention(self, step) -> None:
        s, n = self.session, step.numbers
        groups, dim = s.program.caches[n["cache"]]
        (q, q_width), (out, out_width) = self.slot(step.inputs[0]), self.slot(step.output)
        keys, values = s.at["keys", n["cache"]], s.at["values", n["cache"]]
        for part, first in enumerate(range(0, self.T, s.size.attended)):
            calls = attention.attend(
                s.kv, min(s.size.attended, self.T - first), q + first * q_width * 4, q_width, keys,
                values, out + first * out_width * 4, out_width, n["heads"], groups, dim,
                s.size.positions, n["scale"], s.at["control"] + 8 * (PARTS + part), s.at["scratch"],
            )  # fmt: skip
            self.emit(step, *calls)

    def matmul(self, step) -> None:
        s, weight = self.session, self.session.weights[step.weights[0]]
        view = matmul.view_of(weight.format, weight.K, s.activations, self.T)
        key = (step.inputs[0], view, weight.K)
        if key not in self.filled:
            x, width = self.slot(step.inputs[0])
            flag = s.flag(step.name)
            self.emit(step, matmul.convert(view, x, width, weight.K, self.T, s.at[key], flag))
            self.filled.add(key)
        out, width = self.slot(step.output)
        blocks = s.backend.device.processors * 4
        call = matmul.multiply(
            weight.layout, weight.address, view, s.at[key], out, width, self.T, blocks
        )
        self.emit(step, call)
