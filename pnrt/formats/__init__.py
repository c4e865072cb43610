"""Weight formats: what the bytes mean. `FORMATS` is the one table, owned by no backend.

from pnrt.formats import FORMATS
x = FORMATS["pn3t"].decode(rows)       # [N, row_bytes] uint8 -> [N, K] float32
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pnrt.errors import FormatError
from pnrt.formats import codebook, cyb, floats, fp8, kquant, legacy, pn, ternary
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
        legacy.Centred5("q5_0", 6, 32, 22, 32, 2, "5 bits, scale"),
        legacy.Offset5("q5_1", 7, 32, 24, 32, 8, "5 bits, scale and minimum"),
        legacy.Bytes("q8_0", 8, 32, 34, 32, 2, "8 bits, scale"),
        legacy.BytesWithSum("q8_1", 9, 32, 36, 32, 4, "8 bits, scale and sum (activations)"),
        kquant.Q2K("q2_K", 10, 256, 84, 16, 4, "2 bits, 4-bit scales and minima"),
        kquant.Q3K("q3_K", 11, 256, 110, 16, 2, "3 bits, 6-bit scales"),
        kquant.Q4K("q4_K", 12, 256, 144, 32, 16, "4 bits, 6-bit scales and minima"),
        kquant.Q5K("q5_K", 13, 256, 176, 32, 16, "5 bits, 6-bit scales and minima"),
        kquant.Q6K("q6_K", 14, 256, 210, 16, 2, "6 bits, 8-bit scales"),
        kquant.Q8K("q8_K", 15, 256, 292, 256, 4, "8 bits, float scale and sums (activations)"),
        codebook.IQ4NL("iq4_nl", 20, 32, 18, 32, 2, "16 values, scale"),
        codebook.IQ4XS("iq4_xs", 23, 256, 136, 32, 8, "16 values, 6-bit scales"),
        ternary.TQ1("tq1_0", 34, 256, 54, 256, 2, "three values, five in a byte"),
        ternary.TQ2("tq2_0", 35, 256, 66, 256, 2, "three values, 2 bits"),
        codebook.MXFP4("mxfp4", 39, 32, 17, 32, 1, "4-bit floats, power of two"),
        codebook.NVFP4("nvfp4", 40, 64, 36, 16, 4, "4-bit floats, 8-bit float scales"),
        # its proposed id, 42, means q2_0 in released ggml: mapped only when the user says so
        fp8.E4M3("e4m3", None, 32, 34, 32, 2, "8-bit floats, scale"),
        fp8.MXFP8("mxfp8", None, 32, 33, 32, 1, "8-bit floats, power of two"),
        fp8.MXFP8Runs("mxfp8_264", None, 256, 264, 32, 8, "8-bit floats, powers of two behind"),
        cyb.Fixed("cyb_u32", None, 1, 4, 0, 4, "fixed point 16.16", kind=np.int32),
        cyb.Fixed("cyb_u16", None, 1, 2, 0, 2, "fixed point 8.8", kind=np.int16),
        cyb.Scaled("cyb_q8", None, 32, 34, 32, 2, "8 bits, 8.8 scale"),
        cyb.Scaled4("cyb_q4", None, 32, 18, 32, 2, "4 bits, 8.8 scale"),
        cyb.Ternary("cyb_ternary", None, 4, 1, 32, 1, "0, +1, -1", values=(0, 1, -1, 0)),
        cyb.Ternary("bitnet_ternary", None, 4, 1, 32, 1, "-1, 0, +1", values=(-1, 0, 1, 0)),
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
