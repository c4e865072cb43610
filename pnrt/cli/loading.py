"""Models and samplers from what a command was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pnrt.cli.output import progress
from pnrt.errors import ModelError

if TYPE_CHECKING:
    from pnrt.generate import Model


@contextlib.contextmanager
def load(
    path: Path,
    threads: int | None,
    activations: str,
    kv: str,
    rotation: str | None,
    context: int | None,
    text: bool = True,
) -> Iterator[Model]:
    """A loaded model, with progress while its weights are packed and its kernels compiled.

    text: whether its tokenizer will be needed; a fault of it then shows before any waiting.
    """
    import pnrt

    with progress() as tell:
        model = pnrt.load(
            path,
            threads=threads,
            activations=activations,
            kv=kv,
            rotation=rotation,
            context=context,
            progress=tell,
        )
    with model:
        if text:
            with naming(path):
                model.tokenizer  # noqa: B018  (builds it)
        yield model


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of code that sees only a file's metadata get the file's name."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def sampling(temp: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> Any:
    """The sampler of the given settings; temperature 0 is greedy."""
    from pnrt.text.sampling import Sampler

    if temp == 0:
        return Sampler.greedy()
    return Sampler(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
