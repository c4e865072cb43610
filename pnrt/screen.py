"""What the commands show: data in, rich renderables or JSON values out. Nothing here prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.columns import Columns
from rich.containers import Renderables
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pnrt.score import Estimate, Perplexity

if TYPE_CHECKING:
    from pnrt.demo import Pair
    from pnrt.quantize import Decision, TensorReport
    from pnrt.score import Comparison

# whatever rich can draw
Renderable = Any

UNITS = ("B", "KB", "MB", "GB", "TB")


def size(n: float) -> str:
    """Bytes for people: 1 MB is a million bytes."""
    for unit in UNITS:
        if n < 1000 or unit == UNITS[-1]:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("the last unit always returns")


def group(*parts: Renderable) -> Renderable:
    """One below the other."""
    return Renderables(parts)


def shape(sizes: Sequence[int]) -> str:
    """Row-major sizes: 49152 x 576."""
    return " x ".join(str(n) for n in sizes) or "1"


def table(*columns: str, right: Sequence[int] = (), title: str | None = None) -> Table:
    """An open table; `right` are the numbers of right-aligned columns. A name ending in * folds."""
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for i, name in enumerate(columns):
        out.add_column(
            name.rstrip("*"),
            justify="right" if i in right else "left",
            no_wrap=not name.endswith("*"),
            overflow="fold" if name.endswith("*") else "ellipsis",
        )
    return out


def facts(rows: Sequence[tuple[str, Any]]) -> Table:
    """Name and value, one pair per line."""
    out = Table.grid(padding=(0, 2))
    out.add_column(style="dim", no_wrap=True)
    out.add_column(overflow="fold")
    for name, value in rows:
        out.add_row(name, value if isinstance(value, Text) else escape(str(value)))
    return out


def file_screen(view: dict[str, Any]) -> Renderable:
    """A file: header, keys, tensors, types."""
    keys = table("key", "type", "value*")
    for row in view["metadata"]:
        value = row["value"]
        if "length" in row:
            inside = ", ".join(str(v) for v in value)
            value = f"[{inside}{', ...' if row['length'] > len(value) else ''}] {row['length']}"
        text = str(value)
        keys.add_row(
            escape(row["key"]), row["type"],
            escape(text if len(text) <= 120 else f"{text[:117]}...").replace("\n", "\\n"),
        )  # fmt: skip
    tensors = table("tensor", "shape", "type", "offset", "bytes", right=(1, 3, 4))
    hashed = view["tensors"] and "sha256" in view["tensors"][0]
    if hashed:
        tensors.add_column("sha256", no_wrap=True)
    for t in view["tensors"]:
        cells = [escape(t["name"]), shape(t["shape"]), t["type"], f"{t['offset']:#x}"]
        cells += [str(t["bytes"])] + ([t["sha256"]] if hashed else [])
        tensors.add_row(*cells, style=None if t["known"] else "yellow")
    types = table("type", "tensors", "weights", "bytes", "bits/weight", right=(1, 2, 3, 4))
    for r in view["types"]:
        types.add_row(
            r["type"], str(r["tensors"]), str(r["elements"]), str(r["bytes"]),
            _bits(r["bits_per_weight"]),
        )  # fmt: skip
    head = (
        f"{view['path']}: GGUF {view['version']}, {size(view['size'])}, "
        f"{_bits(view['bits_per_weight'])} bits per weight, alignment {view['alignment']}"
    )
    notes = [Text(note, style="yellow") for note in view["notes"]]
    return group(Text(head), keys, tensors, types, *notes)


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def tensor_screen(view: dict[str, Any]) -> Renderable:
    """One tensor: its place, the spread of its values, how often each code occurs."""
    rows = [
        ("tensor", view["name"]),
        ("shape", shape(view["shape"])),
        ("type", f"{view['type']}, {_bits(view['bits_per_weight'])} bits per weight"),
        ("bytes", f"{view['bytes']} from {view['offset']:#x}"),
        ("values", f"{_short(view['min'])} to {_short(view['max'])}"),
        ("mean, rms", f"{_short(view['mean'])}, {_short(view['rms'])}"),
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


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
        rows.append((f"scales per {view['group']}", ", ".join(_short(v) for v in view["scales"])))
    if view["offsets"] is not None:
        rows.append(("offsets", ", ".join(_short(v) for v in view["offsets"])))
    out = table("weight", *(f"+{i}" for i in range(8)), right=range(9))
    for start in range(0, len(view["values"]), 8):
        codes = (view["codes"] or [])[start : start + 8]
        if codes:
            out.add_row(str(view["first"] + start), *(str(c) for c in codes), style="cyan")
        values = view["values"][start : start + 8]
        out.add_row("" if codes else str(view["first"] + start), *(_short(v) for v in values))
    bad = [
        Text(f"byte {f['byte']}: {f['found']}; {f['allowed']}", style="red")
        for f in view["findings"]
    ]
    return group(facts(rows), out, *bad)


def check_screen(result: dict[str, Any]) -> Renderable:
    """Findings, one line each, then what is odd but not wrong."""
    parts: list[Renderable] = [Text(str(f), style="red") for f in result["findings"]]
    parts += [Text(f"note: {n}", style="yellow") for n in result["notes"]]
    count = len(result["findings"])
    last = f"{count} finding{'s' * (count != 1)}" if count else "nothing is wrong"
    return group(*parts, Text(f"{result['file']}: {last}", style="" if count else "green"))


def plan_table(decisions: Sequence[Decision]) -> Renderable:
    """A quantization plan with its total."""
    out = table("tensor", "shape", "from", "to", "bytes", "why*", right=(1, 4))
    for d in decisions:
        style = "dim" if d.kept else ("yellow" if "no multiple" in d.reason else None)
        out.add_row(
            d.name, shape(d.shape), d.source, d.target, f"{d.target_bytes}", d.reason, style=style
        )
    before = sum(d.source_bytes for d in decisions)
    after = sum(d.target_bytes for d in decisions)
    weights = sum(_elements(d) for d in decisions)
    total = f"{size(before)} -> {size(after)}, {8 * after / max(weights, 1):.3f} bits per weight"
    return group(out, Text(total))


def _elements(decision: Decision) -> int:
    out = 1
    for n in decision.shape:
        out *= n
    return out


def quantized(summary: dict[str, Any], reports: Sequence[TensorReport]) -> Renderable:
    """What `pnrt quantize` did; with reports the error of each tensor."""
    parts: list[Renderable] = []
    if reports:
        out = table(
            "tensor", "from", "to", "relative RMS", "max error", "worst block", right=(3, 4, 5)
        )
        for r in reports:
            row, block, worst = r.worst_block
            out.add_row(
                r.name, r.source, r.target, f"{r.relative_rms:.5f}", f"{r.max_error:.4g}",
                f"{row},{block}: {worst:.4f}",
            )  # fmt: skip
        parts.append(out)
    for d in summary["fallbacks"]:
        parts.append(Text(f"{d.name}: {d.target}, because {d.reason}", style="yellow"))
    before, after = summary["source_bytes"], summary["bytes"]
    parts.append(Text(f"{summary['file']}: {size(before)} -> {size(after)}, checked"))
    return Renderables(parts)


def plus_minus(estimate: Estimate, digits: int = 5) -> str:
    """A mean with its standard error."""
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def score_table(result: Perplexity | Comparison, model: str, base: str) -> Renderable:
    """Perplexity, or the comparison in the order the field prints it."""
    where = f"{result.tokens} tokens in {result.windows} windows of {result.ctx}"
    if isinstance(result, Perplexity):
        return facts([("perplexity", plus_minus(result.perplexity, 4)), ("over", where)])
    rows = [
        (f"perplexity of {model}", plus_minus(result.model, 4)),
        (f"perplexity of {base}", plus_minus(result.base, 4)),
        ("ln of their ratio", plus_minus(result.log_ratio)),
        ("mean KLD", plus_minus(result.kld)),
        ("median KLD", f"{result.kld_median:.5f}"),
        ("99 % KLD", f"{result.kld_p99:.5f}"),
        ("maximum KLD", f"{result.kld_max:.5f}"),
        ("same top token", _share(result.same_top)),
        ("first other top", _flip(result.first_flip)),
        ("over", where),
    ]
    return facts(rows)


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.2f} ± {100 * estimate.error:.2f} %"


def _flip(flip: tuple[int, float] | None) -> str:
    return "none" if flip is None else f"token {flip[0]}, decided by {flip[1]:.4f} in logits"


def tokens_table(rows: Sequence[dict[str, Any]]) -> Renderable:
    """Ids, tokens and bytes of a tokenized text."""
    out = table("id", "token", "bytes", right=(0,))
    for row in rows:
        out.add_row(str(row["id"]), escape(row["token"]), row["bytes"])
    return group(out, Text(f"{len(rows)} tokens"))


def bench_table(result: dict[str, Any]) -> Renderable:
    """Speeds with their spread, and the machine they belong to."""
    out = table("test", "tokens/s", "low", "high", right=(1, 2, 3))
    for r in result["runs"]:
        out.add_row(r["name"], f"{r['median']:.2f}", f"{r['low']:.2f}", f"{r['high']:.2f}")
    machine = result["machine"]
    rows = [
        ("model", f"{result['file']}, {size(result['bytes'])}"),
        ("cpu", f"{machine['cpu']} ({machine['target']}), {result['threads']} threads"),
        ("settings", f"activations {result['activations']}, cache {result['kv']}"),
        ("load", f"{result['load_seconds']:.2f} s, packing and compiling included"),
        ("versions", f"pnrt {machine['pnrt']}, numba {machine['numba']}, numpy {machine['numpy']}"),
    ]
    return group(out, facts(rows))


def doctor_screen(report: dict[str, Any]) -> Renderable:
    """The doctor's report, problems last."""
    rows: list[tuple[str, Any]] = [
        ("pnrt", report["pnrt"]),
        ("python", report["python"]),
        ("system", report["system"]),
    ]
    if "cpu" in report:
        cpu, threads, cache = report["cpu"], report["threads"], report["cache"]
        features = Text()
        for name, there in cpu["features"].items():
            features.append(f"{name} ", "green" if there else "dim strike")
        rows += [
            ("cpu", f"{cpu['model']} ({cpu['target']})"),
            ("kernels", f"the {cpu['tier']} tier"),
            ("features", features),
            ("threads", f"{threads['default']}, because: {threads['because']}"),
            ("layer", f"{threads['layer']}, {threads['region_us']} us per parallel region"),
            ("kernel cache", f"{cache['directory']}: {cache['kernels']} kernels"),
            ("cuda", report["cuda"]["backend"]),
        ]
    packages = [f"{d['name']} {d['installed'] or 'missing'}" for d in report["dependencies"]]
    rows.append(("packages", ", ".join(packages)))
    parts: list[Renderable] = [facts(rows)]
    if report.get("kernels"):
        out = table("op", "format", "cpu", "cuda", title="\nkernels")
        for k in report["kernels"]:
            out.add_row(k["op"], k["format"], k["cpu"], "-")
        parts.append(out)
    for p in report["problems"]:
        parts.append(Text(f"problem: {p['problem']}\n    fix: {p['fix']}", style="red"))
    if not report["problems"]:
        parts.append(Text("nothing is missing", style="green"))
    return Renderables(parts)


