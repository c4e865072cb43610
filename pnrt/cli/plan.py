"""Models larger than the machine at hand: plan, synth."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.options import Cache, Chunk, Json
from pnrt.cli.output import progress, show
from pnrt.errors import ModelError

Layers = Annotated[int | None, typer.Option(help="blocks, instead of the model's own number")]


@app.command()
def plan(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="a GGUF file")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="a model on paper, instead of a file")
    ] = None,
    layers: Layers = None,
    vram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="GPU memory: 16280MiB, or device to ask it"),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="memory of the host; default: this machine's")
    ] = None,
    context: Annotated[int | None, typer.Option(help="tokens to make room for")] = None,
    kv: Cache = "f16",
    chunk: Chunk = 512,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/s", help="of that memory: gives tokens per second")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how large a model is, what fits, and what the memory's bandwidth allows; load nothing."""
    from pnrt import plan as plans
    from pnrt.container.gguf import open_gguf
    from pnrt.models.presets import blueprint, presets
    from pnrt.screen.plan import plan_screen

    if (file is None) == (preset is None):
        raise ModelError(
            f"plan needs a FILE or --preset NAME, and only one of them; "
            f"presets are {', '.join(presets())}."
        )
    if layers is not None and preset is None:
        raise ModelError("--layers changes a preset; a file has the layers it has. Leave it out.")
    limits, said = {"vram": None}, ""
    if vram == "device":
        limits["vram"], said = plans.device_memory()
    elif vram is not None:
        limits["vram"] = plans.parse_bytes(vram, "--vram")
    limits["ram"] = None if ram is None else plans.parse_bytes(ram, "--ram")
    if vram is None and ram is None:
        limits["ram"] = plans.machine_memory()
    with contextlib.ExitStack() as stack:
        if preset is not None:
            opened = blueprint(preset, layers)
            bandwidth = opened.bandwidth if bandwidth is None else bandwidth
        else:
            opened = stack.enter_context(open_gguf(file))
        result = plans.plan(
            opened, context=context, kv=kv, bandwidth=bandwidth, chunk=chunk, **limits
        )
    result["notes"] += [said] * bool(said)
    show(as_json, result, lambda: plan_screen(result))


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
