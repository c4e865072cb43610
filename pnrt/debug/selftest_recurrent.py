"""Ops of pnrt selftest that rotated and recurrent models need.

Those with a state are fed their first rows in a run of their own: the state must carry over, and
must be forgotten by the reset that follows the poison.
"""

from __future__ import annotations

import numpy as np

from pnrt import reference
from pnrt.debug.selftest_base import FLOAT_DATA, STEPS_NEED, Op, f32, floats, run_steps
from pnrt.program import Step
from pnrt.reference import bounds, exact


def _flat(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(len(x), -1)


class L2Norm(Op):
    """Norms of heads that lie behind others, times a constant."""

    name = "l2_norm"
    axes = ("x T H D",)
    sizes = tuple(
        {"T": t, "H": h, "D": d, "skipped": s, "eps": 2.0**-20}
        for t, h, d, s in ((1, 1, 1, 0), (5, 2, 100, 1), (19, 3, 32, 0))
    )

    def needs(self, p):
        return (("l2_norm", "-"), *STEPS_NEED)

    def make(self, p, rng):
        return {"x": floats(rng, p["data"], (p["T"], p["H"], p["D"]), 1e15)}

    def expected(self, p, a):
        return reference.multiply(reference.l2_norm(a["x"], p["eps"]), f32(0.3))

    def truth(self, p, a):
        scale = float(f32(0.3))
        y = exact.l2_norm(a["x"], p["eps"])
        bound = bounds.l2_norm(a["x"], p["eps"]) * scale
        return y * scale, bound + bounds.multiply(y, scale)

    def run(self, engine, p, a):
        t, h, d = a["x"].shape
        first = p["skipped"] * d
        table = np.concatenate([np.full((t, first), 7, f32), _flat(a["x"])], axis=1)
        numbers = {"n": d, "heads": h, "eps": p["eps"], "first": first, "scale": float(f32(0.3))}
        step = Step("norm", "l2_norm", ("x",), (), "y", numbers)
        return run_steps(engine, {"x": table}, [step], "y", {"y": h * d}).reshape(a["x"].shape)


class Sigmoid(Op):
    """Element by element."""

    name = "sigmoid"
    axes = ("x T D",)
    sizes = ({"T": 1, "D": 1}, {"T": 4, "D": 333})

    def needs(self, p):
        return (("sigmoid", "-"), *STEPS_NEED)

    def make(self, p, rng):
        return {"x": floats(rng, p["data"], (p["T"], p["D"]), 110.0)}

    def expected(self, p, a):
        return reference.sigmoid(a["x"])

    def truth(self, p, a):
        return exact.sigmoid(a["x"]), bounds.sigmoid(a["x"])

    def run(self, engine, p, a):
        d = a["x"].shape[1]
        step = Step("sigmoid", "sigmoid", ("x",), (), "y", {"n": d})
        return run_steps(engine, {"x": a["x"]}, [step], "y", {"y": d})


class SigmoidGate(Op):
    """Heads gated by what lies behind their queries."""

    name = "sigmoid_gate"
    axes = ("x T H D", "gate T H D")
    simple = ("x", "gate")
    sizes = ({"T": 1, "H": 1, "D": 16}, {"T": 5, "H": 3, "D": 24})

    def needs(self, p):
        return (("sigmoid_gate", "-"), *STEPS_NEED)

    def make(self, p, rng):
        shape = (p["T"], p["H"], p["D"])
        return {n: floats(rng, p["data"], shape, 110.0) for n in ("x", "gate")}

    def expected(self, p, a):
        return reference.sigmoid_gate(a["x"], a["gate"])

    def truth(self, p, a):
        return tuple(m.sigmoid_gate(a["x"], a["gate"]) for m in (exact, bounds))

    def run(self, engine, p, a):
        _, h, d = a["x"].shape
        both = np.concatenate([np.full_like(a["gate"], 7), a["gate"]], axis=2)
        numbers = {"n": d, "heads": h, "stride": 2 * d, "first": d}
        step = Step("gate", "sigmoid_gate", ("x", "g"), (), "y", numbers)
        tables = {"x": _flat(a["x"]), "g": _flat(both)}
        return run_steps(engine, tables, [step], "y", {"y": h * d}).reshape(a["x"].shape)


class Hadamard(Op):
    """Rotation of activations, with and without signs, and back."""

    name = "hadamard"
    axes = ("x T B", "signs B")
    sizes = (
        {"T": 1, "K": 2, "block": 2},
        {"T": 5, "K": 96, "block": 32},
        {"T": 3, "K": 2048, "block": 1024},
    )
    choices = (("kind", ("plain", "signs", "inverse")), ("data", FLOAT_DATA))

    def pieces(self, axis, p, a):
        return len(a["signs"]) // p["block"] if axis == "B" else super().pieces(axis, p, a)

    def needs(self, p):
        return (("hadamard", "-"), *STEPS_NEED)

    def make(self, p, rng):
        # sums of a block must stay inside float32
        x = floats(rng, p["data"], (p["T"], p["K"]), 1e30)
        return {"x": x, "signs": rng.choice(np.array([-1, 1], f32), p["K"])}

    def arguments(self, p, a):
        signs = None if p["kind"] == "plain" else a["signs"]
        return a["x"], p["block"], signs, p["kind"] == "inverse"

    def expected(self, p, a):
        return reference.hadamard(*self.arguments(p, a))

    def truth(self, p, a):
        return exact.hadamard(*self.arguments(p, a)), bounds.hadamard(a["x"], p["block"])

    def run(self, engine, p, a):
        k = a["x"].shape[1]
        weights = () if p["kind"] == "plain" else ("signs",)
        numbers = {"n": k, "block": p["block"], "inverse": p["kind"] == "inverse"}
        step = Step("rotate", "hadamard", ("x",), weights, "y", numbers)
        vectors = {"signs": a["signs"]} if weights else None
        return run_steps(engine, {"x": a["x"]}, [step], "y", {"y": k}, vectors=vectors)


class Regroup(Op):
    """Tiled heads to grouped ones: a copy."""

    name = "regroup"
    axes = ("x T",)
    sizes = ({"T": 1, "H": 2, "G": 1, "D": 3}, {"T": 5, "H": 6, "G": 2, "D": 16})

    def needs(self, p):
        return (("regroup", "-"), *STEPS_NEED)

    def make(self, p, rng):
        shape = (p["T"], p["H"] // p["G"], p["G"], p["D"])
        return {"x": floats(rng, p["data"], shape, 1e30)}

    def expected(self, p, a):
        return _flat(a["x"].swapaxes(1, 2))

    def truth(self, p, a):
        y = self.expected(p, a).astype(np.float64)
        return y, np.zeros_like(y)

    def run(self, engine, p, a):
        numbers = {"n": p["D"], "heads": p["H"], "groups": p["G"]}
        step = Step("regroup", "regroup", ("x",), (), "y", numbers)
        width = p["H"] * p["D"]
        return run_steps(engine, {"x": _flat(a["x"])}, [step], "y", {"y": width})


class ConvSilu(Op):
    """The causal convolution and its silu, with a state."""

    name = "conv_silu"
    axes = ("x T C", "w C J")
    simple = ("x", "w")
    sizes = (
        {"T": 1, "C": 1, "J": 4, "start": 0},
        {"T": 19, "C": 40, "J": 4, "start": 0},
        {"T": 9, "C": 33, "J": 4, "start": 2},
        {"T": 4, "C": 16, "J": 2, "start": 3},
    )

    def needs(self, p):
        return (("conv_silu", "-"), *STEPS_NEED)

    def make(self, p, rng):
        x = floats(rng, p["data"], (p["T"], p["C"]), 1e30)
        return {"x": x, "w": floats(rng, "normal", (p["C"], p["J"]), 1)}

    def sums(self, judge, p, a):
        """The convolution of all rows by one of the judges, from an empty state."""
        y = judge.conv(a["x"], a["w"], np.zeros((a["w"].shape[1] - 1, a["x"].shape[1])))
        return (y if judge is bounds else y[0])[_start(p, a["x"]) :]

    def expected(self, p, a):
        return reference.silu(self.sums(reference, p, a))

    def truth(self, p, a):
        y = self.sums(exact, p, a)
        # silu is steeper than 1 by at most a tenth
        return exact.silu(y), bounds.silu(y) * (1 + 2.0**-20) + 1.1 * self.sums(bounds, p, a)

    def run(self, engine, p, a):
        c, j = a["w"].shape
        step = Step("conv", "conv_silu", ("x", "s"), ("w",), "y", {"n": c, "taps": j})
        return run_steps(
            engine, {"x": a["x"]}, [step], "y", {"y": c}, vectors={"w": a["w"].reshape(-1)},
            states={"s": (j - 1, c)}, start=_start(p, a["x"]),
        )  # fmt: skip


def _start(p, x: np.ndarray) -> int:
    """Rows fed before the measured ones: a case that was cut down may have fewer."""
    return min(p["start"], len(x) - 1)


class Decay(Op):
    """exp(a softplus(x + dt)), a negative."""

    name = "decay"
    axes = ("x T D", "a D", "dt D")
    simple = ("x", "a", "dt")
    sizes = ({"T": 1, "D": 1}, {"T": 5, "D": 48})

    def needs(self, p):
        return (("decay", "-"), *STEPS_NEED)

    def make(self, p, rng):
        a, dt = (floats(rng, "normal", (p["D"],), 1) for _ in range(2))
        return {"x": floats(rng, p["data"], (p["T"], p["D"]), 110.0), "a": -np.abs(a), "dt": dt}

    def arguments(self, a):
        return a["a"], a["x"], np.broadcast_to(a["dt"], a["x"].shape)

    def expected(self, p, a):
        return reference.decay(*self.arguments(a))

    def truth(self, p, a):
        return exact.decay(*self.arguments(a)), bounds.decay(*self.arguments(a))

    def run(self, engine, p, a):
        d = a["x"].shape[1]
        step = Step("decay", "decay", ("x",), ("a", "dt"), "y", {"n": d})
        vectors = {"a": a["a"], "dt": a["dt"]}
        return run_steps(engine, {"x": a["x"]}, [step], "y", {"y": d}, vectors=vectors)


class Delta(Op):
    """The gated delta rule over tokens; value head h reads key head h mod key heads."""

    name = "delta"
    axes = ("q T G E", "k T G E", "v T H E", "g T H", "beta T H")
    simple = ("q", "k", "v")
    sizes = (
        {"T": 1, "H": 1, "G": 1, "E": 16, "start": 0},
        {"T": 5, "H": 4, "G": 2, "E": 24, "start": 2},
        {"T": 40, "H": 2, "G": 1, "E": 128, "start": 7},
    )

    def pieces(self, axis, p, a):
        # heads are cut only where every head has its own key
        if axis in "GH" and p["G"] != p["H"]:
            return 1
        return super().pieces(axis, p, a)

    def needs(self, p):
        return (("delta", "-"), *STEPS_NEED)

    def make(self, p, rng):
        t, e = p["T"], p["E"]
        q, k = (floats(rng, p["data"], (t, p["G"], e), 1e6) for _ in range(2))
        return {
            "q": reference.l2_norm(q, 1e-6),
            "k": reference.l2_norm(k, 1e-6),
            "v": floats(rng, p["data"], (t, p["H"], e), 1e6),
            "g": rng.uniform(0.5, 1, (t, p["H"])).astype(f32),
            "beta": rng.uniform(0, 1, (t, p["H"])).astype(f32),
        }

    def tokens(self, a):
        """The arguments of a step, token after token."""
        key = np.arange(a["v"].shape[1]) % a["k"].shape[1]
        for t in range(len(a["v"])):
            yield a["q"][t, key], a["k"][t, key], a["v"][t], a["g"][t], a["beta"][t]

    def expected(self, p, a):
        h, e = a["v"].shape[1:]
        state, out = np.zeros((h, e, e), f32), []
        for arguments in self.tokens(a):
            o, state = reference.delta_step(state, *arguments)
            out.append(o)
        return np.stack(out)[_start(p, out) :]

    def truth(self, p, a):
        h, e = a["v"].shape[1:]
        state, error, out, limits = np.zeros((h, e, e)), np.zeros((h, e)), [], []
        for arguments in self.tokens(a):
            limit, error = bounds.delta_step(state, error, *arguments)
            o, state = exact.delta_step(state, *arguments)
            out.append(o)
            limits.append(limit)
        start = _start(p, out)
        return np.stack(out)[start:], np.stack(limits)[start:]

    def run(self, engine, p, a):
        t, h, e = a["v"].shape
        # values lie behind something else, as in the convolution's output
        v = np.concatenate([np.full((t, e), 7, f32), _flat(a["v"])], axis=1)
        tables = {"q": _flat(a["q"]), "k": _flat(a["k"]), "v": v, "g": a["g"], "beta": a["beta"]}
        numbers = {"n": e, "heads": h, "key_heads": a["k"].shape[1], "first": e}
        step = Step("delta", "delta", ("q", "k", "v", "g", "beta", "s"), (), "y", numbers)
        start = _start(p, a["v"])
        y = run_steps(
            engine, tables, [step], "y", {"y": h * e}, states={"s": (h, e, e)}, start=start
        )  # fmt: skip
        return y.reshape(t - start, h, e)


RECURRENT = (
    L2Norm(), Sigmoid(), SigmoidGate(), Hadamard(), Regroup(), ConvSilu(), Decay(), Delta(),
)  # fmt: skip