def demo_head(pair: Pair) -> Renderable:
    """What the demo runs."""
    style = "bold green" if pair.real else "bold yellow"
    return Text.assemble((pair.title, style), f"\n{pair.source.name} -> {pair.quantized.name}")


def demo_answers(result: dict[str, Any]) -> Renderable:
    """The same question, both answers."""
    panels = [
        Panel(
            escape(visible(side["text"]).strip()),
            title=f"{side['formats']}, {size(side['bytes'])}",
            title_align="left",
            width=49,
        )
        for side in result["sides"]
    ]
    return group(Padding(Text(f"> {result['prompt']}", style="bold"), (1, 0)), Columns(panels))


def visible(text: str) -> str:
    """Text with control characters shown, so that a model cannot drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def demo_table(result: dict[str, Any]) -> Renderable:
    """Sizes, speeds and the distance between both models."""
    a, b = result["sides"]
    out = table("", a["formats"], b["formats"], right=(1, 2))
    for name, key, form in (
        ("size", "bytes", size),
        ("bits per weight", "bits_per_weight", "{:.2f}".format),
        ("prompt, tokens/s", "prompt_tokens_per_second", "{:.0f}".format),
        ("generation, tokens/s", "tokens_per_second", "{:.0f}".format),
    ):
        out.add_row(name, form(a[key]), form(b[key]))
    distance: Comparison = result["distance"]
    out.add_row("perplexity", plus_minus(distance.base, 2), plus_minus(distance.model, 2))
    rows = [
        ("mean KLD", f"{plus_minus(distance.kld)} nats"),
        ("same top token", _share(distance.same_top)),
        ("measured over", f"{distance.tokens} tokens of the evaluation text in the package"),
        ("machine", f"{result['machine']['cpu']}, {result['threads']} threads"),
    ]
    return group(out, facts(rows))


def compare_screen(result: dict[str, Any]) -> Renderable:
    """What differs between two files; equal tensors are counted only."""
    parts: list[Renderable] = []
    if result["metadata"]:
        out = table("key", "A*", "B*")
        for row in result["metadata"]:
            out.add_row(row["key"], *(escape(str(row[s] or "-")) for s in ("a", "b")))
        parts.append(out)
    apart = [t for t in result["tensors"] if t.kind != "same"]
    if apart:
        columns = ("tensor", "", "A", "B", "relative RMS", "max", "ulp", "first block")
        out = table(*columns, right=(4, 5, 6, 7))
        for t in apart:
            numbers = ("", "", "", "")
            if t.first:
                row, block = t.first
                numbers = (
                    f"{t.relative_rms:.5f}", f"{t.max_error:.4g}", str(t.ulp), f"{row},{block}"
                )  # fmt: skip
            out.add_row(t.name, t.kind, t.a, t.b, *numbers)
        parts.append(out)
    same = len(result["tensors"]) - len(apart)
    parts.append(Text(f"{same} of {len(result['tensors'])} tensors are the same bytes"))
    return Renderables(parts)


def formats_table(rows: Sequence[dict[str, Any]]) -> Renderable:
    """Every format; with measured errors a bar for each."""
    measured = any(row.get("relative_rms") is not None for row in rows)
    columns = ["format", "id", "bits/weight", "block", "bytes", "scale per", "align", "cpu"]
    out = table(*columns, "relative RMS" if measured else "what it is*", right=(1, 2, 3, 4, 5, 6))
    worst = max((row.get("relative_rms") or 0.0 for row in rows), default=0.0)
    for row in rows:
        last: Renderable = escape(row["title"])
        if measured:
            last = _bar(row.get("relative_rms"), worst)
        out.add_row(
            row["name"], _number(row["id"]), f"{row['bits_per_weight']:.4g}", str(row["block"]),
            str(row["bytes"]), _number(row["group"] or None), str(row["align"]),
            "yes" if row["cpu"] else "-", last,
        )  # fmt: skip
    return out


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _bar(value: float | None, most: float) -> Renderable:
    if value is None:
        return Text("-", style="dim")
    length = round(24 * value / most) if most else 0
    return Text.assemble((f"{value:.5f} ", "bold"), ("▇" * length, "cyan"))


def plain(value: Any) -> Any:
    """Values as JSON knows them; what is not finite becomes a string."""
    if dataclasses.is_dataclass(value):
        fields = {f.name for f in dataclasses.fields(value) if not f.name.startswith("_")}
        return {name: plain(v) for name, v in vars(value).items() if name in fields}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
