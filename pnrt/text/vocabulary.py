"""The `tokenizer.ggml.*` keys of a GGUF file, checked: tokens, their kinds, and the special ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pnrt.errors import ModelError, PnrtError
from pnrt.text.merging import ALIASES, PRE, by_rank, by_score

log = logging.getLogger("pnrt")

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = ("normal", "normal", "unknown", "control", "user", "unused", "byte")
BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}

# texts that end a generation whatever their type says, as llama.cpp has it
END_MARKERS = (  # noqa: SIM905
    "</s> <eos> <EOT> _<EOT> [EOT] [EOS] <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|>"
    " <|return|> <|call|> <|calls|> <|flush|> <|end_of_text|> <end_of_turn> <turn|>"
    " <end_of_utterance> <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"
    " <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
).split()
# texts that are control tokens whatever their type says, and end nothing
FILL_MARKERS = (  # noqa: SIM905
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>"
    " <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>"
    " <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>"
).split()

_REQUIRED = object()
FIX = "Convert the model again with a current converter."


class Vocabulary:
    """The checked `tokenizer.ggml.*` keys both kinds of tokenizer share."""

    def __init__(self, metadata: Mapping[str, Any], pre: str | None):
        model = _get(metadata, "model", str)
        if model not in ("gpt2", "llama"):
            raise _error("model", repr(model), "gpt2 or llama", "pnrt has no other tokenizer.")
        self.spm = model == "llama"
        self.pre = None if self.spm else _pre(metadata, pre)
        self.tokens = _array(metadata, "tokens", str)
        if not self.tokens:
            raise _error("tokens", "no tokens", "at least one", FIX)
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.tokens)]
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            first = next(i for i, text in enumerate(self.tokens) if self.ids[text] != i)
            text = self.tokens[first]
            found = f"{text!r} is both token {first} and token {self.ids[text]}"
            raise _error("tokens", found, "each text once", FIX)
        default = None if self.spm or len(self.tokens) < 12 else 11
        self.bos = self._id(metadata, "bos", 1 if self.spm else default)
        self.eos = self._id(metadata, "eos", 2 if self.spm else default)
        self.unknown = self._id(metadata, "unknown", 0 if self.spm else None)
        padding = _get(metadata, "padding_token_id", int, 0)
        if not 0 <= padding < len(self.tokens):
            log.warning("tokenizer.ggml.padding_token_id is no token: %d; it is not used", padding)
        self.add_bos = _get(metadata, "add_bos_token", bool, self.spm or self.pre == "llama-bpe")
        self.add_eos = _get(metadata, "add_eos_token", bool, False)
        self.space_prefix = self.spm and _get(metadata, "add_space_prefix", bool, True)
        self._type_tokens(metadata)

    def _type_tokens(self, metadata: Mapping[str, Any]) -> None:
        """Set kinds (with marker texts made control) and eog."""
        self.kinds = _array(metadata, "token_type", int, len(self.tokens), NORMAL)
        if bad := set(self.kinds) - set(range(len(KINDS))):
            i = next(i for i, kind in enumerate(self.kinds) if kind in bad)
            raise _error("token_type", f"token {i} is of type {self.kinds[i]}", "1 to 6", FIX)
        for text, kind in zip(self.tokens, self.kinds, strict=True):
            if kind == BYTE and text not in BYTES:
                found = f"token {self.ids[text]} is a byte and reads {text!r}"
                raise _error("token_type", found, "<0x00> to <0xFF>", FIX)
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
            raise _error(f"{name}_token_id", found, allowed, FIX)
        return value


def _pre(metadata: Mapping[str, Any], override: str | None) -> str:
    """The canonical name of the pre-tokenizer."""
    known = ", ".join([*PRE, *ALIASES])
    if override is not None:
        if (name := ALIASES.get(override, override)) not in PRE:
            raise PnrtError(f"pre={override!r}: unknown pre-tokenizer; pnrt has {known}. Pick one.")
        return name
    name = _get(metadata, "pre", str, None)
    if name is None or name == "default":
        # what a converter writes when it did not know: the ids may be subtly wrong
        log.warning(
            "tokenizer.ggml.pre is %s: text is split by the old default rules, which may not be "
            "the model's own",
            "missing" if name is None else "'default'",
        )
        return "default"
    name = ALIASES.get(name, name)
    if name in PRE:
        return name
    todo = f"{FIX} Or choose one: --pre gpt-2, pnrt.load(path, pre='gpt-2')."
    raise _error("pre", repr(name), known, todo)


def build_engine(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Callable:
    """The function that turns a piece of text into ids."""
    if vocabulary.spm:
        scores = _array(metadata, "scores", float, len(vocabulary.tokens))
        return by_score(vocabulary.ids, scores, vocabulary.unknown, vocabulary.space_prefix)
    merges = []
    for i, text in enumerate(_array(metadata, "merges", str)):
        cut = text.find(" ", 1)
        if cut < 0:
            raise _error("merges", f"merge {i} is {text!r}", "two texts and a space", FIX)
        merges.append((text[:cut], text[cut + 1 :]))
    try:
        return by_rank(vocabulary.ids, merges, vocabulary.pre)
    except ValueError as error:
        raise _error("merges", str(error), "merges of tokens into tokens", FIX) from error


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        if default is _REQUIRED:
            raise _error(name, "missing", f"a {kind.__name__}", FIX)
        return default
    if type(value) is not kind:
        raise _error(name, f"a {type(value).__name__}", f"a {kind.__name__}", FIX)
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
        raise _error(name, found, f"an array of {kind.__name__}", FIX)
    items = list(value)
    if set(map(type, items)) - {kind}:
        wrong = next(i for i, item in enumerate(items) if type(item) is not kind)
        found = f"element {wrong} is a {type(items[wrong]).__name__}"
        raise _error(name, found, f"an array of {kind.__name__}", FIX)
    if length is not None and len(items) != length:
        raise _error(name, f"{len(items)} elements", f"{length}, one per token", FIX)
    if kind is float and any(item != item for item in items):
        raise _error(name, "NaN", "numbers", FIX)
    return items


def _error(name: str, found: str, allowed: str, todo: str) -> ModelError:
    return ModelError(f"tokenizer.ggml.{name}: {found}; allowed is {allowed}. {todo}")
