"""Tokenizers built from GGUF metadata alone: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`).

Special tokens are split off here, in the order llama.cpp tries them; an engine of `merging` does
the rest.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pnrt.errors import ModelError, PnrtError
from pnrt.text.merging import BYTE_OF, SPACE
from pnrt.text.vocabulary import (
    BYTE,
    BYTES,
    CONTROL,
    KINDS,
    UNKNOWN,
    UNUSED,
    USER,
    Vocabulary,
    build_engine,
)


class Tokenizer:
    """Text to token ids and back; made by `Tokenizer.from_metadata`.

    Attributes: vocab_size; bos, eos (id or None); eog (ids that end a generation); add_bos,
    add_eos (what the file asks for; eos is never added here); pre (name of the pre-tokenizer).
    """

    def __init__(self, vocabulary: Vocabulary, engine: Callable):
        self._tokens, self._kinds = vocabulary.tokens, vocabulary.kinds
        self._spm, self._prefix = vocabulary.spm, vocabulary.space_prefix
        self.bos, self.eos, self.eog = vocabulary.bos, vocabulary.eos, vocabulary.eog
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.pre, self.vocab_size = vocabulary.pre, len(self._tokens)
        self._engine = engine
        # llama.cpp tries the longest special text first (in bytes), whatever stands left of it
        special = [i for i, kind in enumerate(self._kinds) if kind in (UNKNOWN, CONTROL, USER)]
        special.sort(key=lambda i: -len(self._tokens[i].encode()))
        self._special = [(self._tokens[i], i) for i in special]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, pre: str | None = None) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: key -> value of the whole file; only `tokenizer.ggml.*` is read.
            pre: the pre-tokenizer to use instead of the file's, for files converted without one.
        Raises: ModelError when a key is missing, of the wrong type, or contradicts another.
        """
        vocabulary = Vocabulary(metadata, pre)
        return cls(vocabulary, build_engine(metadata, vocabulary))

    def token(self, id: int) -> str:
        """The text of a token as the vocabulary writes it."""
        return self._tokens[self._checked(id)]

    def kind(self, id: int) -> str:
        """normal, unknown, control, user, unused or byte (markers count as control)."""
        return KINDS[self._kinds[self._checked(id)]]

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """Token ids of a text.

        Args:
            parse_special: recognise control tokens (`<|im_start|>`) written in the text.
            add_bos: put the beginning-of-sequence token first; None = as the file asks.
        Raises: PnrtError for text that is not Unicode (a lone surrogate), ModelError if a bos is
            wanted and the file names none.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PnrtError(
                f"text: character {error.start} is the lone surrogate {text[error.start]!r}; only "
                "Unicode text has tokens. Decode the input as UTF-8 first."
            ) from None
        ids = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos is None:
                raise ModelError(
                    "tokenizer.ggml.bos_token_id: missing; adding a first token needs it. "
                    "Pass add_bos=False, or convert the model again."
                )
            ids.append(self.bos)
        for piece in self._split(text, parse_special):
            ids += [piece] if isinstance(piece, int) else self._engine(piece)
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for: a special token's text, nothing for an unused token."""
        kind, text = self._kinds[self._checked(id)], self._tokens[id]
        if kind == UNUSED:
            return b""
        if kind == BYTE:
            return BYTES[text]
        if kind in (UNKNOWN, CONTROL, USER):
            return text.encode()
        if self._spm:
            return text.replace(SPACE, " ").encode()
        return b"".join(BYTE_OF.get(char) or char.encode() for char in text)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of a whole sequence; invalid UTF-8 becomes U+FFFD.

        Args:
            special: also write control and unknown tokens, as their texts.
        A SentencePiece text loses one leading space, the one that encoding put there.
        """
        data = b"".join(self._visible(i, special) for i in ids)
        if self._prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def stream(self, *, special: bool = False) -> TokenStream:
        """An incremental decoder for tokens that continue a text; it strips no leading space."""
        return TokenStream(self, special)

    def _visible(self, id: int, special: bool) -> bytes:
        hidden = self._kinds[self._checked(id)] in (UNKNOWN, CONTROL) and not special
        return b"" if hidden else self.token_bytes(id)

    def _split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """The text cut at special tokens: pieces of text and ids."""
        pieces: list[str | int] = [text]
        for marker, id in self._special:
            if marker not in text or not (parse_special or self._kinds[id] == USER):
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                first, *rest = piece.split(marker)
                cut.append(first)
                for part in rest:
                    cut += (id, part)
            pieces = cut
        return (piece for piece in pieces if piece != "")

    def _checked(self, id: int) -> int:
        if not 0 <= id < self.vocab_size:
            raise ModelError(
                f"token {id}: not in the vocabulary; ids go from 0 to {self.vocab_size - 1}. "
                "Check the ids, or the model they came from."
            )
        return id


class TokenStream:
    """Turns tokens into text one at a time and never emits part of a code point."""

    def __init__(self, tokenizer: Tokenizer, special: bool):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that is complete after this token; may be empty."""
        return self._decoder.decode(self._tokenizer._visible(id, self._special))

    def flush(self) -> str:
        """End the text: an unfinished code point becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
