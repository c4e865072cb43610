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
            where = error.filename or "input or output"
            _fail(
                f"{where}: {error.strerror or error}; a file that can be read, or room to write, "
                "is needed. Check the path, its permissions and the disk."
            )
        except MemoryError as error:
            _fail(
                f"memory: {error or 'an allocation failed'}; the system has no more to give. "
                "Use a smaller --context, or close other programs; `pnrt plan` says what is needed."
            )
        except UnicodeDecodeError as error:
            _fail(not_utf8("standard input", error))


def not_utf8(where: object, error: UnicodeDecodeError) -> str:
    """The sentence for a text that cannot be read."""
    return (
        f"{where}: is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; pnrt "
        "reads texts in UTF-8. Convert it, e.g. with iconv."
    )


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
    _prepare_streams()
    app()


def _prepare_streams() -> None:
    """What a stream cannot encode is escaped; one that the caller closed swallows."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w":
            stream.reconfigure(errors="backslashreplace")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"pnrt {__version__}")
        raise typer.Exit
