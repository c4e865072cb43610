"""Tokenizers built from GGUF metadata alone: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`).

Special tokens are split off here, in the order llama.cpp tries them; what is left goes through the
merges of the `tokenizers` library, which is imported when the first tokenizer is built.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pnrt.errors import ModelError, PnrtError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = ("normal", "normal", "unknown", "control", "user", "unused", "byte")

_G = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_C = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

# regexes per pre-tokenizer, applied in sequence, each to the pieces the one before left
PRE = {
    "gpt-2": (_G,),
    "smollm": (r"\p{N}", _G),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _G, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}

# texts that end a generation whatever their type says, as llama.cpp has it
END_MARKERS = (
    "</s> <eos> <EOT> _<EOT> [EOT] [EOS] <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|>"
    " <|return|> <|call|> <|calls|> <|flush|> <|end_of_text|> <end_of_turn> <turn|>"
    " <end_of_utterance> <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"
    " <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
).split()  # noqa: SIM905
# texts that are control tokens whatever their type says, and end nothing
FILL_MARKERS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>"
    " <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>"
    " <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>"
).split()  # noqa: SIM905

_SPACE = "\u2581"  # how SentencePiece writes a space
_REQUIRED = object()
_FIX = "Convert the model again with a current converter."


def _alphabet() -> list[str]:
    """GPT-2's printable character for each byte 0..255."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


ALPHABET = _alphabet()
_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
_BYTE_OF = {char: bytes([byte]) for byte, char in enumerate(ALPHABET)}


class Tokenizer:
    """Text to token ids and back; made by `Tokenizer.from_metadata`.

    Attributes: vocab_size; bos, eos (id or None); eog (ids that end a generation); add_bos,
    add_eos (what the file asks for; eos is never added here); pre (name of the pre-tokenizer).
    """

    def __init__(self, vocabulary: _Vocabulary, engine: Any):
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
        vocabulary = _Vocabulary(metadata, pre)
        build = _spm_engine if vocabulary.spm else _bpe_engine
        return cls(vocabulary, build(metadata, vocabulary))

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
            if isinstance(piece, int):
                ids.append(piece)
                continue
            if self._spm:
                piece = (_SPACE if self._prefix else "") + piece.replace(" ", _SPACE)
            found = self._engine.encode(piece, add_special_tokens=False).ids
            # the id past the end stands for a byte the vocabulary lacks
            ids += [i for i in found if i < self.vocab_size]
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for: a special token's text, nothing for an unused token."""
        kind, text = self._kinds[self._checked(id)], self._tokens[id]
        if kind == UNUSED:
            return b""
        if kind == BYTE:
            return _BYTES[text]
        if kind in (UNKNOWN, CONTROL, USER):
            return text.encode()
        if self._spm:
            return text.replace(_SPACE, " ").encode()
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)

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


class _Vocabulary:
    """The checked `tokenizer.ggml.*` keys both kinds of tokenizer share."""

    def __init__(self, metadata: Mapping[str, Any], pre: str | None):
        model = _get(metadata, "model", str)
        if model not in ("gpt2", "llama"):
            raise _error("model", repr(model), "gpt2 or llama", "pnrt has no other tokenizer.")
        self.spm = model == "llama"
        self.pre = None if self.spm else _pre(metadata, pre)
        self.tokens = _array(metadata, "tokens", str)
        if not self.tokens:
            raise _error("tokens", "no tokens", "at least one", _FIX)
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.tokens)]
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            first = next(i for i, text in enumerate(self.tokens) if self.ids[text] != i)
            text = self.tokens[first]
            found = f"{text!r} is both token {first} and token {self.ids[text]}"
            raise _error("tokens", found, "each text once", _FIX)
        default = None if self.spm or len(self.tokens) < 12 else 11
        self.bos = self._id(metadata, "bos", 1 if self.spm else default)
        self.eos = self._id(metadata, "eos", 2 if self.spm else default)
        self.unknown = self._id(metadata, "unknown", 0 if self.spm else None)
        self._id(metadata, "padding", None)
        self.add_bos = _get(metadata, "add_bos_token", bool, self.spm or self.pre == "llama-bpe")
        self.add_eos = _get(metadata, "add_eos_token", bool, False)
        self.space_prefix = self.spm and _get(metadata, "add_space_prefix", bool, True)
        self._type_tokens(metadata)

    def _type_tokens(self, metadata: Mapping[str, Any]) -> None:
        """Set kinds (with marker texts made control) and eog."""
        self.kinds = _array(metadata, "token_type", int, len(self.tokens), NORMAL)
        if bad := set(self.kinds) - set(range(len(KINDS))):
            i = next(i for i, kind in enumerate(self.kinds) if kind in bad)
            raise _error("token_type", f"token {i} is of type {self.kinds[i]}", "1 to 6", _FIX)
        for text, kind in zip(self.tokens, self.kinds, strict=True):
            if kind == BYTE and text not in _BYTES:
                found = f"token {self.ids[text]} is a byte and reads {text!r}"
                raise _error("token_type", found, "<0x00> to <0xFF>", _FIX)
        ends = {self.ids[text] for text in END_MARKERS if text in self.ids}
        for i in ends | {self.ids[text] for text in FILL_MARKERS if text in self.ids}:
            self.kinds[i] = CONTROL
        named = (self.eos, self._id(metadata, "eot", None), self._id(metadata, "eom", None))
        self.eog = frozenset(ends | {i for i in named if i is not None})

    def _id(self, metadata: Mapping[str, Any], name: str, default: int | None) -> int | None:
        value = _get(metadata, f"{name}_token_id", int, default)
        if value is None:
            return None
        if not 0 <= value < len(self.tokens):
            found, allowed = f"id {value}", f"0 to {len(self.tokens) - 1}, the vocabulary"
            raise _error(f"{name}_token_id", found, allowed, _FIX)
        return value


