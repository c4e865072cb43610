"""How commands speak: results to standard output, progress and speeds to standard error."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def write(piece: str) -> None:
    """Stream a model's text; on a terminal its control characters are shown, not sent."""
    from pnrt.screen.parts import visible

    sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def ask(mark: str) -> str:
    """One line of standard input, stripped; the mark is shown on a terminal only."""
    if sys.stdin.isatty():
        sys.stderr.write(mark)
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def speeds(answer: Any) -> None:
    """How fast an answer came, on standard error."""
    text = (
        f"prompt {len(answer.tokens)} tokens, {answer.prompt_speed:.1f} tokens/s; "
        f"generation {len(answer.ids)} tokens, {answer.speed:.1f} tokens/s"
    )
    if answer.cut and len(answer.ids) == answer.limit:
        text += "; the context is full"
    if answer.sampler and answer.sampler.temperature != 0:
        text += f"; seed {answer.sampler.seed}"
    typer.echo(text, err=True)


def console(record: bool = False, quiet: bool = False) -> Console:
    """Where screens are printed; `record` keeps them for an SVG file."""
    from rich.console import Console

    # a screen that is kept has one width, and what goes into a pipe is not cut to a terminal
    width = 100 if record else (None if sys.stdout.isatty() else 180)
    return Console(record=record, width=width, quiet=quiet, highlight=False)


def show(as_json: bool, data: Any, table: Callable[[], Any], svg: Path | None = None) -> None:
    """Print a result: the data as JSON, or the screen that `table` builds."""
    if as_json:
        show_json(data)
        return
    out = console(record=svg is not None)
    out.print(table())
    if svg:
        out.save_svg(str(svg), title=f"pnrt {svg.stem}")


def show_json(data: Any) -> None:
    """Print a value as JSON."""
    from pnrt.screen.parts import plain

    typer.echo(json.dumps(plain(data), indent=1, allow_nan=False))


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """A callable tell(what, done, total, ...) that shows waits on standard error.

    On a terminal a bar that vanishes; elsewhere a line at most every five seconds. done < 0 is a
    remark that stays.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from pnrt.screen.parts import visible

    # what runs may be a name out of a file: it is no markup and does not drive the terminal
    console = Console(stderr=True, highlight=False, markup=False)
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(30), TextColumn("{task.fields[count]}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    last = time.monotonic()
    task = None

    def tell(what: str, done: int, total: int) -> None:
        nonlocal task, last
        what = visible(what)
        if done < 0:
            console.print(what)
            return
        count = f"{done}/{total}" if total < 10_000 else f"{100 * done // max(total, 1)} %"
        if console.is_terminal:
            if task is None:
                task = bar.add_task(what, total=total, count=count)
            bar.update(task, description=what, completed=done, total=total, count=count)
        elif time.monotonic() - last > 5:
            last = time.monotonic()
            console.print(f"{what} {count}")

    with bar if console.is_terminal else contextlib.nullcontext():
        yield tell
