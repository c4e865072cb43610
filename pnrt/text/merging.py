"""From a piece of text to token ids: byte-level BPE by rank, SentencePiece BPE by score.

An engine is a function: a piece of text without special tokens -> ids. The ranks are merged by the
`tokenizers` library, imported when the first tokenizer is built; the scores here, because ranks
cannot say what happens between equal scores.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

SPACE = "\u2581"  # how SentencePiece writes a space

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
# other names of the same rules
ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("phi-2", "mellum", "a.x-4.0"), "gpt-2"),
}


def _alphabet() -> list[str]:
    """GPT-2's printable character for each byte 0..255."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


ALPHABET = _alphabet()
BYTE_OF = {char: bytes([byte]) for byte, char in enumerate(ALPHABET)}


def by_rank(ids: dict[str, int], merges: list[tuple[str, str]], pre: str) -> Callable:
    """The engine of byte-level BPE.

    Args:
        ids: text -> id of every token.
        merges: pairs of tokens, the first to be merged first.
        pre: a name in PRE.
    Raises: ValueError when a merge is not one of tokens into a token.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    size, missing = len(ids), {}
    if any(char not in ids for char in ALPHABET):
        # a byte outside the vocabulary has to stand in the way of merges before it is dropped
        missing = {"unk_token": "\0missing"}
        ids = ids | {"\0missing": size}
    try:
        whole = pre == "llama-bpe"
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=whole, **missing)
    except Exception as error:
        # the library raises bare exceptions
        raise ValueError(str(error)) from error
    engine = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE[pre]]
    bytelevel = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytelevel])

    def encode(piece: str) -> list[int]:
        found = engine.encode(piece, add_special_tokens=False).ids
        return [i for i in found if i < size] if missing else found

    return encode


def by_score(
    ids: dict[str, int], scores: list[float], unknown: int | None, prefix: bool
) -> Callable:
    """The engine of SentencePiece BPE: the best-scored neighbours first, the leftmost on ties.

    Args:
        ids: text -> id of every token.
        scores: [V] - higher merges earlier.
        unknown: the id of a byte that has no token; None drops it.
        prefix: put a space before each piece.
    """
    start = SPACE if prefix else ""

    def encode(piece: str) -> list[int]:
        found = []
        for part in _merge(start + piece.replace(" ", SPACE), ids, scores):
            if part in ids:
                found.append(ids[part])
                continue
            for byte in part.encode():
                found.append(ids.get(f"<0x{byte:02X}>", unknown))
        return [i for i in found if i is not None]

    return encode


def _merge(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """The characters of a text, merged while two neighbours make a token."""
    parts = list(text)
    left, right = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))

    def candidate(i: int) -> tuple | None:
        """(cost, place, merged text) of part i and the one after it."""
        if i < 0 or right[i] == len(parts):
            return None
        both = parts[i] + parts[right[i]]
        return (-scores[ids[both]], i, both) if both in ids else None

    queue = [found for i in range(len(parts)) if (found := candidate(i))]
    heapify(queue)
    while queue:
        _, i, both = heappop(queue)
        j = right[i]
        # an entry is stale when a merge has changed either part since
        if not parts[i] or j == len(parts) or len(parts[i]) + len(parts[j]) != len(both):
            continue
        parts[i], parts[j], right[i] = both, "", right[j]
        if right[i] < len(parts):
            left[right[i]] = i
        for changed in (candidate(left[i]), candidate(i)):
            if changed:
                heappush(queue, changed)
    return [part for part in parts if part]
