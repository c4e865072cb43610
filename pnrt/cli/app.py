"""The typer application: what every command shares before it runs, and how errors end it.

Exit status: 0, or 1 where a command reports findings, or 2 for wrong usage and unusable files.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pnrt import __version__
from pnrt.errors import PnrtError


class Commands(TyperGroup):
    """Turns our errors into one message on standard error and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PnrtError as error:
            _fail(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                # the reader went away (`pnrt inspect | head`): nobody is left to tell
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            _fail(f"{error.filename or 'input/output'}: {error.strerror or error}")
        except MemoryError as error:
            _fail(f"not enough memory: {error or 'an allocation failed'}")
        except UnicodeDecodeError as error:
            _fail(f"the text is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}")


def _fail(message: str) -> None:
    from pnrt.screen.parts import visible

    # a message may quote a file: what it says must not drive the terminal
    typer.echo(visible(message), err=True)
    raise typer.Exit(2)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run block-quantized language models, and prove that they ran right.",
)


def main() -> None:
    """Entry point of the `pnrt` command."""
    app()


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"pnrt {__version__}")
        raise typer.Exit
