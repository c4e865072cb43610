"""From a GGUF file's keys to the numbers a program is built from (one frozen Config).

Sizes carry the names of the README's glossary; a per-layer value is a tuple with one entry for
each trunk layer. Nothing here trusts a number of the file: each is read with its allowed range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from pnrt.errors import ModelError

if TYPE_CHECKING:
    from pnrt.container.gguf import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen35")
SCALINGS = ("none", "linear", "yarn")
# a corrupt count must not become a loop of billions; the deepest public models have a few hundred
MAX_BLOCKS = 4096

# keys other architectures have, with the values that change nothing: no step computes what they ask
_NEUTRAL = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}

_REQUIRED: Any = object()
_AGAIN = "The file is incomplete or damaged: convert or download it again."


@dataclass(frozen=True)
class RopeScaling:
    """How rotary angles are stretched beyond the trained context.

    kind: "none", "linear" or "yarn"; factor: s, positions count 1/s as much (1.0 for none);
    original_context: the trained context (tokens) yarn starts from; attn_factor: multiplies
    cos and sin.
    """

    kind: str
    factor: float
    original_context: int
    attn_factor: float


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of qwen35's recurrent blocks (gated delta rule).

    conv_kernel: taps; state_size: width of every key and value head; key_heads; value_heads:
    a multiple of key_heads; value head h reads key head h mod key_heads.
    """

    conv_kernel: int
    state_size: int
    key_heads: int
    value_heads: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q | k | v."""
        return (2 * self.key_heads + self.value_heads) * self.state_size

    @property
    def inner(self) -> int:
        """Width of the block's output before its last projection."""
        return self.value_heads * self.state_size


@dataclass(frozen=True)
class Config:
    """What the metadata says about one model.

    n_layers counts the trunk only; the file holds n_layers + mtp_layers blocks. d_ff, n_heads,
    n_kv_heads and recurrent have n_layers entries. neox: rotary pairs are (j, j + rope_dim/2)
    instead of (2j, 2j + 1). delta and rope_sections are set for qwen35 only.
    """

    architecture: str
    n_layers: int
    mtp_layers: int
    context_length: int
    vocab_size: int
    d_model: int
    d_ff: tuple[int, ...]
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    head_dim: int
    eps: float
    rope_dim: int
    rope_base: float
    rope_scaling: RopeScaling
    neox: bool
    recurrent: tuple[bool, ...]
    rope_sections: tuple[int, ...] | None = None
    delta: DeltaConfig | None = None


