"""A backend is a table (op, format) -> kernel, and refuses what is not in it.

b = pnrt.backend.open("cpu")
W = b.pack("pn3t", rows, K)
y = b.matmul(W, x, activations="q8_0")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from pnrt.errors import DeviceError, FormatError, ModelError
from pnrt.formats import FORMATS
from pnrt.program import FORMAT_OPS, Program, Step

if TYPE_CHECKING:
    from pnrt.models.state import Snapshot

BACKENDS = ("cpu", "cuda", "reference")
ACTIVATIONS = ("q8_0", "f32")
CACHE_TYPES = ("f16", "f32")


class Tap(NamedTuple):
    """What one step of a run did, told to a session's observer before the next step starts.

    start: position of its first row; T: rows. values(): [T, width] float32, the step's output, a
    view that later steps overwrite; of store_kv the keys, then the values, as the cache holds them.
    kernels: (name, seconds, bytes of weights read) of each call the step took.
    """

    step: Step
    start: int
    T: int
    values: Callable[[], np.ndarray]
    kernels: tuple[tuple[str, float, int], ...]


class Session(Protocol):
    """A program bound to weights and state on one backend.

    observer: None, or a callable that is told a Tap of every step; the session then runs step by
    step instead of fused, with the same kernels and the same bits. What it raises ends the run.
    """

    position: int
    observer: Callable[[Tap], None] | None

    def run(self, tokens: np.ndarray, wanted: int) -> np.ndarray:
        """Feed tokens; float32 logits [wanted, V] of the last `wanted` of them."""

    def redo(self, name: str, inputs: Mapping[str, np.ndarray], start: int) -> np.ndarray:
        """Run one step alone, on T rows at positions start, start + 1, ...

        Args:
            inputs: slot -> [T, width] float32 for the slots the step reads; "tokens" [T] for
                embed; of a cache [start + T, width], of a state its array before the first row, or
                left out for what the session holds.
        Returns: [T, width] float32. Overwrites slots (not states), so it is for after a run.
        """

    def reset(self) -> None:
        """Forget every token."""

    def snapshot(self) -> Snapshot:
        """A copy of caches and states."""

    def restore(self, snapshot: Snapshot) -> None:
        """Put caches and states back."""

    def close(self) -> None:
        """Give the memory back, that of the weights too."""


class Backend(Protocol):
    """What the rest of pnrt knows of a backend."""

    name: str
    threads: int

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (op, format or '-', kernel name): everything this backend can do."""

    def reserve(
        self, program: Program, shape: Callable[[str], tuple[str, int, int]], **options: Any
    ) -> None:
        """Take the memory a program will need, or refuse before any weight is read.

        Args:
            shape: name of a tensor -> its format, rows, columns.
            options: positions, chunk, kv, activations, as for bind.
        Raises: DeviceError where there is less.
        """

    def pack(
        self,
        format: str,
        rows: np.ndarray,
        K: int,
        before: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Arrange rows [N, row_bytes] uint8 of a format for this backend.

        before: told (first, last) before these rows are read; each row once, in order. Rows of
        slices announced earlier are not read again.
        """

    def matmul(self, weight: Any, x: np.ndarray, activations: str = "q8_0") -> np.ndarray:
        """x [T, K] float32 times a packed matrix -> [T, N] float32."""

    def bind(self, program: Program, weights: Mapping[str, Any], **options: Any) -> Session:
        """Bind a program to its weights and allocate its state."""

    def close(self) -> None:
        """Give back what is held for weights that belong to no session."""


def open(name: str, threads: int | None = None) -> Backend:
    """Open a backend by name; "auto" is cuda where a GPU can be used, else cpu.

    Raises: DeviceError for a name pnrt does not know or a machine that cannot run it.
    """
    if name in ("cuda", "auto"):
        from pnrt.cuda.backend import open_backend

        try:
            return open_backend()
        except DeviceError as error:
            if name == "cuda":
                raise
            engine = open("cpu", threads)
            engine.note = f"backend auto: the CPU is used ({error})"
            return engine
    if name == "cpu":
        from pnrt.cpu.session import CpuBackend

        return CpuBackend(threads)
    if name == "reference":
        from pnrt.judge import ReferenceBackend

        return ReferenceBackend()
    raise DeviceError(
        f"backend {name!r}: unknown. pnrt has: {', '.join(BACKENDS)}, auto. Choose one."
    )


def check_choice(what: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return value if it is one of the allowed names.

    Raises: DeviceError that lists them.
    """
    if value not in allowed:
        raise DeviceError(f"{what} {value!r}: unknown. Allowed: {', '.join(allowed)}. Choose one.")
    return value


def refusal(backend: str, table: list[tuple[str, str, str]], op: str, format: str, where: str):
    """The sentence for a kernel that is not there, with what the backend does have."""
    have = sorted({f for o, f, _ in table if o == op})
    if not have:
        ops = ", ".join(sorted({o for o, _, _ in table}))
        return DeviceError(f"{where}: backend {backend} has no op {op}. It has: {ops}")
    return DeviceError(
        f"{where}: backend {backend} has no {op} kernel for {format}. "
        f"It has {op} for: {', '.join(have)}. "
        "Convert the file with `pnrt quantize`, or choose another file."
    )


def check_rows(format: str, rows: np.ndarray, K: int, unseen: bool) -> np.ndarray:
    """Rows that a backend may pack, as an array.

    Args:
        unseen: whether nobody has looked for codes that are NaN, which products would not show.
    Raises: FormatError for other shapes than uint8 [N >= 1, row_bytes], and for such codes.
    """
    rows, width = np.asarray(rows), FORMATS[format].row_bytes(K)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        raise FormatError(
            f"pack: rows are {rows.dtype} {list(rows.shape)}; {format} with K = {K} needs "
            f"uint8 [N >= 1, {width}]"
        )
    if unseen and (bad := FORMATS[format].first_finding(rows, lost=True)):
        raise FormatError(
            f"pack: row {bad.row} block {bad.block}: {bad.found}; {bad.allowed}, or a product "
            f"would be wrong without a sign of it. Quantize the tensor again."
        )
    return rows


def check_run(position: int, T: int, limit: int, spoiled: str = "") -> None:
    """Refuse tokens that a session cannot take.

    Args:
        spoiled: the step that failed in an earlier run and left recurrent states behind.
    Raises: ModelError when the states are spoiled or the context is full.
    """
    if spoiled:
        raise ModelError(
            f"the recurrent states are those of a failed run ({spoiled}); those of a whole one are "
            "needed. reset() or restore() a snapshot first."
        )
    if position + T > limit:
        raise ModelError(
            f"the context is full: {position} + {T} tokens, it holds {limit}. "
            "Use a shorter prompt or a larger context."
        )


def not_coded(step: str, position: int) -> ModelError:
    """The sentence for a step whose input a product could not code."""
    return ModelError(
        f"{step}: an input is NaN, infinite or too large for 8-bit activations, at "
        f"position {position} or after it; finite numbers are needed. `pnrt check` tests the "
        "file's weights, --nan-stop finds the step."
    )


def check_program(
    backend: Backend, program: Program, format_of: Callable[[str], str | None]
) -> None:
    """Refuse a program before any weight is read if a step has no kernel.

    Args:
        format_of: tensor name -> format name (None for a type id pnrt does not know).
    """
    table = backend.table()
    have = {(op, form) for op, form, _ in table}
    for step in program.steps:
        if step.op not in FORMAT_OPS:
            if (step.op, "-") not in have:
                raise refusal(backend.name, table, step.op, "-", step.name)
            continue
        for tensor in step.weights:
            form = format_of(tensor)
            if (step.op, form) not in have:
                raise refusal(backend.name, table, step.op, form or "an unknown type", tensor)
