"""The judge of whole models: a forward pass in float64, written from the formulas and nothing else.

It reads keys and tensors of an open GGUF file by itself, so it shares only the container, weight
decoders and the rotation's declaration with the program under test. A sequence is computed whole,
from an empty state; prompt and generated tokens are the same thing here. `trace` is for bisecting:

    trace = {}
    logits = Forward(file).run(tokens, trace)   # trace["blk.0.q"] [T, H, E], ...

Names in the trace, per block: attn_norm, q, k, v (as attention sees them), attn (heads, before the
output projection), attn_out, attn_residual, ffn_norm, ffn_gate, ffn_up, ffn_swiglu, ffn_out, out.
Gated attention adds gate; recurrent blocks have qkv, conv, z, beta, decay, delta and state instead
of q to attn. Around the blocks: embd, result_norm, logits.
"""

import numpy as np

from pnrt.models.rotation import read_rotation


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0.0, x)


def hadamard(block):
    """[block, block] float64 Sylvester matrix, orthonormal."""
    i = np.arange(block)
    bits = np.bitwise_and.outer(i, i)
    parity = np.array([bin(v).count("1") & 1 for v in range(block)])[bits]
    return (1.0 - 2.0 * parity) / np.sqrt(block)


class Forward:
    """One model in float64; weights are decoded at first use and kept.

    Args:
        file: open GGUFFile. rotation: what the user would say with --rotation.
    """

    def __init__(self, file, rotation=None):
        self.file = file
        self.rotation = read_rotation(file, rotation)
        self.arch = file.metadata["general.architecture"]
        self.blocks = self.key("block_count") - self.key("nextn_predict_layers", 0)
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.width = self.key("embedding_length")
        self._weights = {}
        self._trace = {}

    def key(self, name, default=None):
        return self.file.metadata.get(f"{self.arch}.{name}", default)

    def per_layer(self, name, il, default=None):
        value = self.key(name, default)
        return value if isinstance(value, int) else value[il]

    def weight(self, name, default=None):
        """[N, K] or [K] float64, un-rotated; `default` when the file has no such tensor."""
        if name not in self.file.tensors:
            return default
        if name not in self._weights:
            info = self.file.tensors[name]
            w = info.format.decode(self.file.rows(name)).astype(np.float64).reshape(info.shape)
            block = self.rotation.block_of(name, info.columns)
            if block:
                w = (w.reshape(len(w), -1, block) @ hadamard(block)).reshape(w.shape)
                w = w * self.rotation.signs.get(info.columns, 1.0)
            self._weights[name] = w
        return self._weights[name]

    def linear(self, name, x):
        """W x + b, with b where the file has one."""
        return x @ self.weight(name + ".weight").T + self.weight(name + ".bias", 0.0)

    def norm(self, name, x):
        return self.unit(x) * self.weight(name + ".weight")

    def unit(self, x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)

    def keep(self, name, value):
        self._trace[name] = value
        return value

    def run(self, tokens, trace=None):
        """Logits of every position, from an empty state.

        Args:
            tokens: [T] integers. trace: dict or None – filled with name -> float64 array [T, ...].
        Returns:
            [T, V] float64.
        """
        self._trace = {} if trace is None else trace
        x = self.keep("embd", self.weight("token_embd.weight")[np.asarray(tokens)])
        ffn_norm = "post_attention_norm" if self.arch == "qwen35" else "ffn_norm"
        for il in range(self.blocks):
            b = f"blk.{il}."
            h = self.keep(b + "attn_norm", self.norm(b + "attn_norm", x))
            a = self.delta(il, b, h) if self.is_recurrent(il) else self.attention(il, b, h)
            x = self.keep(b + "attn_residual", x + self.keep(b + "attn_out", a))
            h = self.keep(b + "ffn_norm", self.norm(b + ffn_norm, x))
            gate = self.keep(b + "ffn_gate", self.linear(b + "ffn_gate", h))
            up = self.keep(b + "ffn_up", self.linear(b + "ffn_up", h))
            h = self.keep(b + "ffn_swiglu", silu(gate) * up)
            x = self.keep(b + "out", x + self.keep(b + "ffn_out", self.linear(b + "ffn_down", h)))
        x = self.keep("result_norm", self.norm("output_norm", x))
        tied = "output.weight" not in self.file.tensors
        return self.keep("logits", self.linear("token_embd" if tied else "output", x))

    def is_recurrent(self, il):
        if self.arch != "qwen35":
            return False
        flags = self.key("attention.recurrent_layers")
        return flags[il] if flags else (il + 1) % self.key("full_attention_interval", 4) != 0

    def attention(self, il, b, h):
        """[T, D]: causal attention of block il, gated for qwen35."""
        T = len(h)
        H = self.per_layer("attention.head_count", il)
        G = self.per_layer("attention.head_count_kv", il, H)
        E = self.key("attention.key_length", self.width // H)
        q = self.linear(b + "attn_q", h).reshape(T, H, -1)
        q, gate = q[..., :E], q[..., E:]
        k = self.linear(b + "attn_k", h).reshape(T, G, E)
        v = self.keep(b + "v", self.linear(b + "attn_v", h).reshape(T, G, E))
        if self.arch in ("qwen3", "qwen35"):
            q = self.norm(b + "attn_q_norm", q)
            k = self.norm(b + "attn_k_norm", k)
        q = self.keep(b + "q", self.rope(q))
        k = self.keep(b + "k", self.rope(k))
        k, v = (np.repeat(t, H // G, axis=1) for t in (k, v))
        scores = np.einsum("thi,shi->hts", q, k) / np.sqrt(E)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        a = np.einsum("hts,shi->thi", p, v)
        if gate.size:
            a = a * sigmoid(self.keep(b + "gate", gate))
        return self.linear(b + "attn_output", self.keep(b + "attn", a.reshape(T, H * E)))

    def rope(self, x):
        """Rotate the first n components of each head of x [T, H, E] by its position's angles."""
        T, _, E = x.shape
        n = self.key("rope.dimension_count", E)
        angle, size = self.angles(n)
        z = size * np.exp(1j * np.multiply.outer(np.arange(T), angle))[:, None, :]
        x = x.copy()
        even = slice(0, n, 2) if self.arch == "llama" else slice(0, n // 2)
        odd = slice(1, n, 2) if self.arch == "llama" else slice(n // 2, n)
        turned = (x[..., even] + 1j * x[..., odd]) * z
        x[..., even], x[..., odd] = turned.real, turned.imag
        return x

    def angles(self, n):
        """[n/2] radians per position of each pair, and the factor on cos and sin."""
        base = self.key("rope.freq_base", 10000.0)
        kind = self.key("rope.scaling.type", "linear")
        s = self.key("rope.scaling.factor", 0.0) or 1.0
        pair = np.arange(n // 2)
        angle = base ** (-2.0 * pair / n) / self.weight("rope_freqs.weight", 1.0)
        size = self.key("rope.scaling.attn_factor", 1.0)
        if kind == "linear":
            return angle / s, size
        if kind == "none":
            return angle, size
        context = self.key("rope.scaling.original_context_length", self.key("context_length"))
        # the pair whose wave makes 32 turns, and 1 turn, in the trained context
        fast, slow = (
            n * np.log(context / (2 * np.pi * turns)) / (2 * np.log(base)) for turns in (32, 1)
        )
        fast, slow = max(0, np.floor(fast)), min(n - 1, np.ceil(slow))
        stretched = np.clip((pair - fast) / max(0.001, slow - fast), 0, 1)
        angle = angle * (stretched / s + 1 - stretched)
        return angle, size * (1 + 0.1 * np.log(s))

    def delta(self, il, b, h):
        """[T, D]: the gated delta rule, one token after the other."""
        T = len(h)
        d, gk = self.key("ssm.state_size"), self.key("ssm.group_count")
        gv, taps = self.key("ssm.time_step_rank"), self.key("ssm.conv_kernel")
        m = self.keep(b + "qkv", self.linear(b + "attn_qkv", h))
        z = self.keep(b + "z", self.linear(b + "attn_gate", h)).reshape(T, gv, d)
        beta = self.keep(b + "beta", sigmoid(self.linear(b + "ssm_beta", h)))
        rate = softplus(self.linear(b + "ssm_alpha", h) + self.weight(b + "ssm_dt.bias"))
        decay = self.keep(b + "decay", self.weight(b + "ssm_a") * rate)
        padded = np.concatenate([np.zeros((taps - 1, m.shape[1])), m])
        windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=0)
        y = silu(np.einsum("tcj,cj->tc", windows, self.weight(b + "ssm_conv1d.weight")))
        q, k, v = np.split(self.keep(b + "conv", y), [gk * d, 2 * gk * d], axis=1)
        q, k = (t.reshape(T, gk, d) for t in (q, k))
        q, k = (t / np.sqrt((t * t).sum(axis=-1, keepdims=True) + self.eps) for t in (q, k))
        # value head h reads key head h mod gk
        q, k = (np.tile(t, (1, gv // gk, 1)) for t in (q / np.sqrt(d), k))
        v = v.reshape(T, gv, d)
        S = np.zeros((gv, d, d))
        o = np.empty((T, gv, d))
        for t in range(T):
            S = S * np.exp(decay[t])[:, None, None]
            u = beta[t][:, None] * (v[t] - np.einsum("hij,hj->hi", S, k[t]))
            S = S + u[:, :, None] * k[t][:, None, :]
            o[t] = np.einsum("hij,hj->hi", S, q[t])
        self.keep(b + "state", S)
        o = self.norm(b + "ssm_norm", self.keep(b + "delta", o)) * silu(z)
        return self.linear(b + "ssm_out", o.reshape(T, gv * d))


def golden_difference(file, golden, jobs, rotation=None):
    """Largest |difference| to stored logits, and the greedy tokens that differ.

    Args:
        golden: mapping of a ref.npz. jobs: names such as "p7".
    Returns:
        (float, int).
    """
    model = Forward(file, rotation)
    worst, wrong = 0.0, 0
    for job in jobs:
        prompt, generated = golden[f"{job}.tokens"], golden[f"{job}.dec_tokens"]
        logits = model.run(np.concatenate([prompt, generated]))
        stored = np.concatenate([golden[f"{job}.logits"], golden[f"{job}.dec_logits"]])
        worst = max(worst, np.abs(logits - stored).max())
        greedy = logits[len(prompt) - 1 : -1].argmax(axis=1)
        wrong += int((greedy != generated).sum())
    return worst, wrong
