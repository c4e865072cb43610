"""Models and samplers from what a command was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pnrt.cli.app import not_utf8
from pnrt.cli.output import progress
from pnrt.errors import FileError, FormatError, ModelError

if TYPE_CHECKING:
    from pnrt.generate import Model


_EITHER = "the prompt: needed is -p TEXT or --tokens IDS, and only one of them. Give one."


@contextlib.contextmanager
def load(
    path: Path, text: bool = True, e4m3_id: int | None = None, **options: Any
) -> Iterator[Model]:
    """A loaded model, with progress while its weights are packed and its kernels compiled.

    text: whether its tokenizer will be needed; a fault of it then shows before any waiting.
    options: of `pnrt.load`.
    """
    import pnrt

    with progress() as tell:
        model = pnrt.load(path, extra_types=extra_types(e4m3_id), progress=tell, **options)
    for note in model.notes:
        typer.echo(note, err=True)
    with model:
        if text:
            with naming(path):
                model.tokenizer  # noqa: B018  (builds it)
        yield model


@contextlib.contextmanager
def prompted(
    path: Path, prompt: str | None, tokens: str | None, **options: Any
) -> Iterator[tuple[Model, list[int]]]:
    """A loaded model and the ids of -p TEXT or --tokens IDS, which fit its context.

    Raises: ModelError for none or both of them, and for ids that do not fit.
    """
    if (prompt is None) == (tokens is None):
        raise ModelError(_EITHER)
    ids = None if tokens is None else _ids(tokens)
    with load(path, ids is None, **options) as model:
        if ids is None:
            ids = model.tokenizer.encode(prompt, parse_special=True)
        _fits(model, ids)
        yield model, ids


def prompt_ids(
    path: Path | None,
    prompt: str | None,
    tokens: str | None,
    types: dict[int, str] | None = None,
) -> list[int]:
    """The ids of -p TEXT or --tokens IDS, before any model is loaded.

    Args: path – the model whose tokenizer to use.
    Raises: ModelError for none or both of them, or a text without a model.
    """
    if (prompt is None) == (tokens is None):
        raise ModelError(_EITHER)
    if tokens is not None:
        return _ids(tokens)
    if path is None:
        raise ModelError(
            "-p: no model is named whose tokenizer could read the text; one is needed. "
            "Name the model first, or use --tokens."
        )
    from pnrt.container.gguf import open_gguf
    from pnrt.text.tokenizer import Tokenizer

    with open_gguf(path, extra_types=types) as file, naming(path):
        ids = Tokenizer.from_metadata(file.metadata).encode(prompt, parse_special=True)
    if not ids:
        raise ModelError("-p: the text is empty; at least one token is needed to run.")
    return ids


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ModelError(
            f"--tokens {text!r}: whole numbers with commas between are needed. Write 1,2,3."
        ) from None


def _fits(model: Model, ids: list[int]) -> None:
    from pnrt.stream import context

    if not 0 < len(ids) <= context(model):
        raise ModelError(
            f"{len(ids)} tokens; 1 to {context(model)} fit the context. Use a shorter prompt."
        )
    bad = [i for i in ids if not 0 <= i < model.config.vocab_size]
    if bad:
        raise ModelError(
            f"token {bad[0]}: not in the vocabulary; ids are 0 to {model.config.vocab_size - 1}. "
            "Check the ids, or the model they came from."
        )


def text_of(path: Path) -> str:
    """The content of a text file. Raises: FileError where it is not UTF-8, OSError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(not_utf8(path, error)) from None


def extra_types(e4m3_id: int | None) -> dict[int, str] | None:
    """The id that --e4m3-id gives to e4m3. Raises FormatError for one that is another format's."""
    if e4m3_id is None:
        return None
    from pnrt.formats import by_id

    other = by_id(e4m3_id)
    if other:
        raise FormatError(
            f"--e4m3-id {e4m3_id}: the id {e4m3_id} means {other.name}; files with e4m3 have been "
            "seen with 42 and 51. Give the id that `pnrt inspect` shows for the unknown type."
        )
    return {e4m3_id: "e4m3"}


def opening(e4m3_id: int | None, scale_encoding: str | None, ternary: str) -> dict[str, Any]:
    """What the options of a command tell `open_any`."""
    types = extra_types(e4m3_id)
    return {"extra_types": types, "scale_encoding": scale_encoding, "ternary": ternary}


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
