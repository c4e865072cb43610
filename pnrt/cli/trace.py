"""Record a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import prompted
from pnrt.cli.options import Chunk, Json, runs_model
from pnrt.cli.output import progress, show
from pnrt.cli.watch import Dispatch, NanStop, watched
from pnrt.errors import ModelError

Text = Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT")]
Ids = Annotated[str | None, typer.Option("--tokens", metavar="1,2,3", help="ids, instead of -p")]
Taps = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="only these steps, e.g. 'blk.*.ffn*'")
]


@app.command()
@runs_model
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a model, or a trace to show")],
    prompt: Text = None,
    tokens: Ids = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="RUN.trace")] = None,
    taps: Taps = None,
    full: Annotated[
        bool, typer.Option("--full/--digest", help="write all values, or hashes and statistics")
    ] = False,
    all_positions: Annotated[bool, typer.Option("--all", help="every position's logits")] = False,
    chunk: Chunk = 512,
    nan_stop: NanStop = False,
    dispatch: Dispatch = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Record every step of a run by name: range, mean, rms, NaNs, hash, and with --full values."""
    from pnrt.container.writer import check_target
    from pnrt.debug.trace import Trace, is_trace, record
    from pnrt.screen import trace as screen

    if is_trace(file):
        if prompt or tokens or out:
            raise ModelError(f"{file}: is a trace; it is shown, not run. Name a model, or drop -p.")
        with Trace(file) as stored:
            show(as_json, stored.index, lambda: screen.trace(stored.index, file.stat().st_size))
        return
    # who hunts a NaN wants to see what broken weights do; without that they are refused
    options["validate"] = not nan_stop
    if out:
        check_target(out, file)
    with (
        prompted(file, prompt, tokens, **options) as (model, ids),
        watched(model, nan_stop, dispatch) as also,
        progress() as tell,
    ):
        index = record(
            model, ids, out, taps=taps or (), full=full, chunk=chunk, all=all_positions,
            about={"text": prompt}, also=also, progress=tell,
        )  # fmt: skip
    nbytes = out.stat().st_size if out else None
    show(as_json, index, lambda: screen.trace(index, nbytes))
