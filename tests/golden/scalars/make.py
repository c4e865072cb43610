"""Makes tables.npz: exp and log1p of float32 arguments by mpmath, see README.md."""

from pathlib import Path

import mpmath
import numpy as np


def arguments() -> np.ndarray:
    """About 20000 float32: every exponent and sign, the interesting ranges, the edges."""
    rng = np.random.default_rng(1)
    exponent = np.repeat(np.arange(255, dtype=np.uint32), 10)
    mantissa = rng.integers(0, 1 << 23, exponent.size, dtype=np.uint32)
    mantissa[0::10], mantissa[1::10], mantissa[2::10] = 0, 1, 0x7FFFFF
    bits = exponent << np.uint32(23) | mantissa
    every = np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32)
    edges = [
        np.inf,
        -np.inf,
        np.nan,
        88.72284,
        88.72283,
        -87.33655,
        -103.97208,
        -103.97207,
        20,
        0.5,
    ]
    around_minus_one = -1 + np.ldexp(1 + rng.random(1500), -rng.integers(1, 25, 1500))
    values = [every, edges, rng.uniform(-105, 89, 6000), rng.uniform(-1, 1, 4000)]
    values += [around_minus_one, rng.uniform(-1, 50, 3000)]
    return np.unique(np.concatenate([np.asarray(v, np.float32) for v in values]))


def exp(x: float) -> float:
    # far outside the range of float64 too, where mpmath would need forever
    return float(mpmath.exp(min(max(x, -1000), 1000))) if x == x else x


def log1p(x: float) -> float:
    if not x >= -1:
        return float("nan")
    return float(mpmath.log1p(x)) if x > -1 else float("-inf")


def main() -> None:
    mpmath.mp.prec = 200
    x = np.append(arguments(), np.float32(-0.0))
    tables = {
        "exp": [exp(float(v)) for v in x],
        "log1p": [log1p(float(v)) for v in x],
    }
    target = Path(__file__).with_name("tables.npz")
    np.savez_compressed(target, x=x, **{k: np.array(v) for k, v in tables.items()})


if __name__ == "__main__":
    main()
