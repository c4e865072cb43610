"""Run a model's program with the reference's ops: the bits every backend must return."""

import numpy as np

import pnrt


def run_reference(model, tokens, activations: str, kv: str) -> np.ndarray:
    """Logits [T, V] of a model's file, all tokens at once, from an empty state."""
    said = model.rotation.source.partition("--rotation ")[2] or None
    options = {"backend": "reference", "activations": activations, "kv": kv, "rotation": said}
    with pnrt.load(model.file.path, context=model.context, **options) as judge:
        return judge.logits(tokens)