class _Keys:
    """Typed reads of one file's metadata; every refusal names file, key, value and range."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file = file
        self.prefix = architecture + "."

    def has(self, key: str) -> bool:
        return self.value(key) is not None

    def value(self, key: str) -> Any:
        return self.file.metadata.get(self.prefix + key)

    def fail(self, key: str, found: Any, needed: str, advice: str = _AGAIN) -> NoReturn:
        raise ModelError(
            f"{self.file.path}: key {self.prefix}{key}: found {found}; needed {needed}. {advice}"
        )

    def _get(self, key: str, default: Any, needed: str) -> Any:
        value = self.file.metadata.get(self.prefix + key)
        if value is None:
            if default is _REQUIRED:
                self.fail(key, "nothing", needed)
            return default
        return value

    def integer(self, key: str, default: Any = _REQUIRED, low: int = 1) -> int:
        needed = f"an integer of at least {low}"
        value = self._get(key, default, needed)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            self.fail(key, _show(value), needed)
        return value

    def number(self, key: str, default: Any = _REQUIRED, zero: bool = False) -> float:
        needed = "a finite number, " + ("not negative" if zero else "above zero")
        value = self._get(key, default, needed)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, _show(value), needed)
        value = float(value)
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            self.fail(key, value, needed)
        return value

    def text(self, key: str, default: Any, allowed: Sequence[str], advice: str) -> str:
        value = self._get(key, default, "a string")
        if value not in allowed:
            self.fail(key, _show(value), "one of " + ", ".join(allowed), advice)
        return value

    def array(self, key: str) -> list[Any]:
        value = self._get(key, _REQUIRED, "an array")
        if isinstance(value, str) or not hasattr(value, "__len__"):
            self.fail(key, _show(value), "an array")
        return list(value)

    def per_layer(self, key: str, blocks: int, default: Any = _REQUIRED, low: int = 1):
        """Scalar or array of `blocks` integers -> tuple of `blocks` ints."""
        needed = f"an integer of at least {low}, or an array of {blocks} such integers"
        value = self._get(key, default, needed)
        if isinstance(value, int):
            return (self.integer(key, value, low),) * blocks
        if isinstance(value, str | float) or not hasattr(value, "__len__"):
            self.fail(key, _show(value), needed)
        if len(value) != blocks:
            self.fail(key, f"an array of {len(value)}", needed)
        values = tuple(value)
        for il, entry in enumerate(values):
            if not isinstance(entry, int) or isinstance(entry, bool) or entry < low:
                self.fail(key, f"{_show(entry)} for block {il}", needed)
        return values


def _show(value: Any) -> str:
    """A value from the file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_config(file: GGUFFile) -> Config:
    """Read the configuration of a language model.

    Args:
        file: GGUFFile – an open file; token_embd's shape counts when it has no vocabulary.
    Returns:
        The Config.
    Raises:
        ModelError: unknown architecture, a required key absent, a value of the wrong kind or range,
            or a combination these architectures do not have.
    """
    _refuse_parts(file)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        found = "no" if architecture is None else _show(architecture)
        raise ModelError(
            f"{file.path}: key general.architecture: found {found} architecture; pnrt knows "
            f"{', '.join(ARCHITECTURES)}. Use a model of one of these."
        )
    keys = _Keys(file, architecture)
    for key, neutral in _NEUTRAL.items():
        if keys.has(key) and (found := keys.value(key)) not in neutral:
            advice = "pnrt does not compute what this key asks for: use a model without it."
            keys.fail(key, _show(found), " or ".join(map(str, neutral)) + ", or no key", advice)

    blocks = keys.integer("block_count")
    if blocks > MAX_BLOCKS:
        keys.fail("block_count", blocks, f"at most {MAX_BLOCKS}")
    mtp = keys.integer("nextn_predict_layers", 0, low=0)
    if mtp >= blocks:
        keys.fail("nextn_predict_layers", mtp, f"less than the {blocks} of block_count")
    n_layers = blocks - mtp
    recurrent = _recurrent(keys, blocks)[:n_layers] if architecture == "qwen35" else ()
    recurrent = recurrent or (False,) * n_layers

    d_model = keys.integer("embedding_length")
    n_heads, n_kv_heads, head_dim = _heads(keys, blocks, d_model, recurrent)
    trained = keys.integer("context_length")
    # while a text is no longer than the window, attention through it is plain attention
    window = keys.integer("attention.sliding_window", 0, low=0) or trained
    rope_dim, sections = _rope_dim(keys, head_dim)
    return Config(
        architecture=architecture,
        n_layers=n_layers,
        mtp_layers=mtp,
        context_length=min(trained, window),
        vocab_size=_vocab_size(keys),
        d_model=d_model,
        d_ff=keys.per_layer("feed_forward_length", blocks)[:n_layers],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_dim=rope_dim,
        rope_base=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_scaling(keys, trained),
        neox=architecture != "llama",
        recurrent=recurrent,
        rope_sections=sections,
        delta=_delta(keys) if architecture == "qwen35" else None,
    )


