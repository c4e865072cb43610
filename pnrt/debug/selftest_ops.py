"""The ops pnrt selftest knows; those here are steps of programs on float32 slots."""

from __future__ import annotations

import numpy as np

from pnrt import reference
from pnrt.backend import CACHE_TYPES, Backend
from pnrt.debug.selftest_base import FLOAT_DATA, STEPS_NEED, Op, f32, floats, run_steps
from pnrt.debug.selftest_products import Embedding, Matmul, Quantize
from pnrt.debug.selftest_recurrent import RECURRENT
from pnrt.program import Step
from pnrt.reference import bounds, exact


class RmsNorm(Op):
    """Norms of whole rows and of heads."""

    name = "rms_norm"
    axes = (
        "x T H D",
        "w D",
    )
    simple = ("x", "w")
    sizes = tuple(
        # stride 2: behind each head lies something else
        {"T": t, "H": h, "D": d, "stride": s, "eps": 2.0**-17}
        for t, h, d, s in (
            (1, 1, 1, 1),
            (2, 1, 100, 1),
            (5, 1, 576, 1),
            (3, 4, 24, 2),
            (19, 2, 128, 1),
        )
    )

    def needs(self, p):
        return (("rms_norm", "-"), *STEPS_NEED)

    def make(self, p, rng):
        shape = (p["T"], p["H"], p["D"])
        return {"x": floats(rng, p["data"], shape, 1e15), "w": floats(rng, "normal", shape[2:], 1)}

    def expected(self, p, a):
        return reference.rms_norm(a["x"], a["w"], p["eps"])

    def truth(self, p, a):
        return exact.rms_norm(a["x"], a["w"], p["eps"]), bounds.rms_norm(a["x"], a["w"], p["eps"])

    def run(self, engine, p, a):
        t, h, d = a["x"].shape
        stride = p["stride"] * d
        numbers = {"n": d, "heads": h, "stride": stride, "eps": p["eps"]}
        step = Step("norm", "rms_norm", ("x",), ("w",), "y", numbers)
        wide = np.full((t, h, stride), 7, f32)
        wide[:, :, :d] = a["x"]
        tables = {"x": wide.reshape(t, h * stride)}
        y = run_steps(engine, tables, [step], "y", {"y": h * d}, vectors={"w": a["w"]})
        return y.reshape(a["x"].shape)


class Pairwise(Op):
    """What works element by element on two slots."""

    axes = (
        "x T D",
        "y T D",
    )
    simple = ("x", "y")
    sizes = ({"T": 1, "D": 1}, {"T": 4, "D": 333}, {"T": 19, "D": 96})
    step = ""
    huge = 1e30

    def needs(self, p):
        return ((self.step, "-"), *STEPS_NEED)

    def make(self, p, rng):
        return {s: floats(rng, p["data"], (p["T"], p["D"]), self.huge) for s in "xy"}

    def expected(self, p, a):
        return getattr(reference, self.name)(a["x"], a["y"])

    def truth(self, p, a):
        with np.errstate(all="ignore"):
            return tuple(getattr(m, self.name)(a["x"], a["y"]) for m in (exact, bounds))

    def run(self, engine, p, a):
        d = a["x"].shape[1]
        step = Step(self.name, self.step, ("x", "y"), (), "z", {"n": d})
        return run_steps(engine, {s: a[s] for s in "xy"}, [step], "z", {"z": d})


class Add(Pairwise):
    """Residuals."""

    name = step = "add"


class Swiglu(Pairwise):
    """silu(gate) * up."""

    name = step = "swiglu"
    # gates around where exp overflows
    huge = 110.0


class Bias(Op):
    """A vector added to every row, in place."""

    name = "add_bias"
    axes = (
        "x T D",
        "w D",
    )
    simple = ("x", "w")
    sizes = ({"T": 1, "D": 1}, {"T": 5, "D": 333})

    def needs(self, p):
        return (("add_bias", "-"), *STEPS_NEED)

    def make(self, p, rng):
        shape = (p["T"], p["D"])
        return {"x": floats(rng, p["data"], shape, 1e30), "w": floats(rng, "normal", shape[1:], 1)}

    def expected(self, p, a):
        return reference.add(a["x"], np.broadcast_to(a["w"], a["x"].shape))

    def truth(self, p, a):
        return exact.add(a["x"], a["w"]), bounds.add(a["x"], a["w"])

    def run(self, engine, p, a):
        step = Step("bias", "add_bias", ("x",), ("w",), "x")
        return run_steps(engine, {"x": a["x"]}, [step], "x", {}, vectors={"w": a["w"]})


class Scale(Op):
    """One number times every row, in place."""

    name = "scale"
    axes = ("x T D",)
    sizes = ({"T": 1, "D": 1}, {"T": 5, "D": 333})

    def needs(self, p):
        return (("scale", "-"), *STEPS_NEED)

    def make(self, p, rng):
        return {
            "x": floats(rng, p["data"], (p["T"], p["D"]), 1e30), "w": floats(rng, "normal", (1,), 1)
        }  # fmt: skip

    def expected(self, p, a):
        return reference.multiply(a["x"], a["w"])

    def truth(self, p, a):
        return exact.multiply(a["x"], a["w"]), bounds.multiply(a["x"], a["w"])

    def run(self, engine, p, a):
        step = Step("scale", "scale", ("x",), ("w",), "x")
        return run_steps(engine, {"x": a["x"]}, [step], "x", {}, vectors={"w": a["w"]})


