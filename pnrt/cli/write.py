"""Write files: quantize, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import extra_types
from pnrt.cli.options import E4M3Id, Json, ScaleEncoding, Ternary, Threads
from pnrt.cli.output import progress, show
from pnrt.errors import FileError, FormatError, ModelError


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    mix: Annotated[str, typer.Option(help="pn3, pn4, p0k, q4_k_m, or a format by itself")],
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
    e4m3_id: E4M3Id = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a model in other weight formats."""
    from pnrt.container.gguf import open_gguf
    from pnrt.models.rotate import rotation_to_apply
    from pnrt.quantize import plan, quantize_file
    from pnrt.screen import models as screen

    if target.suffix == ".model":
        raise FileError(f"{target}: quantize writes GGUF files; give the result another suffix.")
    rules = [_rule(text) for text in tensor_type or []]
    types = extra_types(e4m3_id)
    with open_gguf(source, extra_types=types) as file:
        decisions = plan(file, mix, rules, rotation_to_apply(file, rotate, rotation))
    if dry_run:
        show(as_json, decisions, lambda: screen.plan_table(decisions))
        return
    with progress() as tell:
        errors = quantize_file(
            source, target, mix, rules,
            rotation=rotation, rotate=rotate, threads=threads, extra_types=types, progress=tell,
        )  # fmt: skip
    summary = {
        "file": target,
        "bytes": target.stat().st_size,
        "source_bytes": source.stat().st_size,
        "fallbacks": [d for d in decisions if "no multiple" in d.reason],
        "tensors": errors,
    }
    show(as_json, summary, lambda: screen.quantized(summary, errors if report else []))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="a .model file of cyb")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF, or a .model file again")],
    to: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="format of the matrices, where it divides K"),
    ] = None,
    scale_encoding: ScaleEncoding = None,
    ternary: Ternary = "cyb_ternary",
    as_json: Json = False,
) -> None:
    """Write a `.model` file as GGUF, or as a `.model` with other encodings.

    `pnrt quantize` takes a GGUF result further. Without --to a GGUF file gets f32.
    """
    from pnrt.container.convert import convert_model
    from pnrt.container.cyb_model import CybModel
    from pnrt.container.kinds import open_any
    from pnrt.container.reencode import reencode_model
    from pnrt.screen import files as screen

    options = {"scale_encoding": scale_encoding, "ternary": ternary}
    with open_any(source, **options) as file, progress() as tell:
        if not isinstance(file, CybModel):
            raise FormatError(
                f"{source}: is a GGUF file; convert takes .model files. "
                "Change its formats with `pnrt quantize`."
            )
        again = target.suffix == ".model"
        write = reencode_model if again else convert_model
        told = lambda done, total: tell("writing", done, total)  # noqa: E731
        rows = write(file, target, to if again else to or "f32", told)
    result = {"file": target, "bytes": target.stat().st_size, "tensors": rows}
    show(as_json, result, lambda: screen.converted(result))


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ModelError(f"--tensor-type {text}: REGEX=FORMAT is needed, e.g. 'ffn_down=q8_0'.")
    return pattern, name
