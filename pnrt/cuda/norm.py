"""RMS norm: a lane-32 sum of squares, then (x * r) * w with r = 1 / sqrt(mean + eps)."""

from __future__ import annotations

from pnrt.cuda.kernel import Kernel, device, kernel
from pnrt.cuda.lanes import (
    at,
    butterfly,
    f32,
    fetch_f32,
    fma,
    global_warp,
    lane,
    load_f32,
    sqrt,
    store_f32,
    u32,
    u64,
)


@device
def sum_of_squares(x, n):
    """Lane-32 sum of the squares of n f32 at x, in every lane; the warp works together."""
    total = f32(0.0)
    for i in range(lane(), n, 32):
        v = load_f32(at(x, i, 4))
        total = fma(v, v, total)
    return butterfly(total)


@kernel
def rms_norm(x: u64, width: u32, weight: u64, out: u64, out_width: u32, n: u32, heads: u32,
             count: u32, eps: f32):  # fmt: skip
    """Twin of pnrt.cpu.norm: `heads` consecutive runs of n numbers per token, one weight [n].

    One warp takes one run; count = tokens * heads. Rows of x and out are width and out_width apart.
    """
    run = global_warp()
    if run < count:
        token, head = run // heads, run % heads
        source = at(x, token * width + head * n, 4)
        target = at(out, token * out_width + head * n, 4)
        mean = sum_of_squares(source, n) / f32(n)
        r = 1.0 / sqrt(mean + eps)
        for i in range(lane(), n, 32):
            v = (load_f32(at(source, i, 4)) * r) * fetch_f32(at(weight, i, 4))
            store_f32(at(target, i, 4), v)


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [rms_norm]
