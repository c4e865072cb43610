"""The elementary functions against mpmath's tables, all float32 patterns sampled, and compiled."""

import operator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pnrt import reference, scalars

TABLES = Path(__file__).parent / "golden" / "scalars" / "tables.npz"
ULPS = {"exp": 1.0, "log1p": 2.0}
f32 = np.float32


def ulps(y: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """|y - truth| in units in the last place of a float32 of truth's size."""
    exponent = np.frexp(np.where(np.isfinite(truth), truth, 1))[1]
    unit = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    with np.errstate(all="ignore"):
        return np.abs(y.astype(np.float64) - truth) / unit


def check(name: str, x: np.ndarray, y: np.ndarray, truth: np.ndarray, allowed: float) -> None:
    assert y.dtype == f32
    np.testing.assert_array_equal(np.isnan(y), np.isnan(truth), err_msg=name)
    with np.errstate(all="ignore"):
        large = np.abs(truth) >= 2.0**128 - 2.0**103
    np.testing.assert_array_equal(y[large], np.sign(truth[large]) * f32(np.inf), err_msg=name)
    rest = ~large & ~np.isnan(truth)
    error = ulps(y[rest], truth[rest])
    worst = error.argmax()
    assert error[worst] <= allowed, f"{name}({x[rest][worst]!r}) is {error[worst]} ulp off"


@pytest.fixture(scope="module")
def sampled() -> np.ndarray:
    """Every 997th float32 pattern: all exponents, both signs, NaN."""
    return np.arange(0, 1 << 32, 997, dtype=np.uint32).view(f32)


@pytest.fixture(scope="module")
def compiled() -> scalars.Functions:
    """The functions compiled by numba, as a kernel would call them."""
    return scalars.build(numba_primitives())


def numba_primitives() -> SimpleNamespace:
    numba = pytest.importorskip("numba", reason="numba compiles the functions")
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    real, integer, flag = types.float32, types.int32, types.boolean

    @intrinsic
    def fma(_typing, a, b, c):
        def emit(_context, builder, _signature, args):
            kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
            llvm = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32")
            return builder.call(llvm, args)

        return real(real, real, real), emit

    @intrinsic
    def float_to_bits(_typing, x):
        return integer(real), lambda _c, b, _s, args: b.bitcast(args[0], ir.IntType(32))

    @intrinsic
    def bits_to_float(_typing, x):
        return real(integer), lambda _c, b, _s, args: b.bitcast(args[0], ir.FloatType())

    @intrinsic
    def select(_typing, condition, a, b):
        return real(flag, real, real), lambda _c, b, _s, args: b.select(*args)

    return SimpleNamespace(
        add=operator.add,
        sub=operator.sub,
        mul=operator.mul,
        div=operator.truediv,
        fma=fma,
        f32=np.float32,
        i32=np.int32,
        float_to_bits=float_to_bits,
        bits_to_float=bits_to_float,
        select=select,
        compile=numba.njit(error_model="numpy"),
    )


@pytest.mark.parametrize("name", ULPS)
def test_against_mpmath(name):
    tables = np.load(TABLES)
    assert len(tables["x"]) > 18000
    check(name, tables["x"], getattr(reference, name)(tables["x"]), tables[name], ULPS[name])


@pytest.mark.parametrize("name", ULPS)
def test_against_float64_over_all_patterns(name, sampled):
    with np.errstate(all="ignore"):
        truth = getattr(np, name)(sampled.astype(np.float64))
    check(name, sampled, getattr(reference, name)(sampled), truth, ULPS[name])


@pytest.mark.parametrize("name", scalars.Functions._fields)
def test_numba_returns_the_same_bits(name, compiled, sampled):
    import numba

    function = getattr(compiled, name)

    @numba.njit(error_model="numpy")
    def loop(x, y):
        for i in range(x.size):
            y[i] = function(x[i])

    x = np.concatenate([sampled, np.load(TABLES)["x"], sampled[:37]])
    y = np.full(x.shape, np.nan, f32)
    loop(x, y)
    expected = getattr(reference, name)(x)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(y), nan)
    np.testing.assert_array_equal(y.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def test_edges():
    inf, nan = np.inf, np.nan
    cases = {
        "exp": [(0, 1), (-0.0, 1), (inf, inf), (-inf, 0), (nan, nan), (89, inf), (-104, 0)],
        "log1p": [(0, 0), (-0.0, -0.0), (-1, -inf), (-1.5, nan), (inf, inf), (-inf, nan)],
        "sigmoid": [(0, 0.5), (inf, 1), (-inf, 0), (nan, nan), (-89, 0), (100, 1)],
        "silu": [(0, 0), (-0.0, -0.0), (inf, inf), (-inf, nan), (nan, nan), (-100, -0.0)],
        "softplus": [(-inf, 0), (inf, inf), (nan, nan), (21, 21), (1e30, 1e30)],
    }
    for name, pairs in cases.items():
        for x, want in pairs:
            got = getattr(reference, name)(f32(x))
            assert np.array_equal(got, f32(want), equal_nan=True), (name, x, got)
            assert np.isnan(want) or np.signbit(got) == np.signbit(want), (name, x, got)


def test_exp_has_subnormal_results():
    x = np.linspace(-103.9, -87.4, 200, dtype=f32)
    y = reference.exp(x)
    assert (y > 0).all()
    assert (y < 2.0**-126).all()
    assert (np.diff(y) >= 0).all()


def test_derived_functions_are_near_the_truth():
    x = np.linspace(-80, 80, 40001, dtype=f32)
    for name, allowed in (("sigmoid", 3.0), ("silu", 4.0), ("softplus", 4.0)):
        truth = getattr(reference.exact, name)(x)
        check(name, x, getattr(reference, name)(x), truth, allowed)
