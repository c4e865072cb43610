"""From steps to kernel calls with addresses, and barriers only where they are needed.

A session turns every step into calls once; a token is then one run of the list inside one parallel
region. A barrier stands only where a call reads or overwrites what another thread may still be
working on: kernels that split their work by tokens keep to the same share and need none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pnrt.cpu import attention, delta, elementwise, embed, matmul, norm, rope, rotate
from pnrt.cpu.activations import Activations
from pnrt.cpu.codec import FLOATS
from pnrt.jit import Call, Script, words
from pnrt.program import Step

if TYPE_CHECKING:
    from pnrt.cpu.session import CpuSession


def whole(n: int, count: int) -> int:
    """n rounded up to a multiple of count."""
    return -(-n // count) * count


class Binder:
    """Turns steps into calls for one set of buffers and one number of tokens per tile."""

    def __init__(self, session: CpuSession, count: int):
        self.session, self.count = session, count
        self.inputs: dict[tuple[str, str], Activations] = {}
        self.filled: set[tuple[str, str]] = set()
        self.names: list[str] = []
        self.calls: list[tuple[Call, frozenset, frozenset, str]] = []

    def emit(self, step: str, call: Call, reads: Iterable, writes: Iterable, split: str) -> None:
        self.calls.append((call, frozenset(reads), frozenset(writes), split))
        self.names.append(step)

    def bind(self, steps: Iterable[Step], control: np.ndarray, capacity: int) -> None:
        for step in steps:
            getattr(self, step.op)(step, control, capacity)
            self.filled = {key for key in self.filled if key[0] != step.output}

    def script(self) -> Script:
        """The calls with a barrier before each one that depends on another thread's work."""
        calls = [call for call, *_ in self.calls]
        reads, writes, since = set(), set(), set()
        for i, (_, r, w, split) in enumerate(self.calls):
            clash = (r & writes) or (w & (reads | writes))
            if i and clash and (split != "tokens" or since != {"tokens"}):
                reads, writes, since = set(), set(), set()
                calls[i - 1] = calls[i - 1]._replace(barrier=True)
            reads |= r
            writes |= w
            since.add(split)
        return Script(calls)

    def simple(
        self, step: Step, control: np.ndarray, which, *values, split: str = "tokens"
    ) -> None:
        arguments = words(*values, control)
        call = Call(which, arguments, (values, control), False)
        self.emit(step.name, call, step.inputs, (step.output,), split)

    def embed(self, step, control, capacity) -> None:
        s = self.session
        form, rows = s.weights[f"{step.weights[0]}:rows"]
        call = embed.lookup(form, rows, s.tokens, s.slots[step.output], control, s.threads)
        self.emit(step.name, call, step.inputs, (step.output,), "tokens")

    def take(self, step, control, capacity) -> None:
        x, out = self.session.slots[step.inputs[0]], self.session.slots[step.output]
        n = self.session.program.slots[step.output]
        self.simple(step, control, embed.take_kernel, x, x.shape[1], out, out.shape[1], n)

    def rms_norm(self, step, control, capacity) -> None:
        x, out = self.session.slots[step.inputs[0]], self.session.slots[step.output]
        weight, n = self.session.vector(step.weights[0]), step.numbers
        self.simple(
            step, control, norm.rms_norm_kernel, x, x.shape[1], weight, out, out.shape[1],
            n["n"], n["heads"], n["stride"], float(n["eps"]),
        )  # fmt: skip

    def l2_norm(self, step, control, capacity) -> None:
        x, out = self.session.slots[step.inputs[0]], self.session.slots[step.output]
        n = step.numbers
        self.simple(
            step, control, norm.l2_norm_kernel, x, x.shape[1], n["first"], out, out.shape[1],
            n["n"], n["heads"], float(n["eps"]), float(n["scale"]),
        )  # fmt: skip

    def add_bias(self, step, control, capacity) -> None:
        x, bias = self.session.slots[step.output], self.session.vector(step.weights[0])
        self.simple(step, control, elementwise.bias_kernel, x, x.shape[1], bias, bias.size)

    def scale(self, step, control, capacity) -> None:
        x, factor = self.session.slots[step.output], self.session.vector(step.weights[0])
        n = self.session.program.slots[step.output]
        self.simple(step, control, elementwise.scale_kernel, x, x.shape[1], factor, n)

    def _pairwise(self, step, control, which, n) -> None:
        x, y = (self.session.slots[name] for name in step.inputs)
        out = self.session.slots[step.output]
        self.simple(
            step, control, which, x, x.shape[1], y, y.shape[1], out, out.shape[1], n
        )  # fmt: skip

    def add(self, step, control, capacity) -> None:
        n = self.session.program.slots[step.output]
        self._pairwise(step, control, elementwise.add_kernel, n)

    def swiglu(self, step, control, capacity) -> None:
        self._pairwise(step, control, elementwise.swiglu_kernel, step.numbers["n"])

    def sigmoid(self, step, control, capacity) -> None:
        x, out = self.session.slots[step.inputs[0]], self.session.slots[step.output]
        self.simple(
            step, control, elementwise.sigmoid_kernel, x, x.shape[1], out, out.shape[1],
            step.numbers["n"],
        )  # fmt: skip

    def sigmoid_gate(self, step, control, capacity) -> None:
        x, gate = (self.session.slots[name] for name in step.inputs)
        out, n = self.session.slots[step.output], step.numbers
        self.simple(
            step, control, elementwise.sigmoid_gate_kernel, x, x.shape[1], gate, gate.shape[1],
            out, out.shape[1], n["n"], n["heads"], n["stride"], n["first"],
        )  # fmt: skip

    def decay(self, step, control, capacity) -> None:
        x, out = self.session.slots[step.inputs[0]], self.session.slots[step.output]
        rate, dt = (self.session.vector(name) for name in step.weights)
        self.simple(
            step, control, delta.decay_kernel, x, x.shape[1], rate, dt, out, out.shape[1],
            step.numbers["n"],
        )  # fmt: skip

    def conv_silu(self, step, control, capacity) -> None:
        s, n = self.session, step.numbers
        x, out = s.slots[step.inputs[0]], s.slots[step.output]
        # a lane is a channel
        taps = np.ascontiguousarray(s.vector(step.weights[0]).reshape(n["n"], n["taps"]).T)
        self.simple(
            step, control, delta.conv_silu_kernel, x, x.shape[1], taps, s.states[step.inputs[1]],
            out, out.shape[1], n["n"], n["taps"], split="channels",
        )  # fmt: skip

    def delta(self, step, control, capacity) -> None:
        s, n = self.session, step.numbers
        q, k, v, g, beta = (s.slots[name] for name in step.inputs[:5])
        out, state = s.slots[step.output], s.states[step.inputs[5]]
        self.simple(
            step, control, delta.delta_kernel, q, q.shape[1], k, k.shape[1], v, v.shape[1],
            n["first"], g, g.shape[1], beta, beta.shape[1], state, out,
            out.shape[1], n["n"], n["heads"], n["key_heads"], split="heads",
        )  # fmt: skip

    def hadamard(self, step, control, capacity) -> None:
        s, n = self.session, step.numbers
        x, out = s.slots[step.inputs[0]], s.slots[step.output]
        signs = s.vector(step.weights[0]) if step.weights else 0
        self.simple(
            step, control, rotate.hadamard_kernel, x, x.shape[1], signs, out, out.shape[1], n["n"],
            n["block"], n["inverse"], 1 / float(np.sqrt(float(n["block"]))), split="blocks",
        )  # fmt: skip

    def regroup(self, step, control, capacity) -> None:
        x, out = self.session.slots[step.inputs[0]], self.session.slots[step.output]
        n = step.numbers
        self.simple(
            step, control, rotate.regroup_kernel, x, x.shape[1], out, out.shape[1], n["n"],
            n["heads"], n["groups"],
        )  # fmt: skip

    def rope(self, step, control, capacity) -> None:
        s, n = self.session, step.numbers
        x = s.slots[step.output]
        self.simple(
            step, control, rope.rope_kernel, x, x.shape[1], n["heads"], n["dim"], n["pairs"],
            n["neox"], *s.rope_tables,
        )  # fmt: skip

    def store_kv(self, step, control, capacity) -> None:
        s, il = self.session, step.numbers["cache"]
        k, v = (s.slots[name] for name in step.inputs)
        groups, dim = s.program.caches[il]
        keys, values = s.caches[il]
        self.simple(
            step, control, rope.store_kernel, k, k.shape[1], v, v.shape[1], groups, dim,
            keys, values, s.positions, s.kv == "f16",
        )  # fmt: skip

    def attention(self, step, control, capacity) -> None:
        s, n = self.session, step.numbers
        q, out = s.slots[step.inputs[0]], s.slots[step.output]
        groups, dim = s.program.caches[n["cache"]]
        keys, values = s.caches[n["cache"]]
        arguments = words(
            q, q.shape[1], keys, values, out, out.shape[1], n["heads"], groups, dim, s.positions,
            float(n["scale"]), control, s.scratch, s.scratch_bytes,
        )  # fmt: skip
        call = Call(attention.attention_kernels[s.kv], arguments, (s, control), False)
        self.emit(step.name, call, step.inputs, (step.output,), "heads")

    def matmul(self, step, control, capacity) -> None:
        s, name = self.session, step.inputs[0]
        weight = s.weights[step.weights[0]]
        mode = "f32" if weight.format in FLOATS else s.activations
        key = (name, mode)
        if key not in self.inputs or self.inputs[key].K != weight.K:
            self.inputs[key] = Activations(weight.K, capacity, mode, self.count)
            self.filled.discard(key)
        inputs = self.inputs[key]
        if key not in self.filled:
            call = inputs.fill(s.slots[name], control, s.flag(step.name))
            self.emit(step.name, call._replace(barrier=False), (name,), (key,), "tokens")
            self.filled.add(key)
        call = matmul.matmul(weight, inputs, s.slots[step.output], control, s.products)
        self.emit(step.name, call._replace(barrier=False), (key,), (step.output,), "rows")
