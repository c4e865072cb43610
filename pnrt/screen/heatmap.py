"""Differences as one HTML page: layers x steps in colours, inline SVG, no script, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from pnrt.screen.diff import blame_rows, summary

if TYPE_CHECKING:
    from pnrt.debug.diff import Report, StepDifference

CELL, GAP, LEFT, TOP = 22, 2, 92, 118
# relative RMS from which a cell is as dark as it gets, and below which it is as pale
DARKEST, PALEST = 0.0, -8.0
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #6a737d; --page: #ffffff; --line: #d8dee4;
  --equal: #d5e8d9; --within: #f3e9c4; --missing: #ececec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --dim: #9aa4ae; --page: #15181c;
  --line: #343a41; --equal: #23452f; --within: #57501f; --missing: #2b2f34; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; } h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; } th { color: var(--dim); font-weight: 400; vertical-align: top; }
td.n { text-align: right; } .wrong { color: #c9302c; font-weight: 600; } .right { color: #2e7d4f; }
.map { overflow-x: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
.equal { fill: var(--equal); } .within { fill: var(--within); } .missing { fill: var(--missing); }
.first { stroke: var(--ink); stroke-width: 2; } .dim { color: var(--dim); }
"""


def page(reports: Sequence[Report]) -> str:
    """The whole report; every text in it is escaped."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pnrt diff</title><style>{STYLE}</style></head><body>",
        "<h1>pnrt diff</h1>",
        *map(_section, reports),
        "</body></html>",
    ]
    return "\n".join(parts)


def _section(report: Report) -> str:
    parts = [f"<h2>{escape(report.a)} against {escape(report.b)}</h2>"]
    for side, run in zip("AB", report.runs, strict=True):
        about = (
            f"{run['model']['name']}, {run['backend']} on {run['device']}, {run['threads']} "
            f"threads, activations {run['activations']}, kv {run['kv']}, {len(run['tokens'])} "
            f"tokens fed {run['chunk']} at a time, pnrt {run['versions']['pnrt']}"
        )
        parts.append(f'<div class="dim">{side}: {escape(about)}</div>')
    parts += [f'<div class="dim">note: {escape(note)}</div>' for note in report.notes]
    if report.equal:
        parts.append(f'<p class="right">all {len(report.steps)} steps agree</p>')
    else:
        parts.append(f'<p class="wrong">{escape(summary(report))}</p>')
    parts.append(f'<div class="map">{heat_map(report)}</div>')
    parts.append('<p class="dim">green: equal bits; yellow: within the tolerance; pale to dark red:'
                 " relative RMS 1e-8 to 1; framed: the first that differs</p>")  # fmt: skip
    if report.blame:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in blame_rows(report.blame)
        )
        parts.append(f"<h2>Blame</h2><table>{rows}</table>")
    parts.append(f"<details><summary>every step</summary>{_table(report)}</details>")
    return "\n".join(parts)


def place(name: str) -> tuple[str, str]:
    """Row and column of a step: its layer, and its role in it; a step outside layers is a row."""
    if name.startswith("blk.") and name.count(".") >= 2:
        _, layer, role = name.split(".", 2)
        return f"layer {layer}", role
    return name, ""


def heat_map(report: Report) -> str:
    """Layers x steps as SVG, in program order."""
    cells = [(*place(s.name), s, i == report.first) for i, s in enumerate(report.steps)]
    rows = list(dict.fromkeys(row for row, *_ in cells))
    columns = list(dict.fromkeys(role for _, role, *_ in cells if role))
    width, height = LEFT + max(len(columns), 1) * CELL + 60, TOP + len(rows) * CELL + 8
    parts = [f'<svg role="img" aria-label="layers by steps" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}">']  # fmt: skip
    for i, role in enumerate(columns):
        x = LEFT + i * CELL + CELL // 2
        parts.append(
            f'<text transform="translate({x},{TOP - 6}) rotate(-55)">{escape(role)}</text>'
        )
    for i, row in enumerate(rows):
        y = TOP + i * CELL
        parts.append(f'<text x="0" y="{y + 15}">{escape(row)}</text>')
    for row, role, step, first in cells:
        at = columns.index(role) if role else 0
        parts.append(_cell(LEFT + at * CELL, TOP + rows.index(row) * CELL, step, first))
    return "".join([*parts, "</svg>"])


def _cell(x: int, y: int, step: StepDifference, first: bool) -> str:
    kind, fill = {"equal": "equal", "within": "within"}.get(step.state, ""), ""
    if step.state.startswith("only"):
        kind = "missing"
    elif not kind:
        fill = f' fill="{colour(step.relative_rms)}"'
    label = f"{step.name}: {step.state}"
    if step.relative_rms:
        label += f", relative RMS {step.relative_rms:.3g}"
    side = CELL - GAP
    return (
        f'<rect class="{kind}{" first" if first else ""}" x="{x}" y="{y}" width="{side}" '
        f'height="{side}" rx="3"{fill}><title>{escape(label)}</title></rect>'
    )


def colour(relative_rms: float | None) -> str:
    """Pale for 1e-8 and less, dark red from 1 on, and where nobody knows how much."""
    if relative_rms is None or not math.isfinite(relative_rms):
        share = 1.0
    else:
        log = math.log10(max(relative_rms, 1e-300))
        share = min(1.0, max(0.0, (log - PALEST) / (DARKEST - PALEST)))
    pale, dark = (250, 205, 190), (150, 10, 30)
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(pale, dark, strict=True)
    )


def _table(report: Report) -> str:
    head = "<tr><th>step</th><th>op</th><th>state</th><th>elements</th><th>relative RMS</th></tr>"
    rows = []
    for s in report.steps:
        share = "" if s.agrees and not s.elements else f"{s.elements}/{s.total}"
        rms = f"{s.relative_rms:.3g}" if s.relative_rms else ""
        style = "" if s.agrees else ' class="wrong"'
        rows.append(
            f"<tr><td{style}>{escape(s.name)}</td><td>{escape(s.op)}</td><td>{escape(s.state)}</td>"
            f'<td class="n">{share}</td><td class="n">{rms}</td></tr>'
        )
    return f"<table>{head}{''.join(rows)}</table>"