def _refuse_parts(file: GGUFFile) -> None:
    """Refuse files that hold less than a model, or something else."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(
            f"{file.path}: key general.type: found {_show(kind)}; needed 'model'. Adapters, "
            "projectors and vocabularies do not run by themselves: use the model they belong to."
        )
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ModelError(
            f"{file.path}: key split.count: found {_show(parts)}, the file is one part of a model; "
            "needed all of it in one file. Join the parts: `llama-gguf-split --merge FIRST OUT`."
        )


def _heads(keys: _Keys, blocks: int, d_model: int, recurrent: tuple[bool, ...]):
    """(n_heads, n_kv_heads) per trunk layer, and the one head_dim of keys and values."""
    layers = len(recurrent)
    # a recurrent block has no attention heads; some writers say so with a zero
    low = 0 if any(recurrent) else 1
    n_heads = keys.per_layer("attention.head_count", blocks, low=low)[:layers]
    n_kv_heads = keys.per_layer("attention.head_count_kv", blocks, n_heads, low=low)[:layers]
    for il, (heads, kv) in enumerate(zip(n_heads, n_kv_heads, strict=True)):
        if not recurrent[il] and (kv < 1 or heads < kv or heads % kv):
            keys.fail(
                "attention.head_count_kv",
                f"{kv} with {heads} query heads in block {il}",
                "a divisor of the query heads",
            )
    # the default exists only where every layer agrees on it
    attention = {n for n, skip in zip(n_heads, recurrent, strict=True) if not skip} or {1}
    even = len(attention) == 1 and d_model % next(iter(attention)) == 0
    default = d_model // next(iter(attention)) if even else _REQUIRED
    head_dim = keys.integer("attention.key_length", default)
    value_dim = keys.integer("attention.value_length", default)
    if head_dim != value_dim:
        keys.fail("attention.value_length", value_dim, f"the key length, {head_dim}")
    if keys.prefix == "qwen2." and any(n * head_dim != d_model for n in attention):
        keys.fail("attention.key_length", head_dim, f"embedding_length {d_model} / head_count")
    return n_heads, n_kv_heads, head_dim


def _rope_dim(keys: _Keys, head_dim: int) -> tuple[int, tuple[int, ...] | None]:
    """Rotated components per head, and qwen35's sections once they are known to be harmless."""
    rope_dim = keys.integer("rope.dimension_count", head_dim, low=2)
    if keys.prefix != "qwen35.":
        if rope_dim != head_dim or rope_dim % 2:
            keys.fail(
                "rope.dimension_count", rope_dim, f"the head width {head_dim}, an even number"
            )
        return rope_dim, None
    if rope_dim > head_dim or rope_dim % 2:
        keys.fail("rope.dimension_count", rope_dim, f"an even number up to head width {head_dim}")
    key = "rope.dimension_sections"
    sections = keys.array(key)
    good = all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in sections)
    if len(sections) not in (3, 4) or not good or not any(sections):
        keys.fail(key, _show(sections), "4 integers (or 3, the last taken as 0), not all zero")
    sections = (*sections, 0)[:4]
    # a pair beyond its section turns by the fourth position, which is 0 for text: it would not turn
    for pair in range(rope_dim // 2):
        j = pair % sum(sections)
        if j >= 3 * sections[j % 3]:
            keys.fail(
                key,
                f"{list(sections)}, which leaves pair {pair} of {rope_dim // 2} unrotated in text",
                "sections that cover every pair, such as [11, 11, 10, 0] for 32 pairs",
                "pnrt runs text only and has no use for such a split; check the conversion.",
            )
    return rope_dim, sections


def _scaling(keys: _Keys, context_length: int) -> RopeScaling:
    """The rope scaling; an absent or zero factor means none at all."""
    kind = keys.text(
        "rope.scaling.type", "linear", SCALINGS, "This kind of context extension is not supported."
    )
    old = keys.number("rope.scale_linear", 0.0, zero=True)
    factor = keys.number("rope.scaling.factor", old, zero=True) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        kind, factor = "none", 1.0
    original = keys.integer("rope.scaling.original_context_length", context_length)
    base = keys.number("rope.freq_base", 10000.0)
    if kind == "yarn" and base <= 1.0:
        keys.fail("rope.freq_base", base, "more than 1 for yarn scaling")
    return RopeScaling(kind, factor, original, keys.number("rope.scaling.attn_factor", 1.0))


def _vocab_size(keys: _Keys) -> int:
    """Entries of the vocabulary: the token list, else the key, else the embedding's rows."""
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    if hasattr(tokens, "__len__") and len(tokens):
        return len(tokens)
    embedding = keys.file.tensors.get("token_embd.weight")
    return keys.integer("vocab_size", _REQUIRED if embedding is None else embedding.rows)


def _recurrent(keys: _Keys, blocks: int) -> tuple[bool, ...]:
    """Which of a qwen35 file's blocks are linear attention."""
    key = "attention.recurrent_layers"
    if not keys.has(key):
        interval = keys.integer("full_attention_interval", 4)
        return tuple((il + 1) % interval != 0 for il in range(blocks))
    flags = keys.array(key)
    if len(flags) != blocks or any(f not in (0, 1) for f in flags):
        keys.fail(key, _show(flags), f"an array of {blocks} booleans")
    return tuple(map(bool, flags))


def _delta(keys: _Keys) -> DeltaConfig:
    """The sizes of the recurrent blocks."""
    delta = DeltaConfig(
        conv_kernel=keys.integer("ssm.conv_kernel"),
        state_size=keys.integer("ssm.state_size"),
        key_heads=keys.integer("ssm.group_count"),
        value_heads=keys.integer("ssm.time_step_rank"),
    )
    if delta.value_heads % delta.key_heads:
        keys.fail(
            "ssm.time_step_rank",
            delta.value_heads,
            f"a multiple of the {delta.key_heads} key heads of ssm.group_count",
        )
    inner = keys.integer("ssm.inner_size")
    if inner != delta.inner:
        keys.fail("ssm.inner_size", inner, f"time_step_rank x state_size = {delta.inner}")
    return delta
