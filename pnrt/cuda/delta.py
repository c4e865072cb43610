"""The recurrent blocks' convolution and gated delta rule (NUMERICS.md 4): token after token.

A thread is a channel or a column of a head's state and runs all tokens, so a prompt and single
tokens do the same. The state of a head is [n keys][n columns]: neighbours read neighbours. Heads of
the usual sizes have a kernel of their own that keeps a column in registers.
"""

from __future__ import annotations

import functools

from pnrt.cuda.control import index, tokens
from pnrt.cuda.elementary import exp, silu, softplus
from pnrt.cuda.kernel import Kernel, device, kernel, registers, unroll
from pnrt.cuda.lanes import (
    at,
    bits_to_float,
    block_y,
    f32,
    fetch_f32,
    fma,
    load_f32,
    shared,
    shared_load_u32x4,
    shared_store_f32,
    store_f32,
    syncthreads,
    thread,
    u32,
    u64,
)

# loads of a thread that are under way together
AHEAD = 8


@device
def windowed(x, x_width, state, n, before, row, c):
    """Channel c of input `row`, counted from the oldest of the state."""
    value = f32(0.0)
    if row < before:
        value = load_f32(at(state, row * n + c, 4))
    else:
        value = load_f32(at(x, (row - before) * x_width + c, 4))
    return value


