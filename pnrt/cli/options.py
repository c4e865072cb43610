"""Arguments and options that several commands have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(metavar="FILE", help="a model file")]
Json = Annotated[bool, typer.Option("--json", help="write JSON instead of a table")]
Threads = Annotated[int | None, typer.Option(min=1, help="default: what the machine allows")]
Backend = Annotated[
    str, typer.Option(help="cpu, cuda, auto (cuda where a GPU can be used) or reference")
]
Activations = Annotated[str, typer.Option(help="q8_0 or f32: how products see their input")]
Cache = Annotated[str, typer.Option("--kv", help="f16 or f32: how keys and values are kept")]
Chunk = Annotated[int, typer.Option(min=1, help="prompt tokens per step; changes no result")]
Rotation = Annotated[
    str | None, typer.Option(help="none or hadamard:BLOCK, for a PN file that does not say it")
]
Context = Annotated[int | None, typer.Option(min=1, help="tokens to make room for")]
Temperature = Annotated[float, typer.Option("--temp", min=0, help="0 takes the likeliest token")]
TopK = Annotated[int, typer.Option(min=0, help="0: off")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="1: off")]
MinP = Annotated[float, typer.Option(min=0, max=1, help="0: off")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]
E4M3Id = Annotated[
    int | None,
    typer.Option(
        "--e4m3-id",
        min=0,
        max=2**32 - 1,
        metavar="ID",
        help="the tensor type id that means e4m3 in this file; its proposal uses 42",
    ),
]
Repack = Annotated[
    str | None,
    typer.Option(metavar="mxfp8[:ceil|:floor]", help="e4m3 weights as mxfp8; says the cost"),
]
ScaleEncoding = Annotated[
    str | None,
    typer.Option(metavar="f32|u32", help="what u32 scales of a .model's ternary tensors are"),
]
Ternary = Annotated[
    str,
    typer.Option(metavar="cyb_ternary|bitnet_ternary", help="what a .model's ternary codes mean"),
]
Prompt = Annotated[str, typer.Option("-p", "--prompt", metavar="TEXT")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="end where this text appears; repeatable")
]
Pre = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="the pre-tokenizer, for a file that names none or another"),
]

# what every command that runs a model passes on to `cli.loading.load`
MODEL = (
    ("backend", Backend, "cpu"),
    ("threads", Threads, None),
    ("activations", Activations, "q8_0"),
    ("kv", Cache, "f16"),
    ("rotation", Rotation, None),
    ("e4m3_id", E4M3Id, None),
    ("repack", Repack, None),
    ("pre", Pre, None),
)


def runs_model(command: Callable) -> Callable:
    """The command with the options of MODEL in place of its `**options`, where they arrive."""
    signature = inspect.signature(command, eval_str=True)
    *own, rest = signature.parameters.values()
    shared = [
        rest.replace(name=n, kind=rest.KEYWORD_ONLY, annotation=a, default=d) for n, a, d in MODEL
    ]
    command.__signature__ = signature.replace(parameters=[*own, *shared])
    return command
