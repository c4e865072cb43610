"""The recurrent blocks' convolution and gated delta rule (NUMERICS.md 4): token after token.

The convolution is split by channels, the delta rule by (head, columns of values): a thread runs all
tokens of its share, with its part of the state in the cache, so a prompt and single tokens do the
same. A SIMD lane is a channel or a column; nothing is reduced across lanes.
"""

from __future__ import annotations

from pnrt.cpu import simd
from pnrt.cpu.elementwise import functions, share
from pnrt.cpu.simd import (
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
from pnrt.jit import cpu_features, inline, kernel

# vectors of columns that run side by side: enough chains to hide the latency of an fma
CHAINS = 8 if "avx512f" in cpu_features() else 4
_silu, _exp, _softplus = functions.silu, functions.exp, functions.softplus


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
    """step(s, row, n, k, q, g, beta, v): some columns of one token; their output."""

    @inline
    def step(s, row, n, k, q, g, beta, v):
        decay = set_f32(g)
        u = zeros()
        for i in range(n):
            u = fma(mul(load(s + i * row), decay), splat_f32(k + i * 4), u)
        e = mul(sub(v, u), set_f32(beta))
        o = zeros()
        for i in range(n):
            new = fma(e, splat_f32(k + i * 4), mul(load(s + i * row), decay))
            store(s + i * row, new)
            o = fma(new, splat_f32(q + i * 4), o)
        return o

    return step


_tile = simd.tiles(CHAINS)
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
    [heads, n, row] float32 (keys, then columns of values), row (a multiple of 16), out, out width,
    n, heads, key_heads, control.
    """
    q, wq, k, wk = read_i64(a), read_i64(a + 8), read_i64(a + 16), read_i64(a + 24)
    v, wv, offset = read_i64(a + 32), read_i64(a + 40), read_i64(a + 48)
    g, wg, beta, wb = read_i64(a + 56), read_i64(a + 64), read_i64(a + 72), read_i64(a + 80)
    state, row, out, wo = read_i64(a + 88), read_i64(a + 96), read_i64(a + 104), read_i64(a + 112)
    n, heads, key_heads = read_i64(a + 120), read_i64(a + 128), read_i64(a + 136)
    tokens = read_i64(read_i64(a + 144))
    decays, writes = f32_at(g), f32_at(beta)
    groups = (row // 16 + CHAINS - 1) // CHAINS
    first, last = share(heads * groups, thread, threads)
    for item in range(first, last):
        h, start = item // groups, item % groups * CHAINS * 16
        end = min(n, start + CHAINS * 16)
        s = state + h * n * row * 4
        for t in range(tokens):
            qt, kt = q + (t * wq + h % key_heads * n) * 4, k + (t * wk + h % key_heads * n) * 4
            vt, ot = v + (t * wv + offset + h * n) * 4, out + (t * wo + h * n) * 4
            decay, write = decays[t * wg + h], writes[t * wb + h]
            if end - start == CHAINS * 16:
                p, value = s + start * 4, _load(vt + start * 4)
                _store(ot + start * 4, _wide(p, row * 4, n, kt, qt, decay, write, value))
            else:
                for j in range(start, end, 16):
                    p, value = s + j * 4, load_first(vt + j * 4, n - j)
                    o = _narrow(p, row * 4, n, kt, qt, decay, write, value)
                    store_first(ot + j * 4, n - j, o)
