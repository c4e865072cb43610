"""Models larger than the machine at hand: synth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.options import Json
from pnrt.cli.output import progress, show

Layers = Annotated[int | None, typer.Option(help="blocks, instead of the model's own number")]


@app.command()
def synth(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="the GGUF file to write")],
    preset: Annotated[str, typer.Option(metavar="NAME", help="qwen3.8-27b-pn3 or tiny-qwen35")],
    layers: Layers = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same bytes")] = 0,
    as_json: Json = False,
) -> None:
    """Write a model of real shapes and formats with random weights, to measure with."""
    import time

    from pnrt.models.presets import blueprint
    from pnrt.screen.plan import synth_screen
    from pnrt.synth import synthesize

    paper = blueprint(preset, layers)
    start = time.perf_counter()
    with progress() as tell:
        synthesize(paper, target, seed, tell)
    seconds = time.perf_counter() - start
    result = {
        "file": target,
        "title": paper.title,
        "layers": paper.metadata[f"{paper.metadata['general.architecture']}.block_count"],
        "bytes": target.stat().st_size,
        "weights": sum(t.elements for t in paper.tensors.values()),
        "seconds": seconds,
    }
    show(as_json, result, lambda: synth_screen(result))
