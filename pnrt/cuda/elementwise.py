"""Elementwise operations on [T, width] float32 slots; a thread an element, block_y the token."""

from __future__ import annotations

from pnrt.cuda.control import index, tokens
from pnrt.cuda.elementary import sigmoid, silu
from pnrt.cuda.kernel import Kernel, kernel
from pnrt.cuda.lanes import at, block_y, fetch_f32, load_f32, store_f32, u32, u64


@kernel(name="add")
def add_kernel(x: u64, x_width: u32, y: u64, y_width: u32, out: u64, out_width: u32, n: u32,
               control: u64):  # fmt: skip
    """Twin of pnrt.cpu.elementwise.add_kernel; grid: n threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        a, b = load_f32(at(x, t * x_width + i, 4)), load_f32(at(y, t * y_width + i, 4))
        store_f32(at(out, t * out_width + i, 4), a + b)


@kernel(name="add_bias")
def bias_kernel(x: u64, width: u32, bias: u64, n: u32, control: u64):
    """Twin of pnrt.cpu.elementwise.bias_kernel; grid: n threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        p = at(x, t * width + i, 4)
        store_f32(p, load_f32(p) + fetch_f32(at(bias, i, 4)))


@kernel(name="scale")
def scale_kernel(x: u64, width: u32, factor: u64, n: u32, control: u64):
    """Twin of pnrt.cpu.elementwise.scale_kernel; grid: n threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        p = at(x, t * width + i, 4)
        store_f32(p, load_f32(p) * fetch_f32(factor))


@kernel(name="swiglu")
def swiglu_kernel(x: u64, x_width: u32, y: u64, y_width: u32, out: u64, out_width: u32, n: u32,
                  control: u64):  # fmt: skip
    """Twin of pnrt.cpu.elementwise.swiglu_kernel; grid: n threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        a, b = load_f32(at(x, t * x_width + i, 4)), load_f32(at(y, t * y_width + i, 4))
        store_f32(at(out, t * out_width + i, 4), silu(a) * b)


@kernel(name="sigmoid")
def sigmoid_kernel(x: u64, x_width: u32, out: u64, out_width: u32, n: u32, control: u64):
    """Twin of pnrt.cpu.elementwise.sigmoid_kernel; grid: n threads, a y block per token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n:
        v = load_f32(at(x, t * x_width + i, 4))
        store_f32(at(out, t * out_width + i, 4), sigmoid(v))


@kernel(name="sigmoid_gate")
def sigmoid_gate_kernel(x: u64, x_width: u32, gate: u64, gate_width: u32, out: u64, out_width: u32,
                        n: u32, heads: u32, stride: u32, first: u32, control: u64):  # fmt: skip
    """Twin of pnrt.cpu.elementwise.sigmoid_gate_kernel; grid: n * heads threads, y the token."""
    t, i = block_y(), index()
    if t < tokens(control) and i < n * heads:
        a = load_f32(at(x, t * x_width + i, 4))
        b = load_f32(at(gate, t * gate_width + i // n * stride + first + i % n, 4))
        store_f32(at(out, t * out_width + i, 4), a * sigmoid(b))


def kernels() -> list[Kernel]:
    """Every kernel of this module."""
    return [
        add_kernel, bias_kernel, scale_kernel, swiglu_kernel, sigmoid_kernel, sigmoid_gate_kernel,
    ]  # fmt: skip