class Rope(Op):
    """Rotation by position, both pairings, whole heads and a part of them."""

    name = "rope"
    axes = ("x T H",)
    sizes = (
        {"T": 1, "H": 1, "E": 16, "pairs": 8, "start": 0},
        {"T": 4, "H": 3, "E": 24, "pairs": 8, "start": 5},
        {"T": 19, "H": 2, "E": 128, "pairs": 64, "start": 1},
    )
    choices = (("pairing", ("norm", "neox")), ("data", FLOAT_DATA))

    def needs(self, p):
        return (("rope", "-"), *STEPS_NEED)

    def make(self, p, rng):
        angle = rng.uniform(0, 7, (p["start"] + p["T"], p["pairs"]))
        x = floats(rng, p["data"], (p["T"], p["H"], p["E"]), 1e30)
        return {"x": x, "cos": np.cos(angle).astype(f32), "sin": np.sin(angle).astype(f32)}

    def arguments(self, p, a):
        positions = slice(p["start"], p["start"] + len(a["x"]))
        return a["x"], a["cos"][positions], a["sin"][positions], p["pairing"] == "neox"

    def expected(self, p, a):
        return reference.rope(*self.arguments(p, a))

    def truth(self, p, a):
        return exact.rope(*self.arguments(p, a)), bounds.rope(*self.arguments(p, a))

    def run(self, engine, p, a):
        (t, h, e), start = a["x"].shape, p["start"]
        table = np.concatenate([np.ones((start, h * e), f32), a["x"].reshape(t, h * e)])
        numbers = {"heads": h, "dim": e, "pairs": p["pairs"], "neox": p["pairing"] == "neox"}
        step = Step("rope", "rope", ("x",), (), "x", numbers)
        tables = tuple(np.ascontiguousarray(a[name][: start + t]) for name in ("cos", "sin"))
        y = run_steps(engine, {"x": table}, [step], "x", {}, rope=tables, start=start)
        return y.reshape(a["x"].shape)


class Attention(Op):
    """Queries over a cache: groups of heads, blocks of 256 positions, both cache types."""

    name = "attention"
    axes = (
        "q T",
        "k P",
        "v P",
    )
    simple = ("q", "k", "v")
    sizes = (
        {"T": 1, "P": 1, "H": 1, "G": 1, "E": 16},
        {"T": 40, "P": 40, "H": 4, "G": 2, "E": 24},
        {"T": 3, "P": 303, "H": 6, "G": 2, "E": 80},
        {"T": 1, "P": 257, "H": 2, "G": 1, "E": 128},
    )
    choices = (("kv", CACHE_TYPES), ("data", FLOAT_DATA))

    def needs(self, p):
        return (("attention", "-"), ("store_kv", "-"), *STEPS_NEED)

    def make(self, p, rng):
        kind = np.float16 if p["kv"] == "f16" else f32
        shapes = {"q": (p["T"], p["H"]), "k": (p["P"], p["G"]), "v": (p["P"], p["G"])}
        out = {}
        for name, shape in shapes.items():
            x = floats(rng, p["data"], (*shape, p["E"]), 300.0)
            # the judges see what the cache holds
            out[name] = x if name == "q" else x.astype(kind).astype(f32)
        return out

    def arguments(self, p, a):
        start = len(a["k"]) - len(a["q"])
        return a["q"], a["k"], a["v"], start, float(f32(a["q"].shape[2]) ** f32(-0.5))

    def expected(self, p, a):
        return reference.attention(*self.arguments(p, a))

    def truth(self, p, a):
        return exact.attention(*self.arguments(p, a)), bounds.attention(*self.arguments(p, a))

    def run(self, engine, p, a):
        return run_attention(engine, *self.arguments(p, a), p["kv"])


def run_attention(
    engine: Backend, q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float, kv: str
) -> np.ndarray:
    """Fill a cache, then attend: arguments as of reference.attention."""
    (_, h, e), (total, g, _) = q.shape, k.shape
    queries = np.concatenate([np.ones((start, h, e), f32), q]).reshape(total, -1)
    tables = {"q": queries, "k": k.reshape(total, -1), "v": v.reshape(total, -1)}
    numbers = {"cache": 0, "heads": h, "scale": scale}
    steps = [
        Step("kv", "store_kv", ("k", "v"), (), "cache.0", {"cache": 0}),
        Step("attn", "attention", ("q", "cache.0"), (), "a", numbers),
    ]
    y = run_steps(
        engine, tables, steps, "a", {"a": h * e}, caches=((g, e),), start=start, kv=kv
    )  # fmt: skip
    return y.reshape(q.shape)


class Softmax(Op):
    """The softmax inside attention: scores as keys of one element, the unit matrix as values."""

    name = "softmax"
    axes = ("scores P",)
    simple = ("scores",)
    sizes = tuple({"P": n} for n in (1, 31, 64, 128))
    choices = (("data", FLOAT_DATA),)

    def make(self, p, rng):
        return {"scores": floats(rng, p["data"], (p["P"],), 120.0)}

    def needs(self, p):
        return (("attention", "-"), ("store_kv", "-"), *STEPS_NEED)

    def expected(self, p, a):
        return reference.softmax(a["scores"])[None]

    def truth(self, p, a):
        return exact.softmax(a["scores"])[None], bounds.softmax(a["scores"])[None]

    def run(self, engine, p, a):
        count = len(a["scores"])
        width = -(-count // 16) * 16
        k, v = (np.zeros((count, 1, width), f32) for _ in range(2))
        k[:, 0, 0], v[:, 0] = a["scores"], np.eye(count, width)
        q = np.zeros((1, 1, width), f32)
        q[0, 0, 0] = 1
        return run_attention(engine, q, k, v, count - 1, 1.0, "f32")[:, 0, :count]


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Matmul(), Quantize(), Embedding(), RmsNorm(), Add(), Bias(), Scale(), Swiglu(), Rope(),
        Attention(), Softmax(), *RECURRENT,
    )
}  # fmt: skip
