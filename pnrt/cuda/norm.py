"""RMS and L2 norms: a lane-32 sum of squares, then one factor r for the whole run of numbers."""

from __future__ import annotations

from pnrt.cuda.control import tokens
from pnrt.cuda.kernel import Kernel, device, kernel, registers, unroll
from pnrt.cuda.lanes import (
    at,
    block,
    block_y,
    butterfly,
    f32,
    fetch_f32,
    fma,
    lane,
    load_f32,
    sqrt,
    store_f32,
    syncthreads,
    thread,
    threads,
    u32,
    u64,
)


def squares(ahead: int):
    """@device: a sum of squares with so many loads of a lane under way together."""

    @device
    def sum_of_squares(x, n):
        """Lane-32 sum of the squares of n f32 at x, in every lane; the warp works together."""
        total = f32(0.0)
        v = registers()
        whole = n // (32 * ahead) * (32 * ahead)
        for i in range(lane(), whole, 32 * ahead):
            part = at(x, i, 4)
            for j in unroll(ahead):
                v[j] = load_f32(part + 128 * j)
            for j in unroll(ahead):
                total = fma(v[j], v[j], total)
        for i in range(whole + lane(), n, 32):
            w = load_f32(at(x, i, 4))
            total = fma(w, w, total)
        return butterfly(total)

    return sum_of_squares


sum_of_squares = squares(8)


@kernel(name="rms_norm")
def rms_norm_kernel(x: u64, x_width: u32, weight: u64, out: u64, out_width: u32, n: u32, heads: u32,
                    stride: u32, eps: f32, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.norm.rms_norm_kernel; a block takes a run, block_y a token.

    Every warp sums the whole run, then writes its part, so warps wait for each other only once (out
    may be x).
    """
    t, h = block_y(), block()
    if t < tokens(control):
        source = at(x, t * x_width + h * stride, 4)
        target = at(out, t * out_width + h * n, 4)
        mean = sum_of_squares(source, n) / f32(n)
        r = 1.0 / sqrt(mean + eps)
        syncthreads()
        for i in range(thread(), n, threads()):
            v = (load_f32(at(source, i, 4)) * r) * fetch_f32(at(weight, i, 4))
            store_f32(at(target, i, 4), v)


@kernel(name="l2_norm")
def l2_norm_kernel(x: u64, x_width: u32, first: u32, out: u64, out_width: u32, n: u32, heads: u32,
                   eps: f32, scale: f32, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.norm.l2_norm_kernel; launched as rms_norm_kernel."""
    t, h = block_y(), block()
    if t < tokens(control):
        source = at(x, t * x_width + first + h * n, 4)
        target = at(out, t * out_width + h * n, 4)
        r = 1.0 / sqrt(sum_of_squares(source, n) + eps)
        syncthreads()
        for i in range(thread(), n, threads()):
            store_f32(at(target, i, 4), (load_f32(at(source, i, 4)) * r) * scale)


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [rms_norm_kernel, l2_norm_kernel]
