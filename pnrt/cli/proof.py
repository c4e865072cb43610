"""Prove and explain: selftest, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import extra_types
from pnrt.cli.options import E4M3Id, File, Json, Rotation, Threads
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


@app.command()
def explain(
    file: File,
    numbers: Annotated[
        Path, typer.Argument(metavar="NUMBERS", help="an .npz with y (and x), or a full trace")
    ],
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="whose product or weights y is")
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="NAME", help="or the step of the model it is from")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="q8_0 or f32: how the product should see x")
    ] = None,
    rotation: Rotation = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="relative distance that counts as the same")
    ] = 1e-4,
    e4m3_id: E4M3Id = None,
    most: Annotated[int, typer.Option("-n", min=1, help="guesses to show")] = 12,
    as_json: Json = False,
) -> None:
    """Say which known mistake makes some numbers; exit status 1 if none does.

    NUMBERS.npz holds y [T, N] and x [T, K] of a product, or decoded weights as y [n, K] alone.
    """
    from pnrt.debug.explain import explain as find
    from pnrt.screen import proof as screen

    with progress() as tell:
        result = find(
            file,
            numbers,
            tensor=tensor,
            step=step,
            activations=activations,
            rotation=rotation,
            extra_types=extra_types(e4m3_id),
            tolerance=tolerance,
            progress=tell,
        )
    data = {**vars(result), "found": result.found}
    show(as_json, data, lambda: screen.explain_screen(result, most))
    raise typer.Exit(0 if result.found else 1)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
