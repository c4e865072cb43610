"""Prove and explain: selftest, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.options import Json, Threads
from pnrt.cli.output import progress, show


@app.command()
def selftest(
    backend: Annotated[str, typer.Option(help="cpu, ...: whose kernels")] = "cpu",
    ops: Annotated[
        str | None, typer.Option(metavar="GLOB", help="ops, as in 'matmul,rope' or 'r*'")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(metavar="A,B", help="only ops on weights of these formats")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="another seed, other inputs and shapes")] = 0,
    case: Annotated[
        str | None, typer.Option(metavar="CASE", help="one case of a report, or a saved .npz")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="keep the smallest failing inputs there")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Try every kernel on hard inputs against the reference; exit status 1 if one fails.

    Also 1 if no case was executed: a test that tested nothing has not passed.
    """
    from pnrt.debug.selftest import selftest as test
    from pnrt.screen import proof as screen

    with progress() as tell:
        report = test(
            backend,
            ops=_names(ops),
            formats=_names(formats),
            seed=seed,
            case=case,
            save=save,
            threads=threads,
            progress=tell,
        )
    result = {**vars(report), "passed": report.passed}
    show(as_json, result, lambda: screen.selftest_screen(report))
    raise typer.Exit(0 if report.passed else 1)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
