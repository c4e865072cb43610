"""The first command to try: a small real model, made PN here and now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.options import Json, Threads
from pnrt.cli.output import console, progress, show_json
from pnrt.errors import DeviceError


@app.command()
def demo(
    svg: Annotated[Path | None, typer.Option(help="also write the screen as an SVG file")] = None,
    offline: Annotated[bool, typer.Option(help="do not use the network")] = False,
    n: Annotated[int, typer.Option("-n", min=1, help="tokens per answer")] = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Quantize a small real model to PN, let both answer, and measure the distance."""
    from pnrt import demo as demos
    from pnrt.screen import models as screen

    out = console(record=svg is not None, quiet=as_json)
    with progress() as tell:
        try:
            if offline and demos.cached_model() is None:
                raise DeviceError(
                    "demo: the real model is not in the cache; --offline allows no download. "
                    "Leave --offline out once."
                )
            pair = demos.real_pair(tell)
        except DeviceError as error:
            tell(f"{error}\nA tiny random model, made here and now, stands in for it.", -1, 0)
            pair = demos.tiny_pair(tell)
    out.print(screen.demo_head(pair))
    with progress() as tell:
        result = demos.run(pair, n=n, threads=threads, progress=tell)
    if as_json:
        show_json(result)
        return
    out.print(screen.demo_answers(result))
    out.print(screen.demo_table(result))
    if svg:
        out.save_svg(str(svg), title="pnrt demo")
