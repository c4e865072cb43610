"""A generation as text with a clock: what `pnrt run`, `chat` and `demo` share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pnrt.errors import ModelError

if TYPE_CHECKING:
    from pnrt.generate import Model
    from pnrt.text.sampling import Sampler
    from pnrt.text.tokenizer import Tokenizer


class Answer:
    """Iterate over it for pieces of text; afterwards it knows tokens and times.

    Args:
        model: continues from its current state.
        tokens: ids to read first, at least one.
        n: tokens to write at most; fewer where the context ends.
        sampler: None for greedy.
        chunk: tokens per call while reading.
        stop: texts that end the answer; they are not part of it.
    Raises:
        ModelError: nothing to read, or more than the context has left; an empty stop text.
    """

    def __init__(
        self,
        model: Model,
        tokens: Sequence[int],
        n: int,
        sampler: Sampler | None = None,
        chunk: int = 512,
        stop: Sequence[str] = (),
    ):
        if "" in stop:
            raise ModelError("stop: an empty text ends every answer; give one that can be met.")
        room = context(model) - model.position
        if not tokens:
            raise ModelError(
                "the prompt is empty: a model needs at least one token to go on from. "
                "Give it a text."
            )
        if len(tokens) > room:
            raise ModelError(
                f"the prompt has {len(tokens)} tokens, {room} of the {context(model)} are left; "
                "shorten the prompt or load with a larger --context."
            )
        self.model, self.tokens, self.sampler, self.chunk = model, list(tokens), sampler, chunk
        self.limit = min(n, room - len(tokens))
        self.cut = self.limit < n
        self.stop = stop
        self.ids: list[int] = []
        self.text, self._whole = "", False
        self.prompt_seconds = self.seconds = 0.0

    def __iter__(self) -> Iterator[str]:
        with contextlib.closing(self._pieces()) as pieces:
            for piece in until(pieces, self.stop):
                self.text += piece
                yield piece

    def _pieces(self) -> Iterator[str]:
        decoder = self.model.tokenizer.stream()
        start = first = time.perf_counter()
        ids = self.model.generate(self.tokens, n=self.limit, sampler=self.sampler, chunk=self.chunk)
        try:
            for token in ids:
                if not self.ids:
                    first = time.perf_counter()
                    self.prompt_seconds = first - start
                self.ids.append(token)
                if piece := decoder.push(token):
                    yield piece
            if rest := decoder.flush():
                yield rest
            self._whole = True
        finally:
            now = time.perf_counter()
            if self.ids:
                self.seconds = now - first
            else:
                self.prompt_seconds = now - start

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
            "seed": getattr(self.sampler, "seed", None),
            "ended": self.ended,
        }

    @property
    def ended(self) -> str:
        """Why it ended: "stop" text, "limit" of tokens, "context" full, or "end" by the model."""
        if not self._whole:
            return "stop"
        if len(self.ids) < self.limit:
            return "end"
        return "context" if self.cut else "limit"


def context(model: Model) -> int:
    """How many tokens the loaded model can hold."""
    return getattr(model, "context", None) or model.config.context_length


def until(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """The text before the first of some texts; what may be the beginning of one is held back.

    One that is there waits while another that began before it may still be completed.
    """
    held, end = "", 0
    for piece in pieces:
        held += piece
        end = min((at for text in stop if (at := held.find(text)) >= 0), default=len(held))
        begun = (n for text in stop for n in range(1, len(text)) if held.endswith(text[:n]))
        sure = min(end, len(held) - max(begun, default=0))
        if end == sure < len(held):
            break
        if sure:
            yield held[:sure]
        held, end = held[sure:], end - sure
    if end:
        yield held[:end]


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text with special tokens; if it begins with the bos itself, no second one is put."""
    bos = "" if tokenizer.bos is None else tokenizer.token(tokenizer.bos)
    twice = bool(bos) and text.startswith(bos)
    return tokenizer.encode(text, parse_special=True, add_bos=False if twice else None)


def chat_tokens(
    model: Model, messages: list[dict[str, str]], template: Mapping[str, Any] | str | None = None
) -> list[int]:
    """Render a conversation with a template (None for the model's own) and tokenize it."""
    from pnrt.text.template import render_chat

    tokenizer = model.tokenizer
    bos, eos = ("" if i is None else tokenizer.token(i) for i in (tokenizer.bos, tokenizer.eos))
    text = render_chat(
        model.file.metadata if template is None else template,
        messages,
        add_generation_prompt=True,
        bos_token=bos,
        eos_token=eos,
    )
    return prompt_tokens(tokenizer, text)
