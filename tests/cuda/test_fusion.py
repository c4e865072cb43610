"""Launches that stand for several steps: the bits of the steps one by one, and where not to."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cuda import chain, elementwise, fusion, matmul, paper, parts, rotate, together
from pnrt.cuda.activations import VIEWS
from pnrt.cuda.chain import Chain, Gate, Norm, Regroup
from pnrt.cuda.control import elements
from pnrt.cuda.kernel import Call, KernelError, kernel
from pnrt.cuda.lanes import at, block, blocks, lane, store_u32, u64
from pnrt.cuda.packers import pack
from pnrt.cuda.standin import StandIn
from pnrt.formats import FORMATS
from pnrt.generate import build_program
from pnrt.models.config import read_config
from pnrt.models.presets import blueprint
from pnrt.models.rotation import read_rotation
from pnrt.program import Step
from pnrt.reading import WeightReader
from pnrt.testing import assert_bits_equal

HEADS = Norm(24, 20, 40, 1e-5)
CHAINS = [
    # loads in two trips and some left, nine blocks of threads, numbers behind the last
    Chain(2090, Norm(2090, 1, 2090, 1e-6), "", None, None, 0, False, ((False, "pn3t"),)),
    Chain(480, HEADS, "swiglu of y", None, Regroup(24, 20, 4), 32, True, ((True, "nibble"),)),
    Chain(480, None, "sigmoid_gate", Gate(48, 10, 96, 48), None, 4, False, ((True, "three"),)),
    # both sides of a rotation, two views of one
    Chain(1024, Norm(1024, 1, 1024, 1e-6), "", None, None, 512, True,
          ((True, "pn3t"), (False, "byte"), (True, "f32"))),
    Chain(96, None, "swiglu", None, None, 0, False, ((False, "q8_0"), (False, "f32"))),
]  # fmt: skip


def floats(*shape, spread=3.0):
    rng = np.random.default_rng([*shape, 5])
    return (rng.standard_normal(shape) * spread).astype(np.float32)


def one_by_one(c, x, y, weight, signs):
    """What a chain computes before and after its rotation, step by step."""
    value = x
    if c.norm:
        heads = x.reshape(len(x), -1)[:, : c.norm.heads * c.norm.stride]
        heads = heads.reshape(len(x), c.norm.heads, c.norm.stride)[..., : c.norm.n]
        value = reference.rms_norm(heads, weight, c.norm.eps).reshape(len(x), -1)
    if c.join == "sigmoid_gate":
        gate = y.reshape(len(x), c.gate.heads, -1)[..., c.gate.first :][..., : c.gate.n]
        value = value * reference.sigmoid(gate.reshape(value.shape))
    elif c.join:
        a, b = (y, value) if c.join == "swiglu of y" else (value, y)
        value = reference.silu(a) * b
    if c.regroup:
        n, heads, groups = c.regroup
        value = value.reshape(len(x), heads // groups, groups, n).transpose(0, 2, 1, 3)
        value = np.ascontiguousarray(value.reshape(len(x), -1))
    if not c.rotate:
        return value, value
    return value, reference.hadamard(value, c.rotate, signs)


@pytest.mark.parametrize("c", CHAINS, ids=lambda c: c.name)
def test_a_chain_makes_the_views_of_its_steps(c):
    T = 2 if all(VIEWS[view].tokens for _, view in c.views) else 1
    device, width = StandIn(1 << 22), c.norm.heads * c.norm.stride if c.norm else c.width
    x, y = floats(T, width), floats(T, 2 * c.width if c.gate else c.width, spread=2)
    weight = floats(c.norm.n, spread=1) if c.norm else np.zeros(1, np.float32)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], c.width).astype(np.float32)
    expected = one_by_one(c, x, y, weight, signs if c.signs else None)
    flags = device.upload(np.zeros(chain.MOST, np.uint32))
    views, targets = [], []
    for i, (_, view) in enumerate(c.views):
        views.append(device.allocate(matmul.view_bytes(view, c.width, T)))
        targets += [views[-1], flags + 4 * i]
    args = (device.upload(x), width, device.upload(y), y.shape[1], device.upload(weight))
    device.run([chain.launch(c, (*args, device.upload(signs)), targets, T)])
    assert not device.read(flags, chain.MOST, np.uint32).any()
    for address, (turned, view) in zip(views, c.views, strict=True):
        nbytes = matmul.view_bytes(view, c.width, T)
        prepared = device.allocate(nbytes)
        source = device.upload(np.ascontiguousarray(expected[turned]))
        device.run([matmul.convert(view, source, c.width, c.width, T, prepared, flags)])
        got, want = (device.read(a, nbytes, np.uint8) for a in (address, prepared))
        np.testing.assert_array_equal(got, want, view)


def test_a_chain_notes_what_cannot_be_coded_in_the_views_own_flag():
    """Rotated, one large number is many smaller ones."""
    device = StandIn(1 << 20)
    views = ((True, "byte"), (False, "byte"), (False, "f32"))
    c = Chain(64, None, "swiglu", None, None, 64, False, views)
    x = np.ones((1, 64), np.float32)
    y = np.zeros((1, 64), np.float32)
    for value, expected in ((2e7, [0, 1, 0]), (np.nan, [1, 1, 1])):
        y[0, 5] = value
        flags, targets = device.upload(np.zeros(3, np.uint32)), []
        for i, (_, view) in enumerate(c.views):
            targets += [device.allocate(matmul.view_bytes(view, 64, 1)), flags + 4 * i]
        args = (device.upload(x), 64, device.upload(y), 64, 0, 0)
        device.run([chain.launch(c, args, targets, 1)])
        assert device.read(flags, 3, np.uint32).tolist() == expected


@pytest.mark.parametrize(("name", "mode"), [("q4_0", "q8_0"), ("pn3t", "q8_0"), ("q6_K", "f32")])
@pytest.mark.parametrize("adds", [False, True])
def test_matrices_of_one_launch(name, mode, adds):
    device, K, rng = StandIn(1 << 22), 256 if name == "q6_K" else 160, np.random.default_rng(3)
    x = floats(1, K)
    view = matmul.view_of(name, K, mode, 1)
    prepared = device.allocate(matmul.view_bytes(view, K, 1))
    flag = device.upload(np.zeros(1, np.uint32))
    device.run([matmul.convert(view, device.upload(x), K, K, 1, prepared, flag)])
    given, expected = [], []
    for i, N in enumerate((35, 1, 18)):
        rows = FORMATS[name].quantize(rng.standard_normal((N, K)).astype(np.float32))
        weight, data = pack(name, rows, K)
        plus = floats(N, i + 1)[:, 0].copy()
        # the first is added to in place
        out = device.upload(plus) if adds and not i else device.allocate(4 * N)
        added = (out if not i else device.upload(plus)) if adds else 0
        given.append(parts.Part(weight, device.upload(data), out, added))
        product = reference.matmul(name, rows, x, mode)[0]
        expected.append(product + plus if adds else product)
    # blocks of the tuned kernels stay for many rows
    device.run([matmul.multiply_parts(given, view, prepared, blocks=4)])
    for part, want in zip(given, expected, strict=True):
        assert_bits_equal(f"{name} {part.weight.N}", want, device.read(part.out, part.weight.N))


def test_blocks_are_shared_out_in_proportion():
    assert parts.shares([3, 1, 2], None) == [3, 1, 2]
    assert parts.shares([3, 1, 2], 6) == [3, 1, 2]
    assert parts.shares([640, 384], 224) == [140, 84]
    for needed, most in (([1, 1000], 224), ([7, 5, 3], 8), ([100, 1, 1, 1], 10)):
        found = parts.shares(needed, most)
        assert sum(found) == most
        assert min(found) >= 1


def step(op, output, *inputs, n=64, weights=(), **numbers):
    return Step(output, op, inputs, weights, output, {"n": n} | numbers)


NORM = step("rms_norm", "h", "x", weights=("w",), heads=1, stride=64, eps=1e-6)
TURN = step("hadamard", "h.rot", "h", block=64, inverse=False)
Q, K, V = (step("matmul", output, "h.rot") for output in "qkv")
PLAIN, GATED = step("matmul", "p", "h"), step("swiglu", "h", "z", "h")


def view(product):
    return ("nibble" if product.output == "k" else "pn3t"), 64


def test_what_a_chain_is_made_of():
    found = fusion.find_chain([NORM, TURN, PLAIN, Q, V, K], 0, view)
    assert found.steps == (NORM, TURN)
    assert found.chain.views == ((False, "pn3t"), (True, "pn3t"), (True, "nibble"))
    assert found.products == (PLAIN, Q, K)
    assert fusion.operands(found) == ("x", "", "w", "")
    found = fusion.find_chain([NORM, GATED, PLAIN], 0, view)
    assert (found.steps, found.chain.join) == ((NORM, GATED), "swiglu of y")
    assert fusion.operands(found) == ("x", "z", "w", "")
    # in place, the heads in another order, a rotation with signs
    heads = step("rms_norm", "d", "d", n=16, weights=("w",), heads=4, stride=16, eps=1e-6)
    order = step("regroup", "g", "d", n=16, heads=4, groups=2)
    turn = step("hadamard", "g.rot", "g", weights=("signs",), block=32, inverse=False)
    steps = (heads, step("swiglu", "d", "z", "d"), order, turn)
    found = fusion.find_chain([*steps, step("matmul", "o", "g.rot")], 0, view)
    assert (found.steps, found.chain.regroup) == (steps, Regroup(16, 4, 2))
    assert found.chain.views == ((True, "pn3t"),)
    assert fusion.operands(found) == ("d", "z", "w", "signs")


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        # the plain slot is read by no product, after the rotation or behind products
        ([NORM, TURN, Q, step("add", "x", "x", "h")], 0),
        ([NORM, TURN, Q, step("rope", "h.rot", "h.rot")], 0),
        # not once it was written anew
        ([NORM, TURN, Q, step("take", "h", "x"), step("add", "x", "x", "h")], 2),
        # nothing reads it
        ([NORM, TURN], 0),
        # a matrix of other columns than the norm's
        ([step("rms_norm", "h", "x", n=32, heads=1, stride=64, eps=0.0), PLAIN], 0),
        # an inverse rotation ends no chain
        ([NORM, step("hadamard", "h.rot", "h", block=64, inverse=True), Q], 0),
        # a step between
        ([NORM, step("take", "y", "x"), TURN, Q], 0),
    ],
)
def test_where_there_is_no_chain(steps, count):
    found = fusion.find_chain(steps, 0, view)
    assert (len(found.steps) if found else 0) == count


def groups(*steps):
    found = fusion.find_group(steps, 0, lambda s: (s.inputs, view(s)), lambda s: s.numbers["n"])
    return ["+".join(filter(None, (p.output, p.added))) for p in found]


def test_products_of_one_launch():
    bias = [step("add_bias", o, o, weights=(f"b.{o}",)) for o in "qv"]
    assert groups(Q, V, K) == ["q", "v"]
    assert groups(Q, V, PLAIN) == ["q", "v"]
    assert groups(Q, bias[0], V, bias[1], K) == ["q+b.q", "v+b.v"]
    assert groups(Q, V, bias[1]) == ["q"]
    residual = step("add", "x", "x", "q")
    assert groups(Q, residual, V) == ["x+x"]
    assert groups(Q, residual, step("take", "y", "q")) == ["q"]
    assert groups(Q, step("add", "x", "x", "q", n=32)) == ["q"]
    many = [step("matmul", f"q{i}", "h.rot") for i in range(6)]
    assert groups(*many) == ["q0", "q1", "q2", "q3"]


def test_small_steps_that_do_not_wait_for_each_other():
    conv = step("conv_silu", "conv", "qkv", "window")
    decay, gate = step("decay", "decay", "alpha"), step("sigmoid", "beta", "beta")
    norms = [step("l2_norm", output, "conv") for output in ("dq", "dk")]
    states = {"window"}
    assert fusion.find_together([conv, decay, gate, *norms], 0, states, view) == 3
    assert fusion.find_together([*norms, step("delta", "d", "dq", "dk")], 0, states, view) == 2
    # the same state, a slot that is read before it is written, one written twice
    for other in (conv, step("decay", "qkv", "alpha"), step("decay", "conv", "alpha")):
        assert fusion.find_together([conv, other], 0, states, view) == 1
    # what begins a chain is left to it
    assert fusion.find_together([decay, NORM, PLAIN], 0, states, view) == 1


def test_small_kernels_in_one_launch():
    device, calls, expected = StandIn(1 << 20), [], []
    control = device.upload(np.array([1, 0], np.uint32))
    for n in (130, 300, 5):
        x, y = floats(1, n), floats(1, n, spread=1)
        out = device.allocate(4 * n)
        args = (device.upload(x), n, device.upload(y), n, out, n, n, control)
        calls.append(Call(elementwise.add_kernel, elements(n, 1, elementwise.add_kernel), args))
        expected.append((out, x + y))
    joined = together.together(calls)
    assert joined.kernel.name == "add_and_add_and_add"
    assert joined.grid == (6, 1)
    device.run([joined])
    for out, want in expected:
        assert_bits_equal("add", want[0], device.read(out, want.shape[1]))
    with pytest.raises(KernelError, match="no shared memory"):
        together.together([calls[0], Call(rotate.hadamard_kernel, (1, 1), ())])


def test_kernels_count_their_own_blocks():
    @kernel(name="numbered", threads=32)
    def numbered(out: u64):
        if lane() == 0:
            store_u32(at(out, block(), 4), blocks() * 10 + block())

    device = StandIn(1 << 16)
    outs = [device.allocate(4 * count) for count in (2, 1, 3)]
    calls = [Call(numbered, (n, 1), (out,)) for n, out in zip((2, 1, 3), outs, strict=True)]
    device.run([together.together(calls)])
    found = [device.read(o, n, np.uint32).tolist() for o, n in zip(outs, (2, 1, 3), strict=True)]
    assert found == [[20, 21], [10], [30, 31, 32]]


@pytest.mark.parametrize(("fusing", "count"), [(False, 1940), (True, 835)])
def test_launches_of_the_27b_models_token(fusing, count):
    file = blueprint("qwen3.8-27b-pn3")
    rotation = read_rotation(file)
    program = build_program(read_config(file), file.tensors, rotation)
    shape = WeightReader(file, rotation).shape
    assert len(paper.launches(program, shape, fusing=fusing)) == count
