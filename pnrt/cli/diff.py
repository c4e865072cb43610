"""Hold two runs against each other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import extra_types, prompt_ids
from pnrt.cli.options import E4M3Id, Json, Rotation
from pnrt.cli.output import progress, show
from pnrt.errors import ModelError

if TYPE_CHECKING:
    from pnrt.debug.diff import Report

# the run, and each other side is held against the first
DEFAULT_CHUNK = 512


@app.command()
def diff(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] A B",
            help="A and B: cpu, reference, cuda, cpu:avx2 (:avx512, :plain), a trace or a model. "
            "MODEL alone: with --split, --threads or --tier",
        ),
    ],
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="1,2,3")] = None,
    split: Annotated[
        str | None, typer.Option(metavar="1,7,all", help="the prompt fed in pieces of these sizes")
    ] = None,
    threads: Annotated[str | None, typer.Option(metavar="1,2", help="numbers of threads")] = None,
    tier: Annotated[
        str | None, typer.Option(metavar="avx512,avx2,plain", help="instruction sets")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="relative RMS a step may differ by; 0 demands equal bits")
    ] = 0.0,
    all_positions: Annotated[bool, typer.Option("--all", help="every position's logits")] = False,
    activations: Annotated[
        str | None, typer.Option(help="q8_0 or f32; default: as the trace has it, or q8_0")
    ] = None,
    kv: Annotated[str | None, typer.Option(help="f16 or f32; default likewise, or f16")] = None,
    rotation: Rotation = None,
    e4m3_id: E4M3Id = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="also write a report to look at")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the first step where two runs differ, and whose fault it is; exit status 1 if any."""
    from pnrt.container.writer import atomic, check_target
    from pnrt.screen import diff as screen

    if html:
        check_target(html, *map(Path, sides))
    model, words = _words(sides, split or threads or tier)
    options = {"rotation": rotation, "extra_types": extra_types(e4m3_id)}
    for key, value in (("activations", activations), ("kv", kv)):
        options |= {key: value} if value else {}
    asked = {"prompt": prompt, "tokens": tokens, "all": all_positions, "tolerance": tolerance}
    if len(words) == 2:
        reports = [_two(model, words, options, asked)]
    else:
        reports = list(_variants(model, (split, threads, tier), options, asked))
    if html:
        from pnrt.screen.heatmap import page

        with atomic(html) as stream:
            stream.write(page(reports).encode())
    equal = all(report.equal for report in reports)
    show(as_json, {"equal": equal, "reports": reports}, lambda: screen.reports(reports))
    raise typer.Exit(0 if equal else 1)


def _words(sides: list[str], varied: Any) -> tuple[Path | None, list[str]]:
    """The model, if one is named apart from the sides, and two sides or none."""
    if len(sides) == 1 and varied:
        return Path(sides[0]), []
    if varied or not 2 <= len(sides) <= 3:
        raise ModelError(
            f"{len(sides)} names; `diff A B`, `diff MODEL A B`, or `diff MODEL` with --split, "
            "--threads or --tier is needed. `pnrt diff --help` says what a side is."
        )
    return (Path(sides[0]) if len(sides) == 3 else None), sides[-2:]


def _two(model: Path | None, words: list[str], options: dict, asked: dict) -> Report:
    """Two sides by name; what a trace says about itself holds for the other side too."""
    from pnrt.debug.diff import difference
    from pnrt.debug.sides import check_side, open_side
    from pnrt.debug.trace import Trace, is_trace

    for word in words:
        check_side(word, model)
    chunk, ids = DEFAULT_CHUNK, None
    for word in (w for w in words if is_trace(Path(w))):
        with Trace(word) as trace:
            index = trace.index
        options = {"activations": index["activations"], "kv": index["kv"], **options}
        chunk, ids = index["chunk"], index["tokens"]
    if ids is None or asked["prompt"] is not None or asked["tokens"] is not None:
        file = model or next((Path(w) for w in words if Path(w).is_file()), None)
        given = prompt_ids(file, asked["prompt"], asked["tokens"], options["extra_types"])
        if ids not in (None, given):
            raise ModelError(
                f"{len(given)} tokens asked for, but the trace ran {len(ids)} others; the same "
                "tokens can be compared. Leave -p and --tokens out."
            )
        ids = given
    options |= {"context": len(ids), "chunk": min(chunk, len(ids))}
    with contextlib.ExitStack() as stack, progress() as tell:
        opened = []
        for word in words:
            side = open_side(word, model, options, tell)
            stack.callback(side.close)
            opened.append(side)
        return difference(
            *opened, ids, chunks=(chunk, chunk), all=asked["all"], tolerance=asked["tolerance"],
            progress=tell,
        )  # fmt: skip


def _variants(model: Path, lists: tuple, options: dict, asked: dict) -> Iterator[Report]:
    """Every combination of the lists against the first one."""
    from pnrt.debug.diff import difference
    from pnrt.debug.sides import Live, Remote

    ids = prompt_ids(model, asked["prompt"], asked["tokens"], options["extra_types"])
    split, threads, tier = lists
    chunks = [_chunk(word, len(ids)) for word in (split or "all").split(",")]
    counts = [_count("--threads", word) for word in threads.split(",")] if threads else [None]
    tiers = tier.split(",") if tier else [None]
    runs = list(itertools.product(tiers, counts, chunks))
    if len(runs) < 2:
        raise ModelError(
            "--split, --threads and --tier name one run; two or more are needed to compare. "
            "Give a list such as --split 1,7,all."
        )
    options |= {"context": len(ids), "chunk": len(ids)}

    def open_run(run, tell):
        level, count, chunk = run
        names = [level or "cpu", f"{count} threads" if count else "", f"chunks of {chunk}"]
        name = ", ".join(filter(None, names))
        if level is None and count is None:
            return Live(name, model, {**options, "backend": "cpu"}, tell)
        return Remote(name, model, level or "native", {**options, "threads": count})

    with contextlib.ExitStack() as stack, progress() as tell:
        first = open_run(runs[0], tell)
        stack.callback(first.close)
        for run in runs[1:]:
            with contextlib.closing(open_run(run, tell)) as other:
                yield difference(
                    first, other, ids, chunks=(runs[0][2], run[2]), all=asked["all"],
                    tolerance=asked["tolerance"], progress=tell,
                )  # fmt: skip


def _chunk(word: str, T: int) -> int:
    return T if word == "all" else min(T, _count("--split", word))


def _count(option: str, word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ModelError(
            f"{option} {word}: numbers of at least 1 with commas between are needed. "
            f"Write it as {option} 1,2."
        )
    return int(word)
