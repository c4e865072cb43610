"""The words of lanes.py on NumPy vectors, an element per thread; `run` is a launch (standin.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from pnrt.cuda.kernel import KernelError
from pnrt.cuda.shared import SharedMemory, number
from pnrt.reference import fma

F32, I32, U32, U64, BOOL = map(np.dtype, (np.float32, np.int32, np.uint32, np.uint64, np.bool_))

WORDS: dict[str, Callable] = {}


def _define(function):
    WORDS[function.__name__.removeprefix("_w_")] = function
    return function


def _same(*values):
    """Operands of one type: plain numbers take the type of the others."""
    kinds = {v.dtype for v in values if not isinstance(v, int)}
    if len(kinds) > 1:
        raise KernelError(f"two types in one operator: {', '.join(sorted(map(str, kinds)))}")
    kind = kinds.pop() if kinds else I32
    return [_plain(v, kind) if isinstance(v, int) else v for v in values]


@functools.lru_cache(4096)
def _plain(value: int, kind: np.dtype):
    return np.array(value).astype(kind)[()]


def _operator(name, function, kinds):
    def word(run, a, b):
        if isinstance(a, int) or isinstance(b, int) or a.dtype != b.dtype:
            if name in ("add", "sub") and not isinstance(a, int) and a.dtype == U64:
                if isinstance(b, int) and b >= 0:
                    b = np.uint64(b)
                elif not isinstance(b, int) and b.dtype == U32:
                    b = b.astype(U64)
            a, b = _same(a, b)
        if a.dtype.kind not in kinds:
            raise KernelError(f"{name} on {a.dtype}")
        return function(a, b)

    WORDS[name] = word


def _shift(function):
    # numpy leaves shifts by the width or more undefined, as C does
    return lambda a, b: function(a, b & np.array(a.dtype.itemsize * 8 - 1, a.dtype))


for _name, _function, _kinds in (
    ("add", np.add, "iuf"), ("sub", np.subtract, "iuf"), ("mul", np.multiply, "iuf"),
    ("div", np.divide, "f"), ("and_", np.bitwise_and, "iub"), ("or_", np.bitwise_or, "iub"),
    ("xor", np.bitwise_xor, "iub"), ("shl", _shift(np.left_shift), "iu"),
    ("shr", _shift(np.right_shift), "iu"), ("quotient", np.floor_divide, "u"),
    ("remainder", np.remainder, "u"), ("lt", np.less, "iuf"), ("le", np.less_equal, "iuf"),
    ("gt", np.greater, "iuf"), ("ge", np.greater_equal, "iuf"), ("eq", np.equal, "iufb"),
    ("ne", np.not_equal, "iufb"), ("minimum", lambda a, b: np.where(a < b, a, b), "iuf"),
    ("maximum", lambda a, b: np.where(a > b, a, b), "iuf"),
):  # fmt: skip
    _operator(_name, _function, _kinds)


def _only(x, *kinds):
    x = number(x)
    if x.dtype not in kinds:
        raise KernelError(f"{x.dtype} where {' or '.join(map(str, kinds))} is needed")
    return x


def _conversion(name, kind, sources):
    def word(run, x):
        if kind != np.float32 and isinstance(x, int):
            return kind(np.array(x, np.int64).astype(kind))
        return _only(x, *sources).astype(kind)

    WORDS[name] = word


_conversion("u32", np.uint32, (U32, I32, U64, BOOL))
_conversion("i32", np.int32, (U32, I32, U64, BOOL))
_conversion("u64", np.uint64, (U32, U64))
_conversion("f32", np.float32, (I32, U32, F32))


@_define
def _w_true(run):
    return np.bool_(True)


@_define
def _w_false(run):
    return np.bool_(False)


@_define
def _w_like(run, x, other):
    return _same(x, other)[0]


@_define
def _w_neg(run, x):
    return -_only(x, I32, F32)


@_define
def _w_not_(run, x):
    return ~_only(x, BOOL)


@_define
def _w_invert(run, x):
    return ~_only(x, I32, U32)


@_define
def _w_fma(run, a, b, c):
    a, b, c = _same(a, b, c)
    return np.asarray(fma(_only(a, F32), b, c))


@_define
def _w_sqrt(run, x):
    return np.sqrt(_only(x, F32))


@_define
def _w_absolute(run, x):
    return np.abs(_only(x, F32))


@_define
def _w_truncate(run, x):
    return np.trunc(_only(x, F32)).astype(np.int32)


@_define
def _w_select(run, condition, a, b):
    a, b = _same(a, b)
    return np.where(_only(condition, BOOL), a, b)


@_define
def _w_bits_to_float(run, x):
    return _only(x, I32, U32).view(np.float32)


@_define
def _w_float_to_bits(run, x):
    return _only(x, F32).view(np.int32)


@_define
def _w_half_to_float(run, x):
    return np.asarray(_only(x, U32)).astype(np.uint16).view(np.float16).astype(np.float32)


@_define
def _w_float_to_half(run, x):
    return np.asarray(_only(x, F32)).astype(np.float16).view(np.uint16).astype(np.uint32)


def _products(a, b):
    """Of two u32: the products of their signed halves, added."""
    a, b = (np.asarray(_only(x, U32)).view(I32) for x in (a, b))
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16)


@_define
def _w_dot_pairs(run, acc, a, b):
    return _only(acc, I32) + _products(a, b)


@_define
def _w_dot8(run, acc, *ab):
    # all at once where that is simple: sums of integers have no order
    if len({np.shape(x) for x in ab}) == 1:
        return _only(acc, I32) + _products(np.stack(ab[:8]), np.stack(ab[8:])).sum(0, I32)
    for a, b in zip(ab[:8], ab[8:], strict=True):
        acc = _w_dot_pairs(run, acc, a, b)
    return acc


@_define
def _w_fma4(run, acc, *ab):
    for a, b in zip(ab[:4], ab[4:], strict=True):
        acc = _w_fma(run, a, b, acc)
    return acc


def _bytes(x, first):
    x = np.asarray(_only(x, U32))
    low, high = ((x >> np.uint32(s)).astype(np.int8).astype(np.uint16) for s in (first, first + 8))
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


@_define
def _w_bytes_low(run, x):
    return _bytes(x, 0)


@_define
def _w_bytes_high(run, x):
    return _bytes(x, 16)


@_define
def _w_thread(run):
    return run.tid


@_define
def _w_threads(run):
    return np.uint32(run.kernel.threads)


@_define
def _w_block(run):
    return (run.block_of % run.grid[0]).astype(np.uint32)


@_define
def _w_block_y(run):
    return (run.block_of // run.grid[0]).astype(np.uint32)


@_define
def _w_blocks(run):
    return np.uint32(run.grid[0])


def _load(memory, result, count=1):
    """memory: the type in memory; result: the type of the value."""
    size = np.dtype(memory).itemsize

    def word(run, address):
        at = run.places(address, size * count) // size
        numbers = run.device._memory.view(memory)
        columns = [numbers[at + i].astype(result, copy=False) for i in range(count)]
        return tuple(columns) if count > 1 else columns[0]

    return word


for _kind, _memory, _result in (
    ("f32", np.float32, np.float32), ("i32", np.int32, np.int32), ("u32", np.uint32, np.uint32),
    ("u16", np.uint16, np.uint32), ("u8", np.uint8, np.uint32), ("i8", np.int8, np.int32),
    ("half", np.float16, np.float32),
):  # fmt: skip
    for _verb in ("load", "fetch"):
        WORDS[f"{_verb}_{_kind}"] = _load(_memory, _result)
WORDS["fetch_u32x2"] = _load(np.uint32, np.uint32, 2)
WORDS["fetch_u32x4"] = _load(np.uint32, np.uint32, 4)
WORDS["fetch_f32x4"] = _load(np.float32, np.float32, 4)


def _store(memory, source):
    size = np.dtype(memory).itemsize

    def word(run, address, *values):
        at = run.places(address, size * len(values)) // size
        numbers = run.device._memory.view(memory)
        active = slice(None) if run.mask is None else run.mask
        for i, value in enumerate(values):
            numbers[at[active] + i] = run.vector(_only(value, source)).astype(memory)[active]

    return word


for _kind, _memory, _source in (
    ("f32", np.float32, F32), ("i32", np.int32, I32), ("u32", np.uint32, U32),
    ("u16", np.uint16, U32), ("u8", np.uint8, U32), ("u32x4", np.uint32, U32),
):  # fmt: skip
    WORDS[f"store_{_kind}"] = _store(_memory, _source)


@_define
def _w_shared(run, nbytes):
    if run.shared is not None or not isinstance(nbytes, int) or nbytes % 16:
        raise KernelError("a kernel has one shared array, of a plain multiple of 16 bytes")
    run.shared = SharedMemory(run, nbytes)
    return np.uint32(0)


def _shared_load(result, count=1):
    def word(run, address):
        found = run.shared.words[run.shared.places(run, address, 4 * count, False)].view(result)
        columns = [np.ascontiguousarray(found[:, i]) for i in range(count)]
        return tuple(columns) if count > 1 else columns[0]

    return word


def _shared_store(source):
    def word(run, address, *values):
        words = run.shared.places(run, address, 4 * len(values), True)
        values = [run.vector(_only(v, source)).view(np.uint32) for v in values]
        active = slice(None) if run.mask is None else run.mask
        run.shared.words[words[active]] = np.stack(values, 1)[active]

    return word


WORDS["shared_load_f32"] = _shared_load(np.float32)
WORDS["shared_load_u32"] = _shared_load(np.uint32)
WORDS["shared_load_u32x2"] = _shared_load(np.uint32, 2)
WORDS["shared_load_u32x4"] = _shared_load(np.uint32, 4)
WORDS["shared_store_f32"] = _shared_store(F32)
WORDS["shared_store_u32"] = _shared_store(U32)
WORDS["shared_store_u32x4"] = _shared_store(U32)


@_define
def _w_syncthreads(run):
    run.together("syncthreads", run.block_of)
    if run.shared:
        run.shared.sync(run, True)


@_define
def _w_syncwarp(run):
    run.together("syncwarp", run.warp_of)
    if run.shared:
        run.shared.sync(run, False)


def _exchange(run, what, value, source):
    run.together(what, run.warp_of)
    if run.shared:
        run.shared.sync(run, False)
    return run.vector(number(value))[run.warp_of * 32 + source]


@_define
def _w_shuffle_xor(run, value, m):
    return _exchange(run, "shuffle_xor", value, (np.arange(run.count) % 32) ^ m)


@_define
def _w_shuffle(run, value, source):
    source = run.vector(number(source)).astype(np.int64) & 31
    return _exchange(run, "shuffle", value, source)


def _vote(run, what, value):
    run.together(what, run.warp_of)
    if run.shared:
        run.shared.sync(run, False)
    return run.vector(_only(value, BOOL)).reshape(-1, 32)


@_define
def _w_any_lane(run, value):
    return _vote(run, "any_lane", value).any(1).repeat(32)


@_define
def _w_all_lanes(run, value):
    return _vote(run, "all_lanes", value).all(1).repeat(32)
