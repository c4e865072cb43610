"""The language of kernels on the stand-in: what it computes and what it refuses."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cuda import elementary
from pnrt.cuda.kernel import KernelError, device, kernel, registers, unroll
from pnrt.cuda.lanes import (
    any_lane,
    at,
    block,
    bytes_high,
    bytes_low,
    dot_pairs,
    f32,
    float_to_half,
    fma,
    half_to_float,
    i32,
    load_f32,
    load_i32,
    load_u32,
    shared,
    shared_load_f32,
    shared_store_f32,
    shuffle,
    shuffle_xor,
    store_f32,
    store_i32,
    store_u32,
    syncthreads,
    thread,
    threads,
    u32,
    u64,
)
from pnrt.cuda.standin import StandIn
from pnrt.testing import assert_bits_equal


def run(kernel, *arrays, out=(32, np.float32), grid=1):
    """Launch with addresses of arrays, then of the output; the output."""
    machine = StandIn(1 << 24)
    shape, dtype = out
    address = machine.allocate(shape * np.dtype(dtype).itemsize)
    machine.launch(kernel, grid, *(machine.upload(a) for a in arrays), address)
    return machine.read(address, shape, dtype)


@device
def index():
    return block() * threads() + thread()


def test_products_and_sums_round_twice_and_fma_once():
    @kernel(threads=32)
    def two(x: u64, out: u64):
        v = load_f32(at(x, thread(), 4))
        store_f32(at(out, thread(), 4), v * v - 1.0)

    @kernel(threads=32)
    def one(x: u64, out: u64):
        v = load_f32(at(x, thread(), 4))
        store_f32(at(out, thread(), 4), fma(v, v, -1.0))

    x = np.linspace(0.9, 1.1, 32).astype(np.float32)
    assert_bits_equal("two roundings", x * x - np.float32(1), run(two, x))
    assert_bits_equal("fma", reference.fma(x, x, np.float32(-1)), run(one, x))
    assert (run(two, x) != run(one, x)).any()


def test_threads_part_and_meet_again():
    @kernel(threads=64)
    def collatz(out: u64):
        n, steps = index() + 1, i32(0)
        while n != 1:
            if n % 2 == 0:
                n = n >> 1
            else:
                n = 3 * n + 1
                steps += 0
            steps += 1
        store_i32(at(out, index(), 4), steps)

    def steps(n):
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    got = run(collatz, out=(128, np.int32), grid=2)
    np.testing.assert_array_equal(got, [steps(n + 1) for n in range(128)])


def test_integers_are_32_bits_wide():
    @kernel(threads=32)
    def wrap(x: u64, out: u64):
        v = load_u32(at(x, thread(), 4))
        signed = i32(v * 3 + 7)
        store_u32(at(out, thread(), 4), u32(signed >> 4) ^ (v >> 4) ^ u32(v < 5))

    x = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
    want = ((x * np.uint32(3) + np.uint32(7)).view(np.int32) >> 4).view(np.uint32) ^ (x >> 4)
    np.testing.assert_array_equal(run(wrap, x, out=(32, np.uint32)), want ^ (x < 5))


def test_unrolled_loops_index_registers_and_see_plain_values():
    table = ((0, 3), (1, 5), (2, 7))

    @kernel(threads=32)
    def tables(out: u64):
        total = i32(0)
        x = registers()
        for i in unroll(3):
            x[i] = i32(thread()) * table[i][1]
        for i, factor in unroll(table):
            if factor == 5:
                total += 100
            total += x[2 - i] * (factor << i)
        store_i32(at(out, thread(), 4), total)

    lane = np.arange(32)
    want = 100 + lane * (7 * 3 + 5 * 10 + 3 * 28)
    np.testing.assert_array_equal(run(tables, out=(32, np.int32)), want)


def test_pairs_and_bytes():
    @kernel(threads=32)
    def pairs(a: u64, b: u64, out: u64):
        v, w = load_u32(at(a, thread(), 4)), load_u32(at(b, thread(), 4))
        total = dot_pairs(i32(5), bytes_low(v), bytes_low(w))
        store_i32(at(out, thread(), 4), dot_pairs(total, bytes_high(v), bytes_high(w)))

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (32, 4), dtype=np.int8) for _ in range(2))
    want = 5 + (a.astype(int) * b).sum(1)
    np.testing.assert_array_equal(run(pairs, a, b, out=(32, np.int32)), want)


def test_lanes_exchange():
    @kernel(threads=64)
    def exchange(out: u64):
        v = f32(index())
        got = shuffle_xor(v, 5) * 1000.0 + shuffle(v, (thread() + 1) & 31)
        got = got if any_lane(thread() == 40) else -got
        store_f32(at(out, index(), 4), got)

    i = np.arange(64)
    want = (i ^ 5) * 1000 + (i & 32) + (i + 1) % 32
    assert_bits_equal("", np.where(i < 32, -want, want).astype("f4"), run(exchange, out=(64, "f4")))


def test_halves_round_to_nearest_even():
    @kernel(threads=32)
    def halves(x: u64, out: u64):
        v = load_f32(at(x, thread(), 4))
        store_f32(at(out, thread(), 4), half_to_float(float_to_half(v)))

    x = np.float32(2.0) ** np.arange(-26, 6, dtype=np.float32) * np.float32(1.00048828125)
    assert_bits_equal("halves", x.astype(np.float16).astype(np.float32), run(halves, x))


@pytest.mark.parametrize("name", ["exp", "log1p", "sigmoid", "silu", "softplus"])
def test_elementary_functions_have_the_references_bits(name):
    function = getattr(elementary, name)

    @kernel(threads=128)
    def apply(x: u64, out: u64):
        store_f32(at(out, index(), 4), function(load_f32(at(x, index(), 4))))

    rng = np.random.default_rng(0)
    x = rng.standard_normal(1024).astype(np.float32) * 40
    x[:12] = [0, -0.0, np.inf, -np.inf, np.nan, 89, -105, 1e-38, -1, 1e-45, 20, 88.8]
    got = run(apply, x, out=(1024, np.float32), grid=8)
    want = getattr(reference, name)(x)
    assert (np.isnan(want) == np.isnan(got)).all()
    keep = ~np.isnan(want)
    assert_bits_equal(name, want[keep], got[keep])


def test_shared_memory_needs_a_barrier():
    def make(barrier):
        @kernel(threads=64)
        def turn(out: u64):
            base = shared(256)
            shared_store_f32(base + thread() * 4, f32(thread()))
            if barrier:
                syncthreads()
            store_f32(at(out, index(), 4), shared_load_f32(base + (63 - thread()) * 4))

        return turn

    want = np.tile(np.arange(64, dtype=np.float32)[::-1], 2)
    assert_bits_equal("turned", want, run(make(True), out=(128, np.float32), grid=2))
    with pytest.raises(KernelError, match="race in shared memory"):
        run(make(False), out=(128, np.float32), grid=2)


def test_rewriting_shared_memory_needs_a_barrier_too():
    @kernel(threads=64)
    def again(out: u64):
        base = shared(256)
        shared_store_f32(base + thread() * 4, f32(thread()))
        syncthreads()
        v = shared_load_f32(base + (63 - thread()) * 4)
        shared_store_f32(base + thread() * 4, v)
        store_f32(at(out, thread(), 4), v)

    with pytest.raises(KernelError, match="race in shared memory"):
        run(again, out=(64, np.float32))


def _shuffle_in_a_branch(out):
    if thread() < 16:
        store_f32(at(out, thread(), 4), shuffle_xor(f32(1), 1))


def _barrier_in_a_branch(out):
    if thread() < 32:
        syncthreads()


def _outside(out):
    store_f32(at(out, thread() + 1, 4), 1.0)


def _misaligned(out):
    store_f32(out + thread() * 2, 1.0)


def _two_types(out):
    store_u32(at(out, thread(), 4), thread() + i32(1))


def _another_type(out):
    v = thread()
    v = f32(v)


def _integer_into_float(out):
    store_f32(at(out, thread(), 4), thread())


def _number_as_condition(out):
    if thread():
        store_f32(out, 1.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_shuffle_in_a_branch, "shuffle_xor: reached by some threads"),
        (_barrier_in_a_branch, "syncthreads: reached by some threads"),
        (_outside, "bad address .* thread 63"),
        (_misaligned, "bad address .* thread 1"),
        (_two_types, "two types in one operator: int32, uint32"),
        (_another_type, "v_.* is uint32 and becomes float32"),
        (_integer_into_float, "uint32 where float32 is needed"),
        (_number_as_condition, "a condition must be bool"),
    ],
)
def test_the_standin_refuses(body, message):
    inner = device(body)

    @kernel(threads=64)
    def bad(out: u64):
        inner(out)

    with pytest.raises(KernelError, match=message):
        run(bad, out=(64, np.float32))


def test_lowering_refuses_what_the_language_lacks():
    @kernel
    def early(out: u64):
        if thread() == 0:
            return

    @kernel
    def runtime_index(out: u64):
        x = registers()
        x[0] = i32(1)
        x[1] = x[thread()]

    @kernel
    def untyped(out):
        pass

    @kernel
    def unknown(out: u64):
        store_i32(out, i32(len("abc")) + round(thread()))

    for each, message in (
        (early, "not in the language: return"),
        (runtime_index, "an index must be a plain number"),
        (untyped, "parameter out needs one of u64"),
        (unknown, "only words and @device functions"),
    ):
        with pytest.raises(KernelError, match=message):
            _ = each.lowered


def test_a_word_outside_a_kernel_says_so():
    with pytest.raises(KernelError, match="load_i32: only usable inside a kernel"):
        load_i32(0)
