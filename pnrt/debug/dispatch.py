"""Which kernel served each product and op of a run, how often, how long, and what never ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pnrt.formats import FORMATS
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
        self.activations, self.kv = model.session.activations, model.session.kv
        self.used: dict[tuple, dict[str, Any]] = {}
        self.served: set[tuple[str, str]] = set()

    def __call__(self, tap: Tap) -> None:
        """Count one step."""
        step = tap.step
        form, N, K = "-", None, None
        if step.op in FORMAT_OPS:
            info = self.file.tensors[step.weights[0]]
            form, N, K = info.format.name, info.rows, info.columns
        # the last call is the op, those before it prepare its input
        for i, (kernel, seconds, nbytes) in enumerate(tap.kernels):
            prepares = i < len(tap.kernels) - 1
            key = (step.op, form, N, K, tap.T, kernel)
            row = self.used.setdefault(key, {
                "op": step.op, "format": form, "N": N, "K": K, "T": tap.T, "kernel": kernel,
                "prepares": prepares, "fallback": not prepares
                and not _serves(kernel, step.op, form, self.activations),
                "calls": 0, "bytes": 0, "seconds": 0.0,
            })  # fmt: skip
            row["calls"] += 1
            row["bytes"] += nbytes
            row["seconds"] += seconds
        self.served.add((step.op, form))

    def report(self) -> dict[str, Any]:
        """Rows; fallbacks: calls that a kernel of another op or format served; never_used;
        precision: what numbers are kept and summed in."""
        rows = list(self.used.values())
        unused = [
            {"op": op, "format": form, "kernel": kernel}
            for op, form, kernel in self.table
            if (op, form) not in self.served
        ]
        return {
            "precision": f"activations {self.activations} (f32 where the weights are floats), "
            f"cache {self.kv}, sums and recurrent states float32",
            "rows": rows,
            "fallbacks": sum(row["calls"] for row in rows if row["fallback"]),
            "kernels": len(self.table),
            "never_used": unused,
        }


def _serves(kernel: str, op: str, form: str, activations: str) -> bool:
    """Whether a kernel is one for this op and format, at the activations asked for.

    One kernel may serve several formats; one that is named after another format serves only that.
    """
    if kernel != op and not kernel.startswith(f"{op}_"):
        return False
    rest = kernel[len(op) + 1 :] + "_"
    named = max((f for f in FORMATS if rest.startswith(f"{f}_")), key=len, default=form)
    if op == "matmul" and activations == "q8_0" and FORMATS[form].group:
        return named == form and not rest.startswith(f"{form}_f32_")
    return named == form or op not in FORMAT_OPS
