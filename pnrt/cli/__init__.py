"""The command line. One function per command, one module per group; the only room that prints.

Every import of weight is made inside the command that needs it, so that `pnrt --help` is instant.
"""

# they register their commands
from pnrt.cli import (  # noqa: F401
    demo,
    diff,
    files,
    measure,
    plan,
    proof,
    text,
    trace,
    write,
)
from pnrt.cli.app import app, main

__all__ = ["app", "main"]
