"""Screens about models on paper and what is not known of a file: plan, synth, probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from pnrt.screen.parts import Renderable, bits, facts, group, shape, size, table

if TYPE_CHECKING:
    from pnrt.plan import Place
    from pnrt.probe import Probe


def plan_screen(result: dict[str, Any]) -> Renderable:
    """Sizes, what fits, and the bound of the memory's bandwidth."""
    model, sequence, read = result["model"], result["sequence"], result["read"]
    recurrent = f", {model['recurrent_layers']} of them recurrent" * bool(model["recurrent_layers"])
    head = [
        ("model", f"{model['name']}: {model['title']}"),
        ("layers", f"{model['layers']}{recurrent}"),
    ]
    out = table("tensors", "shape", "count", "weights", "format", "bytes", right=(2, 3, 5))
    for row in result["classes"]:
        out.add_row(
            row["name"], shape(row["shape"]) if row["shape"] else "", str(row["count"]),
            f"{row['weights']:,}", row["format"], f"{row['bytes']:,}",
        )  # fmt: skip
    total = f"{model['bytes']:,}"
    out.add_row("all", "", str(model["tensors"]), f"{model['weights']:,}", "", total, style="bold")
    states = ", ".join(f"{name} {n:,}" for name, n in sequence["states"].items())
    rows = [
        ("bits per weight", bits(model["bits_per_weight"])),
        ("state", f"{sequence['state']:,} bytes per sequence ({states})" if states else "none"),
        (
            f"cache ({sequence['kv']})",
            f"{sequence['cache_per_token']:,} bytes per token; {size(sequence['cache'])} for "
            f"{sequence['context']} tokens",
        ),
        (
            "read per token",
            f"weights {size(read['weights'])}, state {size(read['state'])}, cache "
            f"{size(read['cache'])}: {size(read['total'])} at {sequence['context']} tokens",
        ),
    ]
    parts = [facts(head), out, facts(rows)]
    if result["places"]:
        parts.append(_places(result["places"], sequence["context"], model["context_length"]))
    if result["bound"]:
        parts.append(_bound(result["bound"]))
    parts += [Text(f"note: {note}", style="dim") for note in result["notes"]]
    return group(*parts)


def _places(places: list[Place], context: int, longest: int) -> Renderable:
    out = table(
        "on the", "memory", "weights", "state", "buffers", "process", "per token",
        f"needed for {context}", "longest context", right=range(1, 9),
    )  # fmt: skip
    for p in places:
        most = f"{p.most} (all)" if p.most == longest else str(p.most)
        out.add_row(
            p.name, size(p.budget), size(p.weights), size(p.state), size(p.activations),
            size(p.overhead), f"{p.per_token:,}", size(p.needed),
            most if p.most else "does not fit", style=None if p.fits else "yellow",
        )  # fmt: skip
    return out


def _bound(bound: list[dict[str, Any]]) -> Renderable:
    title = f"no more tokens per second than this, at {bound[0]['bandwidth']:g} GB/s:"
    out = table("context", "bytes", "tokens/s", right=(0, 1, 2))
    for row in bound:
        speed = f"{row['tokens_per_second']:.1f}"
        out.add_row(str(row["context"]), size(row["bytes"]), speed)
    return group(Text(title), out)


def probe_table(results: list[Probe], verdict: str) -> Renderable:
    """Perplexities side by side, the lowest marked."""
    out = table("rotation", "blocks by width", "tokens", "perplexity", "error", right=(2, 3, 4))
    best = min(r.perplexity.value for r in results)
    for r in results:
        blocks = ", ".join(f"{w}: {b}" for w, b in r.blocks.items()) or "none"
        value, error = (f"{n:.6g}" for n in (r.perplexity.value, r.perplexity.error))
        style = "bold green" if r.perplexity.value == best else None
        out.add_row(r.name, blocks, str(r.tokens), value, error, style=style)
    return group(out, Text(verdict))


def synth_screen(result: dict[str, Any]) -> Renderable:
    """What `pnrt synth` wrote."""
    speed = result["bytes"] / max(result["seconds"], 1e-9)
    return facts(
        [
            ("wrote", result["file"]),
            ("model", f"{result['title']}, {result['layers']} layers, random weights"),
            ("size", f"{size(result['bytes'])}, {result['weights'] / 1e9:.2f} billion weights"),
            ("time", f"{result['seconds']:.1f} s, {size(speed)}/s"),
        ]
    )
