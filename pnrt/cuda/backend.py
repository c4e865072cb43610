"""The CUDA backend: its table, packed matrices, single products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pnrt.backend import ACTIVATIONS, check_choice, check_rows, refusal
from pnrt.cuda import (
    attention,
    delta,
    elementwise,
    embed,
    matmul,
    memory,
    norm,
    pack,
    rope,
    rotate,
    upload,
)
from pnrt.cuda.session import CudaSession
from pnrt.errors import FormatError
from pnrt.program import Program

OPS = {
    "add": elementwise.add_kernel,
    "add_bias": elementwise.bias_kernel,
    "attention": attention.attention_kernels["f16"][0],
    "conv_silu": delta.conv_silu_kernel,
    "decay": delta.decay_kernel,
    "delta": delta.delta_kernel,
    "hadamard": rotate.hadamard_kernel,
    "l2_norm": norm.l2_norm_kernel,
    "regroup": rotate.regroup_kernel,
    "rms_norm": norm.rms_norm_kernel,
    "rope": rope.rope_kernel,
    "scale": elementwise.scale_kernel,
    "sigmoid": elementwise.sigmoid_kernel,
    "sigmoid_gate": elementwise.sigmoid_gate_kernel,
    "store_kv": rope.store_kernel,
    "swiglu": elementwise.swiglu_kernel,
    "take": embed.take_kernel,
}
# bytes of a matrix's rows that are announced at a time
SLICE = 4 * upload.PIECE
# taken where nobody said how much will be needed: single products, self-tests
ARENA = 1 << 30


class Weight(NamedTuple):
    """A packed matrix and where it lies on the device."""

    layout: pack.Weight
    address: int

    @property
    def format(self) -> str:
        return self.layout.format

    @property
    def N(self) -> int:
        return self.layout.N

    @property
    def K(self) -> int:
        return self.layout.K

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


class CudaBackend:
    """Kernels of pnrt.cuda on one device: launch.Gpu, or standin.StandIn in tests.

    graph: whether the launches of a token are captured once and started as one.
    """

    name = "cuda"
    threads = 1

    def __init__(self, device: Any, graph: bool = True):
        self.device, self.graph = device, graph
        self._reserved = False

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (op, format or '-', kernel name): everything this backend can do."""
        return table()

    def reserve(self, program: Program, shape: memory.Shape, **options: Any) -> None:
        """Take the memory a program will need, or refuse before any weight is read.

        Args:
            shape: name of a tensor -> format, rows, columns.
            options: positions, chunk, kv and activations as bind takes them.
        Raises: DeviceError where the device has less.
        """
        size = memory.sizes(program, **options)
        self.device.reserve(sum(memory.needed(program, shape, size).values()))
        self._reserved = True

    def _take(self, nbytes: int) -> int:
        if not self._reserved:
            self.device.reserve(min(ARENA, self.device.memory()[0]))
            self._reserved = True
        return self.device.allocate(nbytes)

    def pack(
        self,
        format: str,
        rows: np.ndarray,
        K: int,
        before: Callable[[int, int], None] | None = None,
    ) -> Weight:
        """Arrange a matrix in planes on the device; pieces are packed while others are copied.

        Args: as pnrt.backend.Backend.
        Raises: DeviceError for a format without a kernel or too little memory, FormatError as
            backend.check_rows.
        """
        if format not in pack.CODECS:
            raise refusal(self.name, self.table(), "matmul", format, "pack")
        rows = check_rows(format, rows, K, unseen=before is None)
        layout = pack.layout(format, len(rows), K)
        weight = Weight(layout, self._take(layout.nbytes))
        step = max(1, SLICE // rows.shape[1])

        def parts() -> Iterator[upload.Matrix]:
            for first in range(0, len(rows), step):
                part = rows[first : first + step]
                if before:
                    before(first, first + len(part))
                yield upload.Matrix(layout, part, weight.address, first)

        upload.upload(self.device, parts())
        return weight

    def matmul(self, weight: Weight, x: np.ndarray, activations: str = "q8_0") -> np.ndarray:
        """Multiply activations by a packed matrix; see pnrt.cpu.session.CpuBackend.matmul.

        Exact: the bits of reference.matmul, for any T.
        Raises: FormatError for another shape or non-finite x.
        """
        check_choice("activations", activations, ACTIVATIONS)
        x, T = np.ascontiguousarray(x, np.float32), len(x)
        if x.ndim != 2 or x.shape[1] != weight.K:
            raise FormatError(f"matmul: x is {list(x.shape)}; needed [T, {weight.K}]")
        if not np.isfinite(x).all():
            t, k = np.argwhere(~np.isfinite(x))[0]
            raise FormatError(f"matmul: x[{t}, {k}] is {x[t, k]}; activations must be finite")
        if T == 0:
            return np.empty((0, weight.N), np.float32)
        device, view = self.device, matmul.view_of(weight.format, weight.K, activations, T)
        mark = device.mark()
        source, bad = device.upload(x), device.upload(np.zeros(1, np.uint32))
        prepared = device.allocate(matmul.view_bytes(view, weight.K, T))
        out = device.allocate(T * weight.N * 4)
        device.run(
            [
                matmul.convert(view, source, weight.K, weight.K, T, prepared, bad),
                matmul.multiply(weight.layout, weight.address, view, prepared, out, weight.N, T),
            ]
        )
        y, flag = device.read(out, (T, weight.N)), device.read(bad, 1, np.uint32)[0]
        device.release(mark)
        if flag:
            t = int(np.abs(x).max(1).argmax())
            raise FormatError(
                f"matmul: x[{t}] reaches {np.abs(x[t]).max():g}; q8_0 codes blocks of 32 with "
                "max|x| / 127 below 65520. Use activations='f32'"
            )
        return y

    def bind(self, program: Program, weights: Mapping[str, Any], **options: Any) -> CudaSession:
        """Bind a program; see CudaSession for the options."""
        return CudaSession(self, program, weights, **options)

    def close(self) -> None:
        """Give the device's memory back; what was packed is gone."""
        self.device.close()
        self._reserved = False


def table() -> list[tuple[str, str, str]]:
    """Rows (op, format or '-', kernel name) of the CUDA backend, on any machine."""
    rows = [(op, "-", kernel.name) for op, kernel in OPS.items()]
    for form in pack.CODECS:
        rows += [("matmul", form, f"matmul_{form}"), ("embed", form, f"embed_{form}_host")]
    return sorted(rows)


def open_backend() -> CudaBackend:
    """The backend on this machine's GPU.

    Raises: DeviceError that says in one sentence what is missing and what to do.
    """
    from pnrt.cuda import launch

    return CudaBackend(launch.open_device())
