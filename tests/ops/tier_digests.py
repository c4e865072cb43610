"""Print a digest of every op test case's result: run under another instruction set to compare.

NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES= python -m tests.ops.tier_digests
"""

import hashlib
import json
import sys

import numpy as np

from pnrt import backend
from pnrt.machine import cpu_features

from ..golden_models import load_golden
from .cases import KINDS, products, random_rows, random_x

TOKENS = (1, 3)


def digests() -> dict[str, str]:
    """Case -> sha256 of its float32 result."""
    cpu, found = backend.open("cpu", threads=1), {}

    def note(case, array):
        found[case] = hashlib.sha256(np.ascontiguousarray(array, np.float32)).hexdigest()

    for name, n, k, mode in products():
        # the largest shapes add time on slow tiers, no code
        if n * k > 40_000 or (name not in KINDS and name not in ("f32", "f16")):
            continue
        weight = cpu.pack(name, random_rows(name, n, k), k)
        for t in TOKENS:
            note(f"matmul {name} {n}x{k} {mode} T={t}", cpu.matmul(weight, random_x(t, k), mode))
    for name in ("llama_m.pn", "qwen35_m.pnrots"):
        for kv in ("f16", "f32"):
            with load_golden(name, kv=kv, threads=1) as model:
                note(f"{name} kv={kv}", model.logits(np.arange(1, 20), chunk=7))
    return found


if __name__ == "__main__":
    json.dump({"features": sorted(cpu_features()), "digests": digests()}, sys.stdout)