def _pre(metadata: Mapping[str, Any], override: str | None) -> str:
    """The canonical name of the pre-tokenizer."""
    known = ", ".join([*PRE, *ALIASES])
    if override is not None:
        if (name := ALIASES.get(override, override)) not in PRE:
            raise PnrtError(f"pre={override!r}: unknown pre-tokenizer; pnrt has {known}. Pick one.")
        return name
    name = _get(metadata, "pre", str, None)
    name = ALIASES.get(name, name)
    if name in PRE and name != "default":
        return name
    # "default" is what a converter writes when it did not know: the ids would be subtly wrong
    found = "missing" if name is None else repr(name)
    todo = f"{_FIX} Or choose: Tokenizer.from_metadata(metadata, pre='gpt-2')."
    raise _error("pre", found, known.replace("default, ", ""), todo)


def _bpe_engine(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Any:
    """A `tokenizers.Tokenizer` for byte-level BPE."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = []
    for i, text in enumerate(_array(metadata, "merges", str)):
        cut = text.find(" ", 1)
        if cut < 0:
            raise _error("merges", f"merge {i} is {text!r}", "two texts and a space", _FIX)
        merges.append((text[:cut], text[cut + 1 :]))
    ids = vocabulary.ids
    missing = {}
    if any(char not in ids for char in ALPHABET):
        # a byte outside the vocabulary has to stand in the way of merges before it is dropped
        missing = {"unk_token": "\0missing"}
        ids = ids | {"\0missing": len(ids)}
    try:
        whole = vocabulary.pre == "llama-bpe"
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=whole, **missing)
    except Exception as error:
        # the library raises bare exceptions; the usual one names a merge without its token
        raise _error("merges", str(error), "merges of tokens into tokens", _FIX) from error
    engine = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(r), "isolated") for r in PRE[vocabulary.pre]]
    bytelevel = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytelevel])
    return engine


def _spm_engine(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Any:
    """A `tokenizers.Tokenizer` for SentencePiece BPE: merging by score, bytes for the rest."""
    from tokenizers import Tokenizer, models

    ids, tokens = vocabulary.ids, vocabulary.tokens
    scores = _array(metadata, "scores", float, len(tokens))
    ranked = []
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        text = tokens[i]
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids:
                ranked.append((text[:cut], text[cut:]))
    unknown = {} if vocabulary.unknown is None else {"unk_token": tokens[vocabulary.unknown]}
    model = models.BPE(vocab=ids, merges=ranked, byte_fallback=True, fuse_unk=True, **unknown)
    return Tokenizer(model)


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        if default is _REQUIRED:
            raise _error(name, "missing", f"a {kind.__name__}", _FIX)
        return default
    if type(value) is not kind:
        raise _error(name, f"a {type(value).__name__}", f"a {kind.__name__}", _FIX)
    return value


def _array(
    metadata: Mapping[str, Any],
    name: str,
    kind: type,
    length: int | None = None,
    default: Any = _REQUIRED,
) -> list:
    """A list from the file; with a default, a list full of it when the key is missing."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None and default is not _REQUIRED:
        return [default] * length
    if value is None or isinstance(value, str) or not isinstance(value, Sequence):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise _error(name, found, f"an array of {kind.__name__}", _FIX)
    items = list(value)
    if set(map(type, items)) - {kind}:
        wrong = next(i for i, item in enumerate(items) if type(item) is not kind)
        found = f"element {wrong} is a {type(items[wrong]).__name__}"
        raise _error(name, found, f"an array of {kind.__name__}", _FIX)
    if length is not None and len(items) != length:
        raise _error(name, f"{len(items)} elements", f"{length}, one per token", _FIX)
    if kind is float and any(item != item for item in items):
        raise _error(name, "NaN", "numbers", _FIX)
    return items


def _error(name: str, found: str, allowed: str, todo: str) -> ModelError:
    return ModelError(f"tokenizer.ggml.{name}: {found}; allowed is {allowed}. {todo}")
