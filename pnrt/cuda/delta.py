"""The recurrent blocks' convolution and gated delta rule (NUMERICS.md 4): token after token.

A thread is a channel or a column of a head's state and runs all tokens, so a prompt and single
tokens do the same. The state of a head is [n keys][n columns]: neighbours read neighbours.
"""

from __future__ import annotations

from pnrt.cuda.control import index, tokens
from pnrt.cuda.elementary import exp, silu, softplus
from pnrt.cuda.kernel import Kernel, device, kernel, registers, unroll
from pnrt.cuda.lanes import at, block_y, f32, fetch_f32, fma, load_f32, store_f32, u32, u64

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


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [conv_silu_kernel, decay_kernel, delta_kernel]
