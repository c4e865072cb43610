"""A generation as text with a clock: what `pnrt run`, `chat` and `demo` share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pnrt.errors import ModelError

if TYPE_CHECKING:
    from pnrt.generate import Model
    from pnrt.text.sampling import Sampler


class Answer:
    """Iterate over it for pieces of text; afterwards it knows tokens and times.

    Args:
        model: continues from its current state.
        tokens: ids to read first, at least one.
        n: tokens to write at most; fewer where the context ends.
        sampler: None for greedy.
        chunk: tokens per call while reading.
    Raises:
        ModelError: nothing to read, or more than the context has left.
    """

    def __init__(
        self,
        model: Model,
        tokens: Sequence[int],
        n: int,
        sampler: Sampler | None = None,
        chunk: int = 512,
    ):
        room = context(model) - model.position
        if not tokens:
            raise ModelError("the prompt is empty: a model needs at least one token to go on from.")
        if len(tokens) > room:
            raise ModelError(
                f"the prompt has {len(tokens)} tokens, {room} of the {context(model)} are left; "
                "shorten the prompt or load with a larger --context."
            )
        self.model, self.tokens, self.sampler, self.chunk = model, list(tokens), sampler, chunk
        self.limit = min(n, room - len(tokens))
        self.cut = self.limit < n
        self.ids: list[int] = []
        self.text = ""
        self.prompt_seconds = self.seconds = 0.0

    def __iter__(self) -> Iterator[str]:
        decoder = self.model.tokenizer.stream()
        start = first = time.perf_counter()
        ids = self.model.generate(self.tokens, n=self.limit, sampler=self.sampler, chunk=self.chunk)
        for token in ids:
            if not self.ids:
                first = time.perf_counter()
                self.prompt_seconds = first - start
            self.ids.append(token)
            piece = decoder.push(token)
            self.text += piece
            if piece:
                yield piece
        now = time.perf_counter()
        if self.ids:
            self.seconds = now - first
        else:
            self.prompt_seconds = now - start
        rest = decoder.flush()
        self.text += rest
        if rest:
            yield rest

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens per second."""
        return len(self.tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def speed(self) -> float:
        """Generated tokens per second; the first comes with the prompt and is not counted."""
        return (len(self.ids) - 1) / self.seconds if self.seconds and len(self.ids) > 1 else 0.0

    def report(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "text": self.text,
            "tokens": self.ids,
            "prompt_tokens": len(self.tokens),
            "prompt_tokens_per_second": self.prompt_speed,
            "tokens_per_second": self.speed,
        }


def context(model: Model) -> int:
    """How many tokens the loaded model can hold."""
    return getattr(model, "context", None) or model.config.context_length


def chat_tokens(model: Model, messages: list[dict[str, str]]) -> list[int]:
    """Render a conversation with the model's template and tokenize it.

    A beginning-of-text token that the template writes itself is not added a second time.
    """
    from pnrt.text.template import render_chat

    tokenizer = model.tokenizer
    bos = tokenizer.token(tokenizer.bos) if tokenizer.bos is not None else ""
    eos = tokenizer.token(tokenizer.eos) if tokenizer.eos is not None else ""
    text = render_chat(
        model.file.metadata, messages, add_generation_prompt=True, bos_token=bos, eos_token=eos
    )
    twice = bool(bos) and text.startswith(bos)
    return tokenizer.encode(text, parse_special=True, add_bos=False if twice else None)
