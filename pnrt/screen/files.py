"""Screens about files: their contents, faults and differences, and the table of formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.containers import Renderables
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pnrt.screen.parts import (
    Renderable,
    bits,
    facts,
    group,
    number,
    safe,
    shape,
    short,
    size,
    table,
    visible,
)

if TYPE_CHECKING:
    from pnrt.debug.check import FileFinding
    from pnrt.debug.health import Health


def file_screen(view: dict[str, Any]) -> Renderable:
    """A file: header, keys, tensors, types."""
    keys = table("key", "type", "value*")
    for row in view["metadata"]:
        value = row["value"]
        if "length" in row:
            inside = ", ".join(str(v) for v in value)
            value = f"[{inside}{', ...' if row['length'] > len(value) else ''}] {row['length']}"
        text = row.get("problem", str(value))
        keys.add_row(
            safe(row["key"]), row["type"],
            safe(text if len(text) <= 120 else f"{text[:117]}..."),
        )  # fmt: skip
    tensors = table("tensor", "shape", "type", "offset", "bytes", right=(1, 3, 4))
    hashed = view["tensors"] and "sha256" in view["tensors"][0]
    if hashed:
        tensors.add_column("sha256", no_wrap=True)
    for t in view["tensors"]:
        cells = [safe(t["name"]), shape(t["shape"]), t["type"], f"{t['offset']:#x}"]
        cells += [str(t["bytes"])] + ([t["sha256"]] if hashed else [])
        tensors.add_row(*cells, style=None if t["known"] else "yellow")
    types = table("type", "tensors", "weights", "bytes", "bits/weight", right=(1, 2, 3, 4))
    for r in view["types"]:
        types.add_row(
            r["type"], str(r["tensors"]), str(r["elements"]), str(r["bytes"]),
            bits(r["bits_per_weight"]),
        )  # fmt: skip
    head = (
        f"{view['path']}: {view['container']} {view['version']}, {size(view['size'])}, "
        f"{bits(view['bits_per_weight'])} bits per weight, alignment {view['alignment']}; "
        f"types as pnrt {view['pnrt']} knows them"
    )
    notes = [Text(note, style="yellow") for note in view["notes"]]
    return group(Text(head), keys, tensors, types, *notes)


def tensor_screen(view: dict[str, Any]) -> Renderable:
    """One tensor: its place, the spread of its values, how often each code occurs."""
    rows = [
        ("tensor", view["name"]),
        ("shape", shape(view["shape"])),
        ("type", f"{view['type']}, {bits(view['bits_per_weight'])} bits per weight"),
        ("bytes", f"{view['bytes']} from {view['offset']:#x}"),
    ]
    if not view["known"]:
        return facts([*rows, ("begins", bytes.fromhex(view["hex"]).hex(" ")),
                      ("decoded", f"no. {view['advice']}")])  # fmt: skip
    rows += [
        ("values", f"{short(view['min'])} to {short(view['max'])}"),
        ("mean, rms", f"{short(view['mean'])}, {short(view['rms'])}"),
        ("zeros", f"{view['zeros']}, not finite: {view['nonfinite']}"),
    ]
    if "codes" not in view:
        return facts(rows)
    rows.append(("empty groups", view["zero_scales"]))
    total = sum(count for _, count in view["codes"]) or 1
    most = max((count for _, count in view["codes"]), default=1)
    out = table("code", "share", "", right=(0, 1))
    for code, count in view["codes"]:
        bar = Text("▇" * round(40 * count / most), style="cyan")
        out.add_row(str(code), f"{100 * count / total:.2f} %", bar)
    return group(facts(rows), out)


def block_screen(view: dict[str, Any]) -> Renderable:
    """One block: bytes, scales, codes and the values they make, eight to a line."""
    raw = view["hex"]
    dump = [raw[i : i + 32] for i in range(0, len(raw), 32)]
    lines = [" ".join(line[i : i + 2] for i in range(0, len(line), 2)) for line in dump]
    rows = [
        ("tensor", f"{view['tensor']}, {view['type']}"),
        ("block", f"row {view['row']} block {view['block']}, byte {view['offset']:#x}"),
        ("bytes", "\n".join(lines)),
    ]
    if view["scales"] is not None:
        rows.append((f"scales per {view['group']}", ", ".join(short(v) for v in view["scales"])))
    if view["offsets"] is not None:
        rows.append(("offsets", ", ".join(short(v) for v in view["offsets"])))
    out = table("weight", *(f"+{i}" for i in range(8)), right=range(9))
    for start in range(0, len(view["values"]), 8):
        codes = (view["codes"] or [])[start : start + 8]
        if codes:
            out.add_row(str(view["first"] + start), *(str(c) for c in codes), style="cyan")
        values = view["values"][start : start + 8]
        out.add_row("" if codes else str(view["first"] + start), *(short(v) for v in values))
    bad = [
        Text(f"byte {f['byte']}: {f['found']}; {f['allowed']}", style="red")
        for f in view["findings"]
    ]
    return group(facts(rows), out, *bad)


def check_screen(result: dict[str, Any], codes: bool = False) -> Renderable:
    """Findings, one line each, then what is odd but not wrong; with codes how often each occurs."""
    parts: list[Renderable] = [Text(visible(str(f)), style="red") for f in result["findings"]]
    parts += [Text(visible(f"note: {n}"), style="yellow") for n in _fewer(result["notes"])]
    if codes:
        parts.append(_codes_table(result["tensors"]))
    if "rotation" in result:
        parts.append(Text(visible(f"rotation: {result['rotation']}"), style="dim"))
    count = len(result["findings"])
    last = f"{count} finding{'s' * (count != 1)}" if count else "nothing is wrong"
    return group(*parts, Text(f"{result['file']}: {last}", style="" if count else "green"))


# notes of one kind shown one by one; more of them are counted
SHOWN_NOTES = 4


def _fewer(notes: Sequence[FileFinding]) -> list[str]:
    """The notes, but only the first few of those that mean the same in many tensors."""
    kinds: dict[str, list[FileFinding]] = {}
    for note in notes:
        kinds.setdefault(note.allowed, []).append(note)
    lines = []
    for meaning, alike in kinds.items():
        lines += [str(n) for n in alike[:SHOWN_NOTES]]
        more = len(alike) - SHOWN_NOTES
        if more > 0:
            lines.append(f"and {more} more of these: {meaning} (--json lists them)")
    return lines


def _codes_table(tensors: Sequence[Health]) -> Renderable:
    out = table("tensor*", "type", "blocks", "outermost", "codes, lowest first", right=(2, 3))
    for t in tensors:
        if t.codes is not None:
            share = "-" if t.saturated is None else f"{t.saturated:.1%}"
            out.add_row(visible(t.tensor), t.format, str(t.blocks), share, _histogram(t.codes))
    return out


def _histogram(codes: Sequence[int]) -> str:
    """A bar per code; of more than 32 codes neighbours share one."""
    step = max(1, len(codes) // 32)
    sums = [sum(codes[i : i + step]) for i in range(0, len(codes), step)]
    most = max(sums) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * n // most)] for n in sums)


def compare_screen(result: dict[str, Any]) -> Renderable:
    """What differs between two files, the first such block in bytes; equal tensors are counted."""
    parts: list[Renderable] = []
    if result["metadata"]:
        out = table("key*", "A*", "B*")
        for row in result["metadata"]:
            a, b = ("-" if row[s] is None else row[s] for s in ("a", "b"))
            out.add_row(safe(row["key"]), safe(a), safe(b))
        parts.append(out)
    apart = [t for t in result["tensors"] if t.kind != "same"]
    if apart:
        columns = ("tensor*", "", "A", "B", "relative RMS", "max", "ulp", "blocks", "first")
        out = table(*columns, right=(4, 5, 6, 7, 8))
        for t in apart:
            numbers = ("",) * 5
            if t.first:
                row, block = t.first
                numbers = (
                    f"{t.relative_rms:.4g}", f"{t.max_error:.4g}", str(t.ulp), str(t.blocks),
                    f"{row},{block}",
                )  # fmt: skip
            out.add_row(safe(t.name), t.kind, t.a, t.b, *numbers)
        parts.append(out)
    first = next((t for t in apart if t.first), None)
    if first:
        parts += [Text(visible(f"{first.name} row {first.first[0]} block {first.first[1]}:")),
                  _both_blocks(first), Text("")]  # fmt: skip
    parts += [Text(visible(note), style="yellow") for note in result["notes"]]
    same = len(result["tensors"]) - len(apart)
    parts.append(Text(f"{same} of {len(result['tensors'])} tensors are the same bytes"))
    return Renderables(parts)


def _both_blocks(t: Any) -> Renderable:
    """The bytes of a block in A and in B; in one format those that differ stand out."""
    a, b = bytes.fromhex(t.a_hex), bytes.fromhex(t.b_hex)
    out = Table.grid(padding=(0, 2))
    for title, raw, other in ((f"A {t.a}", a, b), (f"B {t.b}", b, a)):
        text = Text()
        for i, byte in enumerate(raw):
            apart = t.a == t.b and byte != other[i]
            text.append(f"{byte:02x}", "bold red" if apart else "")
            text.append("\n" if i % 32 == 31 and i + 1 < len(raw) else " ")
        out.add_row(title, text)
    return out


def converted(result: dict[str, Any]) -> Renderable:
    """What became of every tensor."""
    renamed = any(row["name"] != row["to"] for row in result["tensors"])
    out = table("tensor*", *["name there*"] * renamed, "from", "to")
    for row in result["tensors"]:
        names = (row["name"], row["to"])[: 1 + renamed]
        out.add_row(*map(safe, names), row["source"], row["target"])
    return group(out, Text(f"{result['file']}: {size(result['bytes'])}"))


def formats_table(rows: Sequence[dict[str, Any]]) -> Renderable:
    """Every format."""
    # short names: without the last column, which gives way, the table fits 100 characters
    columns = ["format", "id", "bits", "block", "bytes", "scale", "align"]
    columns += ["activations", "product on", "what it is*"]
    out = table(*columns, right=(1, 2, 3, 4, 5, 6))
    for row in rows:
        out.add_row(
            row["name"], number(row["id"]), bits(row["bits_per_weight"]), str(row["block"]),
            str(row["bytes"]), number(row["group"] or None), str(row["align"]),
            ", ".join(row["activations"]) or "-", ", ".join(row["backends"]) or "-",
            escape(row["title"]),
        )  # fmt: skip
    return out


def errors_chart(rows: Sequence[dict[str, Any]], file: str, sources: Sequence[str]) -> Renderable:
    """What each format costs on a model: relative RMS, most bits first, bars by its logarithm.

    sources: the formats the model is in.
    """
    out = table("format", "bits", "matrices", "relative RMS", "", right=(1, 2, 3))
    measured = [row for row in rows if row["relative_rms"] is not None]
    for row in sorted(measured, key=lambda row: -row["bits_per_weight"]):
        value = row["relative_rms"]
        # from 0.0001, nothing to see, to 1, everything lost
        length = round(10 * (4 + math.log10(max(value, 1e-4))))
        out.add_row(
            row["name"], bits(row["bits_per_weight"]), f"{row['matrices']}/{row['of']}",
            f"{value:.5f}", Text("▇" * min(length, 48), style="cyan"),
        )  # fmt: skip
    last = [
        f"error over the matrices of {visible(file)}, up to 64 rows of each; a bar of 10 is tenfold"
    ]
    missing = [row["name"] for row in rows if row["weights"] and row["relative_rms"] is None]
    if missing:
        last.append(f"no matrix fits the block or the range of {', '.join(missing)}")
    if any(row["matrices"] < row["of"] for row in measured):
        last.append("only formats measured on the same matrices compare")
    lossy = [name for name in sources if name not in ("f32", "f16", "bf16")]
    if lossy:
        last.append(f"the file is in {', '.join(lossy)}: what that lost is in no number")
    return group(out, *map(Text, last))
