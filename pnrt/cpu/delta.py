"""The recurrent blocks' convolution and gated delta rule (NUMERICS.md 4): token after token.

The convolution is split by channels, the delta rule by (head, panel of columns): a thread runs all
tokens of its share, with its part of the state in the first-level cache, so a prompt and single
tokens do the same. A SIMD lane is a channel or a column; nothing is reduced across lanes.
"""

from __future__ import annotations

import numpy as np

from pnrt.cpu.elementwise import functions, share
from pnrt.cpu.pack import aligned
from pnrt.cpu.tiles import tiles
from pnrt.jit import inline, kernel
from pnrt.simd import (
    f32_at,
    fma,
    load_f32,
    load_first,
    mul,
    read_i64,
    set_f32,
    splat_f32,
    store_f32,
    store_first,
    sub,
    zero,
)

# vectors of columns that run side by side: enough chains to hide the latency of an fma
CHAINS = 4
# columns of a state's panel: of 128 keys it is 32 KiB, in one piece
PANEL = CHAINS * 16
_silu, _exp, _softplus = functions.silu, functions.exp, functions.softplus


def new_state(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros for a state: [taps - 1, C] as it is, [H, E, E] as [H, panels, E, PANEL] float32."""
    if len(shape) == 3:
        heads, n, columns = shape
        shape = (heads, -(-columns // PANEL), n, PANEL)
    return aligned(int(np.prod(shape)) * 4).view(np.float32).reshape(shape)


def read_state(memory: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of a state in the shape the program gives it."""
    if len(shape) == 2:
        return memory.copy()
    rows = memory.transpose(0, 2, 1, 3).reshape(*shape[:2], -1)
    return np.ascontiguousarray(rows[..., : shape[2]])


def write_state(memory: np.ndarray, state: np.ndarray) -> None:
    """Put a state in the shape the program gives it into the kernels' memory."""
    if state.ndim == 2:
        memory[...] = state
        return
    heads, panels, n, _ = memory.shape
    # columns behind the last stay zero
    rows = np.zeros((heads, n, panels * PANEL), np.float32)
    rows[..., : state.shape[2]] = state
    memory[...] = rows.reshape(heads, n, panels, PANEL).transpose(0, 2, 1, 3)


@kernel(name="conv_silu")
def conv_silu_kernel(a, thread, threads):
    """silu of a causal convolution per channel: an fma chain over the taps, oldest first.

    Arguments: x, x width, w [taps, n], state [taps - 1, n] (read, then overwritten with the last
    inputs), out, out width, n, taps, control.
    """
    x, wx, w, state = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    out, wo, n, taps = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48), read_i64(a + 56)
    tokens, before = read_i64(read_i64(a + 64)), taps - 1
    first, last = share((n + 15) // 16, thread, threads)
    for c in range(first * 16, last * 16, 16):
        for t in range(tokens):
            y = zero()
            for j in range(taps):
                row = t + j - before
                source = x + (row * wx + c) * 4 if row >= 0 else state + ((t + j) * n + c) * 4
                y = fma(load_first(w + (j * n + c) * 4, n - c), load_first(source, n - c), y)
            store_first(out + (t * wo + c) * 4, n - c, y)
        # ascending rows: a row is read before the one that overwrites it is needed
        for j in range(before):
            row = tokens + j - before
            source = x + (row * wx + c) * 4 if row >= 0 else state + ((tokens + j) * n + c) * 4
            store_first(state + (j * n + c) * 4, n - c, load_first(source, n - c))
    end = min(last * 16, n)
    for t in range(tokens):
        p = f32_at(out + t * wo * 4)
        for c in range(first * 16, end):
            p[c] = _silu(p[c])


@kernel(name="decay")
def decay_kernel(a, thread, threads):
    """out = exp(a * softplus(x + dt)). Arguments: x, x width, a [n], dt [n], out, out width, n,
    control.
    """
    x, wx, rate, dt = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    out, wo, n = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    first, last = share(read_i64(read_i64(a + 56)), thread, threads)
    r, d = f32_at(rate), f32_at(dt)
    for t in range(first, last):
        p, q = f32_at(x + t * wx * 4), f32_at(out + t * wo * 4)
        for i in range(n):
            q[i] = _exp(r[i] * _softplus(p[i] + d[i]))


def _columns(load, store, zeros):
    """step(s, n, k, q, g, beta, v): one token for some columns of a panel at s; their output."""

    @inline
    def step(s, n, k, q, g, beta, v):
        decay = set_f32(g)
        u = zeros()
        for i in range(n):
            u = fma(mul(load(s + i * PANEL * 4), decay), splat_f32(k + i * 4), u)
        e = mul(sub(v, u), set_f32(beta))
        o = zeros()
        for i in range(n):
            p = s + i * PANEL * 4
            new = fma(e, splat_f32(k + i * 4), mul(load(p), decay))
            store(p, new)
            o = fma(new, splat_f32(q + i * 4), o)
        return o

    return step


_tile = tiles(CHAINS)
_load_tile, _store_tile, _zeros = _tile.load, _tile.store, _tile.zeros
# the vectors of a tile lie side by side
_load = inline(lambda p: _load_tile(p, 64))
_store = inline(lambda p, value: _store_tile(p, 64, value))
_wide = _columns(_load, _store, _zeros)
_narrow = _columns(load_f32, store_f32, zero)


@kernel(name="delta")
def delta_kernel(a, thread, threads):
    """The gated delta rule; value head h reads key head h mod key_heads.

    Arguments: q, q width, k, k width, v, v width, first (of v), g, g width, beta, beta width, state
    [heads, panels, n, PANEL] float32, out, out width, n, heads, key_heads, control.
    """
    q, wq, k, wk = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    v, wv, offset = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    g, wg, beta, wb = read_i64(a + 56), read_i64(a + 64), read_i64(a + 72), read_i64(a + 80)
    state, out, wo = read_i64(a + 88), read_i64(a + 96), read_i64(a + 104)
    n, heads, key_heads = read_i64(a + 112), read_i64(a + 120), read_i64(a + 128)
    tokens = read_i64(read_i64(a + 136))
    decays, writes = f32_at(g), f32_at(beta)
    panels = (n + PANEL - 1) // PANEL
    first, last = share(heads * panels, thread, threads)
    for item in range(first, last):
        h, start = item // panels, item % panels * PANEL
        s = state + item * n * PANEL * 4
        for t in range(tokens):
            qt, kt = q + (t * wq + h % key_heads * n) * 4, k + (t * wk + h % key_heads * n) * 4
            vt, ot = v + (t * wv + offset + h * n) * 4, out + (t * wo + h * n) * 4
            decay, write = decays[t * wg + h], writes[t * wb + h]
            if start + PANEL <= n:
                o = _wide(s, n, kt, qt, decay, write, _load(vt + start * 4))
                _store(ot + start * 4, o)
            else:
                for j in range(start, n, 16):
                    value = load_first(vt + j * 4, n - j)
                    o = _narrow(s + (j - start) * 4, n, kt, qt, decay, write, value)
                    store_first(ot + j * 4, n - j, o)
