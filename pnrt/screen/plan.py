"""Screens about models on paper: synth."""

from __future__ import annotations

from typing import Any

from pnrt.screen.parts import Renderable, facts, size


def synth_screen(result: dict[str, Any]) -> Renderable:
    """What `pnrt synth` wrote."""
    speed = result["bytes"] / max(result["seconds"], 1e-9)
    return facts(
        [
            ("wrote", result["file"]),
            ("model", f"{result['title']}, {result['layers']} layers, random weights"),
            ("size", f"{size(result['bytes'])}, {result['weights'] / 1e9:.2f} billion weights"),
            ("time", f"{result['seconds']:.1f} s, {size(speed)}/s"),
        ]
    )
