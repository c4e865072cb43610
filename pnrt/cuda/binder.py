"""From steps to launches with addresses, for one number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pnrt.cuda import (
    attention,
    chain,
    delta,
    elementwise,
    embed,
    fusion,
    matmul,
    norm,
    rope,
    rotate,
    together,
)
from pnrt.cuda.control import elements
from pnrt.cuda.fusion import Product
from pnrt.cuda.kernel import Call, Kernel
from pnrt.cuda.parts import Part
from pnrt.program import Step

if TYPE_CHECKING:
    from pnrt.cuda.session import CudaSession

# which pair of numbers in the control region a launch reads; attention's parts follow
BODY, HEAD, PARTS = 0, 1, 2


class Binder:
    """Turns steps into launches.

    calls: the launches in order; names: the step of each, or the first of those it stands for.
    fusing: whether one launch may stand for several steps (fusion.py).
    """

    def __init__(self, session: CudaSession, fusing: bool = False):
        self.session, self.fusing = session, fusing
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.filled: set[tuple[str, str, int]] = set()

    def bind(self, steps: Iterable[Step], which: int, T: int) -> None:
        """Append the launches of steps over T rows, whose control is BODY or HEAD."""
        self.control, self.T = self.session.at["control"] + 8 * which, T
        steps, at = tuple(steps), 0
        # what the head reads of the body's slots counts
        following = steps + (self.session.program.head if which == BODY else ())
        while at < len(steps):
            count, bind = self._next(following, at)
            written = {step.output for step in following[at : at + count]}
            self.filled = {key for key in self.filled if key[0] not in written}
            bind()
            at += count

    def _next(self, steps: tuple[Step, ...], at: int) -> tuple[int, Callable[[], None]]:
        """How many steps go out together from `at` on, and what binds them."""
        step = steps[at]
        if self.fusing and step.op == "matmul" and self.T == 1:
            group = fusion.find_group(steps, at, self._alike, self._rows)
            return sum(len(p.steps) for p in group), lambda: self._products(group)
        if self.fusing and (fused := fusion.find_chain(steps, at, self._view)):
            return len(fused.steps), lambda: self._chain(fused)
        if self.fusing and self.T == 1:
            states = self.session.program.states
            count = fusion.find_together(steps, at, states, self._view)
            if count > 1:
                return count, lambda: self._together(steps[at : at + count])
        # what the host decodes takes no launch
        return 1, (lambda: None) if step.op == "embed" else lambda: getattr(self, step.op)(step)

    def _together(self, steps: tuple[Step, ...]) -> None:
        mark = len(self.calls)
        for step in steps:
            getattr(self, step.op)(step)
        calls = self.calls[mark:]
        del self.calls[mark:], self.names[mark:]
        self.emit(steps[0], together.together(calls))

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

    def scale(self, step) -> None:
        x = self.slot(step.output)
        self.each(step, elementwise.scale_kernel, x[1], *x, self.session.at[step.weights[0]], x[1])

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
        n, which = step.numbers, delta.kernel_for(step.numbers["n"])
        q, k, v, g, beta = (self.slot(name) for name in step.inputs[:5])
        self.simple(
            step, which, elements(n["n"] * n["heads"], 1, which), *q, *k, *v, n["first"], *g, *beta,
            self.session.at[step.inputs[5]], *self.slot(step.output), n["n"], n["heads"],
            n["key_heads"],
        )  # fmt: skip

    def hadamard(self, step) -> None:
        n, size = step.numbers["n"], step.numbers["block"]
        signs = self.session.at[step.weights[0]] if step.weights else 0
        self.simple(
            step, rotate.hadamard_kernel, (-(-n // max(size, 32)), self.T),
            *self.slot(step.inputs[0]), signs, *self.slot(step.output), n, size,
            step.numbers["inverse"], rotate.scale_of(size),
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
        self._products([Product(step, None)])

    def _view(self, step: Step) -> tuple[str, int]:
        """The view a product reads, and its columns."""
        weight = self.session.weights[step.weights[0]]
        view = matmul.view_of(weight.format, weight.K, self.session.activations, self.T)
        return view, weight.K

    def _alike(self, step: Step) -> tuple:
        return self.session.weights[step.weights[0]].format, step.inputs[0], self._view(step)

    def _rows(self, step: Step) -> int:
        if step.op == "add":
            return self.slot(step.output)[1]
        weight = self.session.weights[step.weights[0]] if step.weights else None
        return getattr(weight, "N", None) or getattr(weight, "size", 0)

    def _products(self, group: list[Product]) -> None:
        """Products of one input and format, after its activations where they are not there."""
        s, step = self.session, group[0].matmul
        (view, K), weight = self._view(step), s.weights[step.weights[0]]
        key, blocks = (step.inputs[0], view, K), s.backend.device.processors * 4
        if key not in self.filled:
            x, width = self.slot(step.inputs[0])
            self.emit(step, matmul.convert(view, x, width, K, self.T, s.at[key], s.flag(step.name)))
            self.filled.add(key)
        if self.T > 1:
            out, width = self.slot(step.output)
            args = (weight.layout, weight.address, view, s.at[key], out, width, self.T)
            self.emit(step, matmul.multiply(*args))
            return
        parts = []
        for product in group:
            weight = s.weights[product.matmul.weights[0]]
            added = s.at[product.added] if product.add else 0
            parts.append(Part(weight.layout, weight.address, s.at[product.output], added))
        self.emit(step, matmul.multiply_parts(parts, view, s.at[key], blocks))

    def _chain(self, fused: fusion.Fused) -> None:
        """A chain, whose products find their activations ready."""
        s, c = self.session, fused.chain
        x, y, weight, signs = fusion.operands(fused)
        views = []
        for (_, view), product in zip(c.views, fused.products, strict=True):
            key = (product.inputs[0], view, c.width)
            views += [s.at[key], s.flag(product.name)]
            self.filled.add(key)
        ends = [*self.slot(x), *(self.slot(y) if y else (0, 0))]
        vectors = [s.at[name] if name else 0 for name in (weight, signs)]
        self.emit(fused.steps[0], chain.launch(c, (*ends, *vectors), views, self.T))
