"""Measure models and the machine: score, bench, doctor."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import load
from pnrt.cli.options import Activations, Cache, Chunk, E4M3Id, File, Json, Rotation, Threads
from pnrt.cli.output import progress, show


@app.command()
def score(
    file: File,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="a UTF-8 text file")],
    against: Annotated[
        Path | None, typer.Option(metavar="FILE2", help="also the KL divergence from this model")
    ] = None,
    ctx: Annotated[int, typer.Option(help="tokens per window")] = 512,
    chunks: Annotated[int | None, typer.Option(help="use only the first windows")] = None,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    rotation: Rotation = None,
    e4m3_id: E4M3Id = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a model on a text; with --against the distance of two models."""
    from pnrt import score as scores
    from pnrt.screen import models as screen

    words = text.read_text(encoding="utf-8")
    options = {"threads": threads, "activations": activations, "kv": kv, "rotation": rotation}
    options |= {"context": ctx, "e4m3_id": e4m3_id}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load(file, **options))
        cut = scores.text_windows(model, words, ctx, chunks)
        if against is None:
            steps = scores.perplexity(model, cut)
        else:
            base = stack.enter_context(load(against, **options))
            scores.same_text(base, cut, words, ctx, chunks)
            steps = scores.compare(base, model, cut)
        with progress() as tell:
            tell("scoring windows", 0, len(cut))
            for result in steps:
                now = getattr(result, "perplexity", None) or result.model
                tell(f"scoring, perplexity {now.value:.4f}", result.windows, len(cut))
    names = (file.name, against.name if against else "")
    show(as_json, result, lambda: screen.score_table(result, *names))


@app.command()
def bench(
    file: File,
    prompt: Annotated[int, typer.Option("-p", min=0, help="prompt tokens")] = 512,
    n: Annotated[int, typer.Option("-n", min=0, help="generated tokens")] = 128,
    repeats: Annotated[int, typer.Option("-r", min=1, help="counted runs of each")] = 3,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    chunk: Chunk = 512,
    rotation: Rotation = None,
    e4m3_id: E4M3Id = None,
    as_json: Json = False,
) -> None:
    """Time a model: prompt and generated tokens per second."""
    from pnrt.bench import bench as time_model
    from pnrt.screen import models as screen

    options = {"threads": threads, "activations": activations, "kv": kv, "rotation": rotation}
    start = time.perf_counter()
    with load(file, text=False, e4m3_id=e4m3_id, **options) as model:
        packed = time.perf_counter() - start
        with progress() as tell:
            result = time_model(model, prompt, n, repeats, chunk, tell)
    settings = {"activations": activations, "kv": kv, "chunk": chunk, "load_seconds": packed}
    result = {"file": file.name, "bytes": file.stat().st_size, **settings, **result}
    show(as_json, result, lambda: screen.bench_table(result))


@app.command()
def doctor(
    kernels: Annotated[bool, typer.Option(help="list every kernel by op and format")] = False,
    as_json: Json = False,
) -> None:
    """Say what this machine offers and what is missing; exit status 1 if something is."""
    from pnrt.doctor import doctor as examine
    from pnrt.screen import models as screen

    report = examine(kernels)
    show(as_json, report, lambda: screen.doctor_screen(report))
    raise typer.Exit(1 if report["problems"] else 0)
