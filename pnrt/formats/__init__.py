"""Weight formats: what the bytes mean. `FORMATS` is the one table, owned by no backend.

from pnrt.formats import FORMATS
x = FORMATS["pn3t"].decode(rows)       # [N, row_bytes] uint8 -> [N, K] float32
"""

from __future__ import annotations

from collections.abc import Mapping

from pnrt.errors import FormatError
from pnrt.formats import floats, legacy, pn
from pnrt.formats.base import Finding, Format, Parts

__all__ = ["FORMATS", "STOCK", "Finding", "Format", "Parts", "by_id", "get"]

# name, GGUF type id, weights and bytes per block, weights per scale, alignment, title
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        floats.Scalar("f32", 0, 1, 4, 0, 4, "32-bit float"),
        floats.Half("f16", 1, 1, 2, 0, 2, "16-bit float"),
        floats.BFloat("bf16", 30, 1, 2, 0, 2, "bfloat16"),
        legacy.Centred("q4_0", 2, 32, 18, 32, 2, "4 bits, scale"),
        legacy.Offset("q4_1", 3, 32, 20, 32, 4, "4 bits, scale and minimum"),
        legacy.Bytes("q8_0", 8, 32, 34, 32, 2, "8 bits, scale"),
        pn.PN("pn3t", 124, 80, 34, 80, 2, "PN, 3 bits in pairs of half-words", bits=3),
        pn.PN("pn4t", 125, 64, 34, 64, 2, "PN, 4 bits in pairs of half-words", bits=4),
    )
}

# ggml's other type ids, for messages and for the extent of tensors we cannot read:
# id -> name, weights per block, bytes per block
STOCK: dict[int, tuple[str, int, int]] = {
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    41: ("q1_0", 128, 18),
    # the e4m3 pull request uses 42 too; released ggml means q2_0 by it
    42: ("q2_0", 64, 18),
}

_BY_ID = {each.type_id: each for each in FORMATS.values() if each.type_id is not None}


def by_id(type_id: int, extra: Mapping[int, str] | None = None) -> Format | None:
    """The format of a GGUF type id, None for ids pnrt does not decode.

    `extra` maps further ids to format names, e.g. {42: "e4m3"}, and wins over the table.
    """
    if extra and type_id in extra:
        return get(extra[type_id])
    return _BY_ID.get(type_id)


def get(name: str) -> Format:
    """The format of that name. Raises FormatError with the names there are."""
    try:
        return FORMATS[name]
    except KeyError:
        raise FormatError(
            f"there is no format {name!r}; choose one of {', '.join(FORMATS)}."
        ) from None
