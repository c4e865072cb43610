"""Screens of traces, differences and dispatch reports."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from pnrt.screen.parts import Renderable, facts, group, number, size, table


def trace(index: dict[str, Any], nbytes: int | None = None) -> Renderable:
    """A recorded run: what it was, and a line per step."""
    steps = index["steps"]
    out = table("step", "op", "shape", "min", "max", "mean", "rms", "nan", "inf", "sha256",
                right=(3, 4, 5, 6, 7, 8))  # fmt: skip
    for s in steps:
        shape = f"{s['shape'][0]} x {s['shape'][1]}"
        values = [_short(s[key]) for key in ("min", "max", "mean", "rms")]
        wrong = bool(s["nan"] or s["inf"])
        out.add_row(
            s["name"], s["op"], shape, *values, str(s["nan"]), str(s["inf"]), s["sha256"][:12],
            style="red" if wrong else None,
        )  # fmt: skip
    return group(out, about(index, nbytes))


def about(index: dict[str, Any], nbytes: int | None = None) -> Renderable:
    """Where a run comes from."""
    model, versions = index["model"], index["versions"]
    rows = [
        ("model", f"{model['name']}, {model['architecture']}, sha256 {model['sha256'][:16]}"),
        ("run on", f"{index['backend']}, {index['device']}, {index['threads']} threads"),
        ("precision", f"activations {index['activations']}, kv {index['kv']}"),
        ("versions", ", ".join(f"{name} {v}" for name, v in versions.items())),
        ("tokens", f"{len(index['tokens'])}, fed {index['chunk']} at a time"),
    ]
    if nbytes is not None:
        kept = "values" if all(s["values"] is not None for s in index["steps"]) else "digests"
        rows.append(("file", f"{kept} of {len(index['steps'])} steps, {size(nbytes)}"))
    return facts(rows)


def dispatch(report: dict[str, Any]) -> Renderable:
    """Which kernel served what."""
    out = table("op", "format", "N", "K", "T", "kernel", "calls", "bytes", "ms", "GB/s",
                right=(2, 3, 4, 6, 7, 8, 9))  # fmt: skip
    for r in report["rows"]:
        rate = f"{r['bytes'] / r['seconds'] / 1e9:.1f}" if r["bytes"] and r["seconds"] else "-"
        out.add_row(
            r["op"], r["format"], number(r["N"]), number(r["K"]), str(r["T"]),
            r["kernel"] + (" (prepares)" if r["prepares"] else ""), str(r["calls"]),
            size(r["bytes"]) if r["bytes"] else "-", f"{1000 * r['seconds']:.3f}", rate,
            style="red" if r["fallback"] else ("dim" if r["prepares"] else None),
        )  # fmt: skip
    unused = ", ".join(dict.fromkeys(r["kernel"] for r in report["never_used"]))
    style = "red" if report["fallbacks"] else "green"
    return group(
        out,
        Text(f"fallbacks: {report['fallbacks']}", style=style),
        Text(report["precision"]),
        Text(f"never used, of {report['kernels']} kernels in the table: {unused or 'none'}"),
        Text("times are of calls run one by one; a fused run takes less", style="dim"),
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
