"""Measure models and the machine: score, bench, doctor."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import load, text_of
from pnrt.cli.options import Chunk, File, Json, Threads, runs_model
from pnrt.cli.output import progress, show
from pnrt.errors import ModelError


@app.command()
@runs_model
def score(
    file: File,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="a UTF-8 text file")],
    against: Annotated[
        Path | None, typer.Option(metavar="FILE2", help="also the KL divergence from this model")
    ] = None,
    against_activations: Annotated[
        str | None, typer.Option(metavar="q8_0|f32", help="of that model; FILE itself by default")
    ] = None,
    against_kv: Annotated[
        str | None, typer.Option(metavar="f16|f32", help="of that model; FILE itself by default")
    ] = None,
    ctx: Annotated[int, typer.Option(help="tokens per window")] = 512,
    chunks: Annotated[int | None, typer.Option(help="use only the first windows")] = None,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Perplexity of a model on a text; with --against* the distance of two models or precisions."""
    from pnrt import score as scores
    from pnrt.screen import models as screen

    words = text_of(text)
    options["context"] = ctx
    how = {key: options[key] for key in ("activations", "kv")}
    other = {"activations": against_activations, "kv": against_kv}
    other = {key: value or how[key] for key, value in other.items()}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load(file, **options))
        cut = scores.text_windows(model, words, ctx, chunks)
        if against is None and other == how:
            steps = scores.perplexity(model, cut)
        else:
            base = stack.enter_context(load(against or file, **options | other))
            scores.same_text(base, cut, words, ctx, chunks)
            steps = scores.compare(base, model, cut)
        with progress() as tell:
            tell("scoring windows", 0, len(cut))
            for result in steps:
                now = getattr(result, "perplexity", None) or result.model
                tell(f"scoring, perplexity {now.value:.4f}", result.windows, len(cut))
    settings = {"model_settings": how}
    settings |= {} if isinstance(result, scores.Perplexity) else {"base_settings": other}
    names = (file.name, (against or file).name)
    data = {**vars(result), **settings, "notes": model.notes}
    show(as_json, data, lambda: screen.score_table(result, settings, *names))


@app.command()
@runs_model
def bench(
    file: File,
    prompt: Annotated[int, typer.Option("-p", min=0, help="prompt tokens")] = 512,
    n: Annotated[int, typer.Option("-n", min=0, help="generated tokens")] = 128,
    repeats: Annotated[int, typer.Option("-r", min=1, help="counted runs of each")] = 3,
    depth: Annotated[int, typer.Option("-d", "--depth", min=0, help="tokens read before")] = 0,
    chunk: Chunk = 512,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Time a model: prompt and generated tokens per second."""
    from pnrt.bench import bench as time_model
    from pnrt.screen import models as screen

    start = time.perf_counter()
    context = depth + max(prompt, n) if depth else None
    with load(file, text=False, context=context, **options) as model:
        packed = time.perf_counter() - start
        with progress() as tell:
            result = time_model(model, prompt, n, repeats, chunk, tell, depth)
    settings = {key: options[key] for key in ("activations", "kv")}
    settings |= {"chunk": chunk, "depth": depth, "load_seconds": packed, "notes": model.notes}
    result = {"file": file.name, "bytes": file.stat().st_size, **settings, **result}
    show(as_json, result, lambda: screen.bench_table(result))


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="to probe")] = None,
    kernels: Annotated[bool, typer.Option(help="list every kernel by op and format")] = False,
    rotation_probe: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="run FILE under each rotation; a text or a file of one"),
    ] = None,
    ctx: Annotated[int, typer.Option(help="tokens per window of a probe")] = 256,
    chunks: Annotated[int, typer.Option(help="windows of a probe at most")] = 4,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what this machine offers and what is missing; exit status 1 if something is."""
    if (file is None) != (rotation_probe is None):
        raise ModelError(
            "doctor looks at the machine; with a FILE and --rotation-probe TEXT at that file. "
            "Give both or neither."
        )
    if rotation_probe is not None:
        _probe(file, rotation_probe, ctx, chunks, threads, as_json)
        return
    from pnrt.doctor import doctor as examine
    from pnrt.screen import models as screen

    report = examine(kernels)
    show(as_json, report, lambda: screen.doctor_screen(report))
    raise typer.Exit(1 if report["problems"] else 0)


def _probe(
    file: Path, text: str, ctx: int, chunks: int, threads: int | None, as_json: bool
) -> None:
    """Perplexities of a text under each rotation the file may have."""
    from pnrt import probe as probes
    from pnrt.container.gguf import open_gguf
    from pnrt.models.rotation import ROTATION_KEYS
    from pnrt.score import text_windows
    from pnrt.screen.plan import probe_table

    words = _words(text)
    with open_gguf(file) as opened:
        silent = not any(key.startswith(ROTATION_KEYS) for key in opened.metadata)
        probes.candidates(opened, None)
    options = {"threads": threads, "rotation": "none" if silent else None, "context": ctx}
    with load(file, **options) as model, progress() as tell:
        ctx = min(ctx, len(model.tokenizer.encode(words)))
        cut = text_windows(model, words, ctx, chunks)
        rotations = probes.candidates(model.file, None if silent else model.rotation)
        results = []
        for found in probes.probe(model, rotations, cut):
            results.append(found)
            tell(f"{found.name}: {found.perplexity.value:.4g}", len(results), len(rotations))
    said = probes.verdict(results)
    show(as_json, {"probes": results, "verdict": said}, lambda: probe_table(results, said))


def _words(text: str) -> str:
    """The file's content if there is such a file, else the text itself."""
    with contextlib.suppress(OSError):
        if Path(text).is_file():
            return text_of(Path(text))
    return text
