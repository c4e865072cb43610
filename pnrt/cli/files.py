"""Look into files: inspect, check, compare, and the table of formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import opening
from pnrt.cli.options import E4M3Id, File, Json, ScaleEncoding, Ternary
from pnrt.cli.output import progress, show
from pnrt.errors import FormatError


@app.command()
def inspect(
    file: File,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="look at one tensor")] = None,
    block: Annotated[
        str | None, typer.Option(metavar="ROW,BLOCK", help="and at one of its blocks")
    ] = None,
    hashes: Annotated[bool, typer.Option("--hash", help="sha256 of every tensor")] = False,
    e4m3_id: E4M3Id = None,
    scale_encoding: ScaleEncoding = None,
    ternary: Ternary = "cyb_ternary",
    as_json: Json = False,
) -> None:
    """Show what is in a file: keys and tensors, one tensor, or one block byte by byte."""
    from pnrt.container.kinds import open_any
    from pnrt.debug.inspect import block_view, file_view, parse_block, tensor_view
    from pnrt.screen import files as screen

    if block and tensor is None:
        raise FormatError("--block needs --tensor: a block belongs to a tensor. Name it.")
    with open_any(file, **opening(e4m3_id, scale_encoding, ternary)) as opened, progress() as tell:
        if block:
            view = block_view(opened, tensor, *parse_block(block))
            shown = screen.block_screen
        elif tensor is not None:
            view, shown = tensor_view(opened, tensor), screen.tensor_screen
        else:
            view = file_view(
                opened, hashes=hashes, progress=lambda done, total: tell("hashing", done, total)
            )
            shown = screen.file_screen
    show(as_json, view, lambda: shown(view))


@app.command()
def check(
    file: File,
    e4m3_id: E4M3Id = None,
    scale_encoding: ScaleEncoding = None,
    ternary: Ternary = "cyb_ternary",
    codes: Annotated[
        bool, typer.Option("--codes", help="show how often each code occurs, by tensor")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="what is odd but not wrong also exits with 1")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find everything that is wrong with a file; exit status 1 if anything is.

    Notes tell what is odd, though valid: dead blocks, zero and subnormal scales, saturated codes,
    PN tensors that may be rotated.
    """
    from pnrt.debug.check import FileFinding, check_file
    from pnrt.debug.health import Health
    from pnrt.screen import files as screen

    notes: list[FileFinding] = []
    health: list[Health] = []
    about: dict[str, str] = {}
    with progress() as tell:
        found = check_file(
            file,
            notes=notes,
            health=health,
            about=about,
            progress=lambda done, total: tell("checking", done, total),
            **opening(e4m3_id, scale_encoding, ternary),
        )
    result = {"file": file, "findings": found, "notes": notes, **about, "tensors": health}
    show(as_json, result, lambda: screen.check_screen(result, codes))
    raise typer.Exit(1 if found or (strict and notes) else 0)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A")],
    b: Annotated[Path, typer.Argument(metavar="B")],
    e4m3_id: E4M3Id = None,
    scale_encoding: ScaleEncoding = None,
    ternary: Ternary = "cyb_ternary",
    as_json: Json = False,
) -> None:
    """Compare two files: keys, tensors, types, weights; exit status 1 if anything differs."""
    from pnrt.debug.compare import compare_files
    from pnrt.screen import files as screen

    with progress() as tell:
        result = compare_files(a, b, tell, **opening(e4m3_id, scale_encoding, ternary))
    show(as_json, result, lambda: screen.compare_screen(result))
    raise typer.Exit(0 if result["equal"] else 1)


@app.command()
def formats(
    error: Annotated[
        Path | None, typer.Option(metavar="FILE", help="measure each format on this model")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="also write the screen as an SVG file")] = None,
    e4m3_id: E4M3Id = None,
    scale_encoding: ScaleEncoding = None,
    ternary: Ternary = "cyb_ternary",
    as_json: Json = False,
) -> None:
    """The table of weight formats."""
    from pnrt.container.writer import check_target
    from pnrt.debug.survey import format_errors, format_rows
    from pnrt.screen import files as screen

    if svg:
        check_target(svg, *filter(None, [error]))
    rows = format_rows()
    if error:
        with progress() as tell:
            measured, sources = format_errors(
                error, tell, **opening(e4m3_id, scale_encoding, ternary)
            )
        rows = [{**row, **measured.get(row["name"], {"relative_rms": None})} for row in rows]
        show(as_json, rows, lambda: screen.errors_chart(rows, error.name, sources), svg)
    else:
        show(as_json, rows, lambda: screen.formats_table(rows), svg)
