"""--nan-stop and --dispatch: runs that are watched step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pnrt.generate import Model

NanStop = Annotated[
    bool, typer.Option("--nan-stop", help="stop at the first NaN or infinity and say who made it")
]
Dispatch = Annotated[
    bool, typer.Option("--dispatch", help="then list which kernel served what, on standard error")
]


@contextlib.contextmanager
def watched(model: Model, nan_stop: bool, dispatch: bool) -> Iterator[list[Callable]]:
    """Attach the observers asked for; exit status 1 if a step makes a NaN or infinity.

    Yields them, for who attaches observers himself.
    """
    from pnrt.debug.dispatch import Dispatch as Counter
    from pnrt.debug.nanstop import NanStop as Stop
    from pnrt.debug.nanstop import NotFinite
    from pnrt.screen import trace as screen

    counter = Counter(model)
    stop = Stop(model.file, model.session.activations)
    observers = [o for o, wanted in ((counter, dispatch), (stop, nan_stop)) if wanted]

    def tell(tap):
        for each in observers:
            each(tap)

    model.session.observer = tell if observers else None
    try:
        yield observers
    except NotFinite as error:
        typer.echo(f"\n{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        model.session.observer = None
    if dispatch:
        from rich.console import Console

        Console(stderr=True, highlight=False, width=140).print(screen.dispatch(counter.report()))
