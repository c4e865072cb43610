"""Open a model file of any container."""

from collections.abc import Mapping
from pathlib import Path

from pnrt.container.cyb_model import open_model
from pnrt.container.gguf import open_gguf
from pnrt.container.mapped import MappedFile
from pnrt.container.values import Problem


def open_any(
    path: str | Path,
    *,
    extra_types: Mapping[int, str] | None = None,
    scale_encoding: str | None = None,
    ternary: str = "cyb_ternary",
    problems: list[Problem] | None = None,
) -> MappedFile:
    """Open a GGUF or `.model` file; the first bytes decide, the suffix only where they do not.

    Args:
        extra_types: as of `open_gguf`.
        scale_encoding, ternary: as of `open_model`.
        problems: as of both.
    """
    path = Path(path)
    if path.suffix == ".model" and not _is_gguf(path):
        return open_model(path, scale_encoding=scale_encoding, ternary=ternary, problems=problems)
    return open_gguf(path, extra_types=extra_types, problems=problems)


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        # the real reader says what is wrong
        return False
