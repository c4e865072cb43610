"""Screens about models: plans, scores, speeds, the machine, the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.containers import Renderables
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from pnrt.score import Estimate, Perplexity
from pnrt.screen.parts import Renderable, facts, group, safe, shape, size, table, visible

if TYPE_CHECKING:
    from pnrt.demo import Pair
    from pnrt.quantize import Decision, TensorReport
    from pnrt.score import Comparison


def plan_table(decisions: Sequence[Decision]) -> Renderable:
    """A quantization plan with its total."""
    out = table("tensor", "shape", "from", "to", "bytes", "why*", right=(1, 4))
    for d in decisions:
        style = "dim" if d.kept else ("yellow" if "no multiple" in d.reason else None)
        out.add_row(
            safe(d.name),
            shape(d.shape),
            d.source,
            d.target,
            f"{d.target_bytes}",
            escape(d.reason),
            style=style,
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
                safe(r.name), r.source, r.target, f"{r.relative_rms:.5f}", f"{r.max_error:.4g}",
                f"{row},{block}: {worst:.4f}",
            )  # fmt: skip
        parts.append(out)
    for d in summary["fallbacks"]:
        parts.append(Text(f"{visible(d.name)}: {d.target}, because {d.reason}", style="yellow"))
    before, after = summary["source_bytes"], summary["bytes"]
    parts.append(Text(f"{summary['file']}: {size(before)} -> {size(after)}, checked"))
    return Renderables(parts)


def plus_minus(estimate: Estimate, digits: int = 5) -> str:
    """A mean with its standard error."""
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def score_table(
    result: Perplexity | Comparison, settings: dict[str, dict[str, str]], model: str, base: str
) -> Renderable:
    """Perplexity, or the comparison in the order the field prints it, and how it was computed."""
    where = f"{result.tokens} tokens in {result.windows} windows of {result.ctx}"
    how = [(k.replace("_", " "), ", ".join(map(" ".join, v.items()))) for k, v in settings.items()]
    if isinstance(result, Perplexity):
        return facts([("perplexity", plus_minus(result.perplexity, 4)), ("over", where), *how])
    rows = [
        (f"perplexity of {model}", plus_minus(result.model, 4)),
        (f"perplexity of {base}, base", plus_minus(result.base, 4)),
        ("ln of their ratio", plus_minus(result.log_ratio)),
        ("mean KLD", plus_minus(result.kld, 6)),
        ("median KLD", f"{result.kld_median:.6f}"),
        ("90 % KLD", f"{result.kld_p90:.6f}"),
        ("95 % KLD", f"{result.kld_p95:.6f}"),
        ("99 % KLD", f"{result.kld_p99:.6f}"),
        ("maximum KLD", f"{result.kld_max:.6f}"),
        ("same top token", _share(result.same_top)),
        ("first other top", _flip(result.first_flip)),
        ("over", where),
    ]
    return facts([*rows, *how])


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.2f} ± {100 * estimate.error:.2f} %"


def _flip(flip: tuple[int, float] | None) -> str:
    return "none" if flip is None else f"token {flip[0]}, decided by {flip[1]:.4f} in logits"


def tokens_table(rows: Sequence[dict[str, Any]]) -> Renderable:
    """Ids, tokens and bytes of a tokenized text."""
    out = table("id", "token", "bytes", "kind", right=(0,))
    for row in rows:
        out.add_row(str(row["id"]), safe(row["token"]), row["bytes"], row["kind"])
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
        ("backend", _where(result)),
        ("settings", f"activations {result['activations']}, cache {result['kv']}"),
        ("load", f"{result['load_seconds']:.2f} s, packing and compiling included"),
        ("versions", f"pnrt {machine['pnrt']}, numba {machine['numba']}, numpy {machine['numpy']}"),
    ]
    return group(out, facts(rows))


def _where(result: dict[str, Any]) -> str:
    """The backend of a measurement, with what a token costs in launches where it is a GPU's."""
    if "device" not in result:
        return result["backend"]
    return (
        f"{result['backend']} on {result['device']}: {result['launches']} launches per token, "
        f"{result['graph_nodes']} kernels in the graph"
    )


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
            ("kernels", f"the {cpu['tier']} tier, prompts multiplied by {cpu['products']}"),
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
            out.add_row(k["op"], k["format"], k["cpu"] or "-", k["cuda"] or "-")
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
