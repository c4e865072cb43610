"""The mixes: rules from a tensor's class to the formats to try for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pnrt.container.layout import why_not_gguf
from pnrt.errors import FormatError, ModelError
from pnrt.formats import FORMATS

# matrices that no product reads: convolution taps and the gates of expert layers
_KEPT = re.compile(r"(_norm|conv1d|ffn_gate_inp|rope_freqs|position_embd)")


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight matrix of a product (or of a look-up); only those change."""
    return len(shape) == 2 and name.endswith(".weight") and not _KEPT.search(name)


@dataclass(frozen=True)
class Mix:
    """A rule from tensor class to formats; the first format whose block divides K is taken.

    Attributes:
        matrix: formats for the weight matrices of the blocks.
        ends: formats for `token_embd` and `output`: q8_0 unless the mix is about them. Their rows
            are each read for one token only, so few bits there cost more than they save.
        special: (regex, formats) pairs that come before `matrix`.
        file_type: the number for `general.file_type`, or None where ggml has none for the mix.
    """

    title: str
    matrix: tuple[str, ...]
    ends: tuple[str, ...] = ("q8_0", "f16")
    special: tuple[tuple[str, tuple[str, ...]], ...] = ()
    file_type: int | None = None

    def formats(self, name: str) -> tuple[str, ...]:
        """The formats to try for the tensor `name`, best first."""
        for pattern, formats in self.special:
            if re.search(pattern, name):
                return formats
        return self.ends if name in ("token_embd.weight", "output.weight") else self.matrix

    def choose(self, name: str, k: int) -> tuple[str, str]:
        """(format, why) for the matrix `name` with k columns; FormatError if none divides k."""
        skipped = []
        for target in self.formats(name):
            if target in FORMATS and k % FORMATS[target].block == 0:
                return target, "; ".join(skipped) or "mix"
            if target in FORMATS:
                skipped.append(f"K = {k} is no multiple of {target}'s {FORMATS[target].block}")
            else:
                skipped.append(f"this version does not write {target}")
        raise FormatError(
            f"{name}: no format of the mix ({', '.join(self.formats(name))}) takes K = {k}."
        )


_PN3 = ("pn3t", "pn4t", "q8_0", "f16")
_PN4 = ("pn4t", "q8_0", "f16")
_SMALL = (r"ssm_(alpha|beta)\.", ("q8_0", "f16"))

MIXES: dict[str, Mix] = {
    "pn3": Mix("pn3t where K divides by 80, else pn4t", _PN3, special=(_SMALL,)),
    "pn4": Mix("pn4t", _PN4, special=(_SMALL,)),
    "p0k": Mix(
        "the mix of Qwen3.8-27B-PN3: pn3t, pn4t for attn_k and attn_v, q3_K embedding, q4_K output",
        _PN3,
        special=(
            _SMALL,
            (r"attn_[kv]\.", _PN4),
            (r"^token_embd\.", ("q3_K", "q4_0", "q8_0", "f16")),
            (r"^output\.", ("q4_K", "q5_0", "q8_0", "f16")),
        ),
    ),
    "q4_k_m": Mix(
        "q4_K; q6_K for attn_v, ffn_down and output",
        ("q4_K", "q5_0", "q8_0", "f16"),
        ends=("q6_K", "q8_0", "f16"),
        special=(
            _SMALL,
            (r"(attn_v|ffn_down)\.", ("q6_K", "q8_0", "f16")),
            (r"^token_embd\.", ("q4_K", "q5_0", "q8_0", "f16")),
        ),
        file_type=15,
    ),
    "q8_0": Mix("q8_0", ("q8_0", "f16"), file_type=7),
    "q4_0": Mix("q4_0", ("q4_0", "q8_0", "f16"), file_type=2),
    "f16": Mix("f16", ("f16",), ends=("f16",), file_type=1),
}

_FLOATS = ("f32", "f16", "bf16")
# where 256 does not divide K: the smallest format in blocks of 32 that loses no more
_BLOCKS_OF_32 = {"q2_K": "q4_0", "q3_K": "q4_0", "q4_K": "q5_0", "q5_K": "q5_1", "iq4_xs": "iq4_nl"}


def find_mix(name: str, formats: Iterable[str]) -> Mix:
    """The mix of that name, or one of a single format where it divides K.

    Args:
        formats: names of the formats that can be written.
    Raises: ModelError for a name that is neither.
    """
    formats = list(formats)
    if name in MIXES:
        return MIXES[name]
    if name in _FLOATS and name in formats:
        return Mix(name, (name,), ends=(name,))
    if name in formats:
        between = (_BLOCKS_OF_32[name],) if name in _BLOCKS_OF_32 else ()
        return Mix(name, (name, *between, "q8_0", "f16"))
    raise ModelError(
        f"--mix {name}: no such mix. pnrt has {', '.join(MIXES)}, and each format by itself: "
        f"{', '.join(f for f in formats if f not in MIXES)}." + why_not_gguf(name)
    )
