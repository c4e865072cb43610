"""Which kernel served each product and op of a run, how often, how long, and what never ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pnrt.program import FORMAT_OPS

if TYPE_CHECKING:
    from pnrt.backend import Tap
    from pnrt.generate import Model


class Dispatch:
    """An observer that counts kernels by (op, format, N, K, T).

    Times are of one call alone, with the start of a parallel region in each: they add up to more
    than a fused run takes.
    """

    def __init__(self, model: Model):
        self.file = model.file
        self.table = model.session.backend.table()
        self.named = {(op, form): kernel for op, form, kernel in self.table}
        self.used: dict[tuple, dict[str, Any]] = {}
        self.served: set[tuple[str, str]] = set()

    def __call__(self, tap: Tap) -> None:
        """Count one step."""
        step = tap.step
        form, N, K = "-", None, None
        if step.op in FORMAT_OPS:
            info = self.file.tensors[step.weights[0]]
            form, N, K = info.format.name, info.rows, info.columns
        own = self.named.get((step.op, form), "")
        # the last call is the op, those before it prepare its input
        for i, (kernel, seconds, nbytes) in enumerate(tap.kernels):
            prepares = i < len(tap.kernels) - 1
            key = (step.op, form, N, K, tap.T, kernel)
            row = self.used.setdefault(key, {
                "op": step.op, "format": form, "N": N, "K": K, "T": tap.T, "kernel": kernel,
                "prepares": prepares, "fallback": not prepares and not _is(kernel, own, step.op),
                "calls": 0, "bytes": 0, "seconds": 0.0,
            })  # fmt: skip
            row["calls"] += 1
            row["bytes"] += nbytes
            row["seconds"] += seconds
        self.served.add((step.op, form))

    def report(self) -> dict[str, Any]:
        """rows, fallbacks (calls a kernel other than the table's served), never used, per table."""
        rows = list(self.used.values())
        unused = [
            {"op": op, "format": form, "kernel": kernel}
            for op, form, kernel in self.table
            if (op, form) not in self.served
        ]
        return {
            "rows": rows,
            "fallbacks": sum(row["calls"] for row in rows if row["fallback"]),
            "kernels": len(self.table),
            "never_used": unused,
        }


def _is(kernel: str, own: str, op: str) -> bool:
    """Whether a call's kernel is the table's, perhaps for another precision or number of tokens."""
    stem = own if op in FORMAT_OPS else op
    return bool(stem) and (kernel == stem or kernel.startswith(f"{stem}_"))
