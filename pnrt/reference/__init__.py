"""The judge: every op in NumPy, in the one order of float32 operations that all backends keep.

Slow and plain on purpose. A backend is right when it returns these bits; whether these bits are
near the truth is asked of `reference.exact`, the float64 twins under the same names.

Where an op has a choice, its docstring says which order was taken. Three rules hold throughout:
a chain or sum starts from +0.0; rounding is to nearest even, subnormals are kept; an element that
does not take part (a masked position, a missing unit) is skipped, not added as zero, while the
zeros that pad the last unit of a row do take part.

Index letters: T tokens, N output rows, K input columns, D width, H query heads, G key/value heads,
E head width, P cached positions, C channels. Every array is float32 unless said otherwise.
"""

from pnrt.reference import exact
from pnrt.reference.arithmetic import exp, fma, lane_sum, log1p, sigmoid, silu, softplus
from pnrt.reference.ops import (
    add,
    attention,
    conv,
    decay,
    delta_step,
    hadamard,
    l2_norm,
    multiply,
    rms_norm,
    rope,
    sigmoid_gate,
    softmax,
    softmax_pieces,
    swiglu,
)
from pnrt.reference.product import embedding, matmul, quantize_q8_0, segments

__all__ = [
    "add",
    "attention",
    "conv",
    "decay",
    "delta_step",
    "embedding",
    "exact",
    "exp",
    "fma",
    "hadamard",
    "l2_norm",
    "lane_sum",
    "log1p",
    "matmul",
    "multiply",
    "quantize_q8_0",
    "rms_norm",
    "rope",
    "segments",
    "sigmoid",
    "sigmoid_gate",
    "silu",
    "softmax",
    "softmax_pieces",
    "softplus",
    "swiglu",
]