@kernel(name="conv_silu")
def conv_silu_kernel(x: u64, x_width: u32, w: u64, state: u64, out: u64, out_width: u32, n: u32,
                     taps: u32, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.delta.conv_silu_kernel; grid: n threads."""
    c, before, count = index(), taps - 1, tokens(control)
    if c < n:
        for t in range(u32(0), count):
            y = f32(0.0)
            for j in range(u32(0), taps):
                value = windowed(x, x_width, state, n, before, t + j, c)
                y = fma(fetch_f32(at(w, j * n + c, 4)), value, y)
            store_f32(at(out, t * out_width + c, 4), silu(y))
        # ascending rows: a row is read before the one that overwrites it is needed
        for j in range(u32(0), before):
            value = windowed(x, x_width, state, n, before, count + j, c)
            store_f32(at(state, j * n + c, 4), value)


@kernel(name="decay")
def decay_kernel(x: u64, x_width: u32, a: u64, dt: u64, out: u64, out_width: u32, n: u32,
                 control: u64):  # fmt: skip
    """Twin of pnrt.cpu.delta.decay_kernel; grid: n threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        v = load_f32(at(x, t * x_width + i, 4)) + fetch_f32(at(dt, i, 4))
        value = exp(fetch_f32(at(a, i, 4)) * softplus(v))
        store_f32(at(out, t * out_width + i, 4), value)


@device
def recall(s, n, k, decay):
    """sum over keys of the decayed state times k: an fma chain, loads some steps ahead of it."""
    u = f32(0.0)
    w = registers()
    whole = n // AHEAD * AHEAD
    for i in range(u32(0), whole, AHEAD):
        for j in unroll(AHEAD):
            w[j] = load_f32(at(s, (i + j) * n, 4))
        for j in unroll(AHEAD):
            u = fma(w[j] * decay, fetch_f32(at(k, i + j, 4)), u)
    for i in range(whole, n):
        u = fma(load_f32(at(s, i * n, 4)) * decay, fetch_f32(at(k, i, 4)), u)
    return u


@device
def renew(p, k, q, e, decay, old, o):
    """One key of a column: the new state is stored, its part of the output added."""
    new = fma(e, fetch_f32(k), old * decay)
    store_f32(p, new)
    return fma(new, fetch_f32(q), o)


@kernel(name="delta", registers=96)
def delta_kernel(q: u64, q_width: u32, k: u64, k_width: u32, v: u64, v_width: u32, first: u32,
                 g: u64, g_width: u32, beta: u64, beta_width: u32, state: u64, out: u64,
                 out_width: u32, n: u32, heads: u32, key_heads: u32, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.delta.delta_kernel; grid: n * heads threads; state [heads, n, n]."""
    i = index()
    w = registers()
    if i < n * heads:
        h, c = i // n, i % n
        s = at(state, h * n * n + c, 4)
        whole = n // AHEAD * AHEAD
        for t in range(u32(0), tokens(control)):
            kt = at(k, t * k_width + h % key_heads * n, 4)
            qt = at(q, t * q_width + h % key_heads * n, 4)
            decay = fetch_f32(at(g, t * g_width + h, 4))
            value = fetch_f32(at(v, t * v_width + first + i, 4))
            u = recall(s, n, kt, decay)
            e, o = (value - u) * fetch_f32(at(beta, t * beta_width + h, 4)), f32(0.0)
            for r in range(u32(0), whole, AHEAD):
                for j in unroll(AHEAD):
                    w[j] = load_f32(at(s, (r + j) * n, 4))
                for j in unroll(AHEAD):
                    p = at(s, (r + j) * n, 4)
                    o = renew(p, at(kt, r + j, 4), at(qt, r + j, 4), e, decay, w[j], o)
            for r in range(whole, n):
                p = at(s, r * n, 4)
                o = renew(p, at(kt, r, 4), at(qt, r, 4), e, decay, load_f32(p), o)
            store_f32(at(out, t * out_width + i, 4), o)


@functools.cache
def held_kernel(n: int) -> Kernel:
    """delta_kernel for one n that divides 128: a column stays in registers over all tokens.

    Grid: n * heads threads. Keys and queries of a token go through shared memory.
    """

    @device
    def keys(part, r, x):
        a, b, c, d = shared_load_u32x4(part + 16 * r)
        x[0], x[1] = bits_to_float(a), bits_to_float(b)
        x[2], x[3] = bits_to_float(c), bits_to_float(d)

    @kernel(name=f"delta_{n}", registers=168)
    def delta(q: u64, q_width: u32, k: u64, k_width: u32, v: u64, v_width: u32, first: u32,
              g: u64, g_width: u32, beta: u64, beta_width: u32, state: u64, out: u64,
              out_width: u32, size: u32, heads: u32, key_heads: u32, control: u64):  # fmt: skip
        i = min(index(), n * heads - 1)
        w = x = y = registers()
        h, c, base = i // n, i % n, shared(1024)
        part = base + thread() // n * n * 4
        s = at(state, h * n * n + c, 4)
        for r in unroll(n):
            w[r] = load_f32(at(s, r * n, 4))
        for t in range(u32(0), tokens(control)):
            place = h % key_heads * n + c
            shared_store_f32(base + thread() * 4, fetch_f32(at(k, t * k_width + place, 4)))
            shared_store_f32(base + 512 + thread() * 4, fetch_f32(at(q, t * q_width + place, 4)))
            decay = fetch_f32(at(g, t * g_width + h, 4))
            value = fetch_f32(at(v, t * v_width + first + i, 4))
            u, o = f32(0.0), f32(0.0)
            syncthreads()
            for r in unroll(n // 4):
                keys(part, r, x)
                for j in unroll(4):
                    w[4 * r + j] = w[4 * r + j] * decay
                    u = fma(w[4 * r + j], x[j], u)
            e = (value - u) * fetch_f32(at(beta, t * beta_width + h, 4))
            # or the keys would be held in registers from above
            syncthreads()
            for r in unroll(n // 4):
                keys(part, r, x)
                keys(part + 512, r, y)
                for j in unroll(4):
                    w[4 * r + j] = fma(e, x[j], w[4 * r + j])
                    o = fma(w[4 * r + j], y[j], o)
            syncthreads()
            if index() == i:
                store_f32(at(out, t * out_width + i, 4), o)
        if index() == i:
            for r in unroll(n):
                store_f32(at(s, r * n, 4), w[r])

    return delta


def kernel_for(n: int) -> Kernel:
    """The kernel for heads of n keys."""
    return held_kernel(n) if n >= 4 and 128 % n == 0 else delta_kernel


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [conv_silu_kernel, decay_kernel, delta_kernel, held_kernel(128)]
