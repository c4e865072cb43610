"""Write files: quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.options import Json, Threads
from pnrt.cli.output import progress, show
from pnrt.errors import ModelError


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    mix: Annotated[str, typer.Option(help="pn3, pn4, p0k, q4_k_m, q8_0, q4_0 or f16")],
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=FORMAT", help="format of the tensors a pattern matches"),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="print the plan, write nothing")] = False,
    report: Annotated[bool, typer.Option(help="print the error of every tensor")] = False,
    rotate: Annotated[
        str | None,
        typer.Option(metavar="BLOCK|auto", help="rotate weights first (Hadamard), in such blocks"),
    ] = None,
    rotation: Annotated[
        str | None,
        typer.Option(help="none or hadamard:BLOCK: how a PN source is rotated that does not say"),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a model in other weight formats."""
    from pnrt.container.gguf import open_gguf
    from pnrt.quantize import plan, quantize_file, rotation_to_apply
    from pnrt.screen import models as screen

    rules = [_rule(text) for text in tensor_type or []]
    with open_gguf(source) as file:
        decisions = plan(file, mix, rules, rotation_to_apply(file, rotate, rotation))
    if dry_run:
        show(as_json, decisions, lambda: screen.plan_table(decisions))
        return
    with progress() as tell:
        errors = quantize_file(
            source, target, mix, rules,
            rotation=rotation, rotate=rotate, threads=threads, progress=tell,
        )  # fmt: skip
    summary = {
        "file": target,
        "bytes": target.stat().st_size,
        "source_bytes": source.stat().st_size,
        "fallbacks": [d for d in decisions if "no multiple" in d.reason],
        "tensors": errors,
    }
    show(as_json, summary, lambda: screen.quantized(summary, errors if report else []))


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ModelError(f"--tensor-type {text}: REGEX=FORMAT is needed, e.g. 'ffn_down=q8_0'.")
    return pattern, name
