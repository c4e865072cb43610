"""The tiny models of tests/golden/models and llama.cpp's logits of them.

PNRT_GOLDEN_MODELS names a folder with more of them, at any depth, for a run on all there are.
"""

import functools
import os
from pathlib import Path

import numpy as np

import pnrt
from pnrt import backend
from pnrt.container.gguf import open_gguf

HERE = Path(__file__).parent / "golden" / "models"
PATHS = {p.stem: p for p in sorted(HERE.glob("*.gguf"))}
if "PNRT_GOLDEN_MODELS" in os.environ:
    more = sorted(Path(os.environ["PNRT_GOLDEN_MODELS"]).rglob("*.gguf"))
    PATHS |= {p.stem: p for p in more if p.with_suffix(".ref.npz").exists()}


def _runs(path: Path) -> bool:
    """Whether the CPU has products for every format of a file."""
    have = {form for op, form, _ in backend.open("cpu").table() if op == "matmul"}
    with open_gguf(path) as file:
        formats = {t.format and t.format.name for t in file.tensors.values()}
    return formats <= have


# every architecture, and what is stored rotated: for comparisons with the reference's bits
BITS = (
    "llama_m.pn",
    "llama_m.q4_0",
    "qwen2_s.f32",
    "qwen3_s.f32",
    "qwen35_s_mtp.f32",
    "qwen35_m.pnrots",
)
MODELS = tuple(sorted(name for name, path in PATHS.items() if _runs(path)))


def path_of(name: str) -> Path:
    """The file of one model."""
    return PATHS[name]


@functools.cache
def golden(name: str, mode: str) -> dict[str, np.ndarray]:
    """Arrays of `<name>.<mode>.npz`; empty where that was not recorded."""
    path = path_of(name).with_suffix(f".{mode}.npz")
    return dict(np.load(path)) if path.exists() else {}


def load_golden(name: str, **options) -> pnrt.Model:
    """Load a tiny model; the unrotated PN ones predate the rotation keys."""
    return pnrt.load(path_of(name), rotation="none" if name.endswith(".pn") else None, **options)
