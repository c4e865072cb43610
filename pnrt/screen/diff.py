"""The screen of a difference: where it came in, what agreed before, whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.text import Text

from pnrt.screen.parts import Renderable, facts, group, table

if TYPE_CHECKING:
    from pnrt.debug.diff import Report, StepDifference

# steps shown from the first difference on
SHOWN = 12


def reports(found: Sequence[Report]) -> Renderable:
    """All comparisons, one below the other."""
    return group(*(part for report in found for part in (_report(report), Text(""))))


def _report(report: Report) -> Renderable:
    compared = [s for s in report.steps if not s.state.startswith("only")]
    tokens = len(report.runs[0]["tokens"])
    head = facts([("A", report.a), ("B", report.b), ("tokens", str(tokens))])
    notes = [Text(f"note: {note}", style="yellow") for note in report.notes]
    if report.equal:
        within = sum(s.state == "within" for s in compared)
        how = f"within {report.tolerance:g}" if within else "to the bit"
        end = Text(f"all {len(compared)} steps agree {how}", style="bold green")
        return group(head, *notes, end)
    first = report.steps[report.first]
    parts = [head, *notes, Text(summary(report), style="bold red"), _steps(report)]
    differ = sum(not s.agrees for s in report.steps[report.first :])
    parts.append(Text(f"{differ} of {len(compared)} steps differ, first {first.name}"))
    if report.blame:
        parts.append(_blame(report.blame))
    return group(*parts)


def summary(report: Report) -> str:
    """The first difference in a sentence or two."""
    first = report.steps[report.first]
    before = [s for s in report.steps[: report.first] if s.agrees]
    text = f"first difference: {first.name}"
    if first.first:
        t, n = first.first
        text += f" at position {t}" + ("" if n is None else f", element {n}")
    if first.a_bits:
        text += f": A {first.a!r} ({first.a_bits}), B {first.b!r} ({first.b_bits})"
        text += (
            f"; {first.elements} of {first.total} elements, relative RMS {first.relative_rms:.3g}, "
            f"up to {first.ulp} ulp"
        )
    if not before:
        return f"{text}. It is the first step compared"
    exact = all(s.state == "equal" for s in before)
    agreed = "to the bit" if exact else f"within {report.tolerance:g}"
    return f"{text}. The {len(before)} steps before it agree {agreed}, {before[-1].name} the last"


def _steps(report: Report) -> Renderable:
    out = table("step", "op", "state", "rows", "elements", "relative RMS", "max error", "ulp",
                right=(3, 4, 5, 6, 7))  # fmt: skip
    start = max(0, report.first - 2)
    for s in report.steps[start : start + SHOWN]:
        out.add_row(*map(escape, _cells(s)), style=None if s.agrees else "red")
    return out


def _cells(s: StepDifference) -> list[str]:
    if s.state == "equal" or s.first is None:
        return [s.name, s.op, s.state, "", "", "", "", ""]
    if s.relative_rms is None:
        return [s.name, s.op, s.state, str(s.rows), "-", "-", "-", "-"]
    return [
        s.name, s.op, s.state, str(s.rows), f"{s.elements}/{s.total}", f"{s.relative_rms:.3g}",
        f"{s.max_error:.3g}", str(s.ulp),
    ]  # fmt: skip


def _blame(blame: dict[str, Any]) -> Renderable:
    rows = blame_rows(blame)
    return group(Text("blame", style="bold"), facts(rows))


def blame_rows(blame: dict[str, Any]) -> list[tuple[str, str]]:
    """What was found about the first step that differs, as name and value."""
    rows = [("inputs", f"{', '.join(blame['inputs'])}: the same on both sides")]
    rows += [("weights", name) for name in blame["weights"]]
    for side, again in blame["again"].items():
        judged = blame["judge"].get(side)
        text = f"run again: {again}" if again != "a recorded run" else again
        if judged:
            text += "; the reference's bits" if judged["right"] else "; not the reference's bits"
        rows.append((side, text))
    rows.append(("verdict", blame["verdict"]))
    if blame["piece"]:
        rows += _piece(blame["piece"])
    return rows


def _piece(p: dict[str, Any]) -> list[tuple[str, str]]:
    """The smallest piece, in the words of its kind."""
    if p["kind"] == "type":
        return [("tensor", f"{p['tensor']}: {p['A']} in A, {p['B']} in B")]
    if p["kind"] == "element":
        where = [f"element {p['element']}"]
        where += [f"{key} {p[key]}" for key in ("of", "column", "head", "component") if key in p]
        read = ", ".join(f"{slot} {x!r}" for slot, x in p["inputs"].items())
        return [("piece", ", ".join(where)), (f"{p['side']} has", repr(p["found"])),
                ("made of", read or "a whole row")]  # fmt: skip
    place = f"{p['tensor']} row {p['row']}"
    if p["kind"] == "sum":
        joins = f"when unit {p.get('unit')} (lane {p.get('lane')}) joins"
        return [
            ("piece", f"{place}: every unit alone is right, their sum is not"),
            ("goes wrong", joins),
        ]
    if "block" in p:
        place += f" block {p['block']}"
    if p.get("word") is not None:
        place += f" word {p['word']}"
    if p.get("places"):
        bits = ", ".join(f"{byte}.{bit}" for byte, bit in p["places"])
        place += f" (byte.bit {bits} of the block)"
    rows = [("piece", place)]
    if "columns" in p:
        first, last = p["columns"]
        unit = f"unit {p['unit']}, lane {p['lane']}, columns {first} to {last - 1}"
        rows.append(("inside", unit))
    if "column" in p:
        rows.append(("weight", f"column {p['column']}"))
    rows += [(f"{s} reads", _reading(p[s])) for s in ("A", "B") if s in p]
    if "read" in p:
        rows.append((f"{p['side']} reads", _reading(p["read"])))
        rows.append(("the file says", _reading(p["file"])))
    elif "found" in p:
        rows.append((f"{p['side']} / reference", f"{p['found']!r} / {p['reference']!r}"))
    if "bytes" in p:
        both = p["bytes"] if isinstance(p["bytes"], list) else [p["bytes"]]
        rows.append(("block", " / ".join(both)))
    return rows


def _reading(reading: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in reading.items())
