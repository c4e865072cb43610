"""The tiny models of tests/golden/models and llama.cpp's logits of them."""

import functools
from pathlib import Path

import numpy as np

import pnrt

HERE = Path(__file__).parent / "golden" / "models"
MODELS = tuple(
    sorted(p.stem for p in HERE.glob("*.gguf") if p.stem.startswith(("llama", "qwen2", "qwen3_")))
)


def path_of(name: str) -> Path:
    """The file of one model."""
    return HERE / f"{name}.gguf"


@functools.cache
def golden(name: str, mode: str) -> dict[str, np.ndarray]:
    """Arrays of `<name>.<mode>.npz`; empty where that was not recorded."""
    path = HERE / f"{name}.{mode}.npz"
    return dict(np.load(path)) if path.exists() else {}


def load_golden(name: str, **options) -> pnrt.Model:
    """Load a tiny model; the unrotated PN ones predate the rotation keys."""
    return pnrt.load(path_of(name), rotation="none" if name.endswith(".pn") else None, **options)
