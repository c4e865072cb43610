"""exp, log1p and what is built on them: the formulas of scalars.py for kernels."""

from __future__ import annotations

from types import SimpleNamespace

from pnrt import scalars
from pnrt.cuda import lanes
from pnrt.cuda.kernel import device

exp, log1p, sigmoid, silu, softplus = scalars.build(
    SimpleNamespace(
        add=lanes.add,
        sub=lanes.sub,
        mul=lanes.mul,
        div=lanes.div,
        fma=lanes.fma,
        f32=lanes.f32,
        i32=lanes.i32,
        float_to_bits=lanes.float_to_bits,
        bits_to_float=lanes.bits_to_float,
        select=lanes.select,
        compile=device,
    )
)
