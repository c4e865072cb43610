"""Rotary tables: cos and sin per position and pair, in float64, rounded once to float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pnrt.errors import ModelError
from pnrt.models.config import Config


def rope_tables(
    config: Config, positions: Any, rope_freqs: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tabulate the rotation of every pair at every position.

    Args:
        config: Config – rope_dim, rope_base and rope_scaling are used.
        positions: [P] integers – absolute 0-based positions.
        rope_freqs: [rope_dim/2] float or None – divisors of the angles (tensor rope_freqs.weight).
    Returns:
        cos, sin: [P, rope_dim/2] float32, each already multiplied by the attention factor.
    Raises:
        ModelError: rope_freqs of another length, or not finite and positive.
    """
    theta, magnitude = _frequencies(config)
    if rope_freqs is not None:
        theta = theta / _divisors(rope_freqs, theta.size)
    angles = np.multiply.outer(np.asarray(positions, np.float64), theta)
    cos = (magnitude * np.cos(angles)).astype(np.float32)
    sin = (magnitude * np.sin(angles)).astype(np.float32)
    return cos, sin


def _frequencies(config: Config) -> tuple[np.ndarray, float]:
    """[rope_dim/2] float64 radians per position, and the factor of cos and sin."""
    pair = np.arange(config.rope_dim // 2, dtype=np.float64)
    theta = config.rope_base ** (-2.0 * pair / config.rope_dim)
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return theta, scaling.attn_factor
    if scaling.kind == "linear":
        return theta / scaling.factor, scaling.attn_factor
    if scaling.kind != "yarn":
        raise ModelError(
            f"rope scaling: found kind {scaling.kind!r}; pnrt has none, linear and yarn. "
            "This kind of context extension is not supported."
        )

    # yarn: pairs that turn often in the trained context keep their speed, slow ones are stretched
    def pair_turning(turns: float) -> float:
        """The (fractional) pair that makes this many turns within the trained context."""
        span = scaling.original_context / (2.0 * math.pi * turns)
        return config.rope_dim * math.log(span) / (2.0 * math.log(config.rope_base))

    low = max(0.0, math.floor(pair_turning(32.0)))
    high = min(config.rope_dim - 1.0, math.ceil(pair_turning(1.0)))
    ramp = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    theta = theta * (ramp / scaling.factor + (1.0 - ramp))
    return theta, (1.0 + 0.1 * math.log(scaling.factor)) * scaling.attn_factor


def _divisors(rope_freqs: np.ndarray, pairs: int) -> np.ndarray:
    """The tensor rope_freqs.weight as float64, once it is known to be usable."""
    divisors = np.asarray(rope_freqs, np.float64).reshape(-1)
    if divisors.size != pairs:
        raise ModelError(
            f"rope_freqs.weight: found {divisors.size} values; needed {pairs}, one per rotary "
            "pair. The file's rope keys and this tensor contradict each other: convert it again."
        )
    bad = np.flatnonzero(~(np.isfinite(divisors) & (divisors > 0)))
    if bad.size:
        raise ModelError(
            f"rope_freqs.weight: found {divisors[bad[0]]} at element {bad[0]}; needed finite "
            "values above zero. The file is damaged: convert or download it again."
        )
    return divisors
