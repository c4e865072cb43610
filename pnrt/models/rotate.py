"""Rotate the weights of a model when it is quantized, and say so in its keys (MODELS.md 12)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from pnrt.errors import ModelError
from pnrt.models.config import read_config
from pnrt.models.rotation import Rotation, auto_block, read_rotation

if TYPE_CHECKING:
    from pnrt.container.gguf import GGUFFile

# products whose input is rotated; alpha and beta, look-ups and the output matrix are not among them
_ROTATED = re.compile(
    r"blk\.(\d+)\.(attn_(q|k|v|qkv|gate|output)|ssm_out|ffn_(gate|up|down))\.weight"
)


def rotation_to_apply(
    file: GGUFFile, rotate: str | int | None, declared: str | None
) -> Rotation | None:
    """The rotation `--rotate` means for a file, None without it.

    Args: declared – what the user said about a source that does not say it (--rotation).
    Raises: ModelError for a source that is rotated already, or may be.
    """
    if rotate is None:
        return None
    source = read_rotation(file, declared)
    if source.kind != "none":
        raise ModelError(
            f"{file.path}: --rotate {rotate}: its weights are rotated already ({source.source}); "
            "a second rotation on top cannot be declared. Leave --rotate out: the file stays "
            "rotated as it is. For another rotation start from the original weights."
        )
    return choose_rotation(file, rotate)


def choose_rotation(file: GGUFFile, block: str | int) -> Rotation:
    """Decide which tensors of an unrotated model get rotated, and in which blocks.

    Args:
        file: GGUFFile.
        block: a power of two from 2, for every width; or "auto": for each width the largest one
            that divides it, at most 1024.
    Returns:
        The Rotation, without signs.
    Raises:
        ModelError: an unknown architecture, no tensor to rotate, or a block that is no power of two
            or does not divide every width.
    """
    size = _parse_block(block)
    config = read_config(file)
    names, widths = [], {}
    for info in file.tensors.values():
        found = _ROTATED.fullmatch(info.name)
        if not found or int(found[1]) >= config.n_layers:
            continue
        b = size or auto_block(info.columns)
        if info.columns % b:
            raise ModelError(
                f"{file.path}: --rotate {block}: tensor {info.name} has {info.columns} columns; "
                f"needed a multiple of {block}. Use --rotate auto, which chooses for each width."
            )
        if b > 1:
            names.append(info.name)
            widths[info.columns] = b
    if not names:
        raise ModelError(
            f"{file.path}: --rotate {block}: found no matrix that is rotated; these are the "
            "products of attention and feed-forward blocks, with an even number of columns. "
            "Leave --rotate out."
        )
    blocks = dict(sorted(widths.items()))
    return Rotation("hadamard", blocks, {}, frozenset(names), source=f"--rotate {block}")


def _parse_block(block: str | int) -> int:
    """The number, 0 for auto."""
    text = str(block)
    if text == "auto":
        return 0
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
    if size < 2 or size & (size - 1):
        raise ModelError(
            f"--rotate: found {text!r}; needed auto, or a power of two from 2, such as 1024."
        )
    return size


def rotation_keys(rotation: Rotation) -> list[tuple[str, str, object]]:
    """Metadata that declares a rotation: (key, type, value), for write_gguf.

    pnrt.rotation.* always; prism.hadamard.* too where it can say the same, that is when one block
    size serves every width.
    """
    ours = [("pnrt.rotation.version", "uint32", 1), ("pnrt.rotation.type", "string", rotation.kind)]
    if rotation.kind == "none":
        return ours
    widths = sorted(rotation.blocks)
    names = sorted(rotation.tensors, key=_in_order)
    signs = _all_signs(rotation, widths)
    ours += [
        ("pnrt.rotation.widths", "array[uint32]", widths),
        ("pnrt.rotation.block_sizes", "array[uint32]", [rotation.blocks[w] for w in widths]),
        ("pnrt.rotation.sign_mode", "string", "explicit" if signs else "none"),
        ("pnrt.rotation.tensors", "array[string]", names),
    ]
    if signs:
        ours.append(("pnrt.rotation.sign_values", "array[int8]", signs))
    if len(set(rotation.blocks.values())) > 1:
        return ours
    block = rotation.blocks[widths[0]]
    prism = [
        ("version", "uint32", 1),
        ("transform", "string", "normalized-sylvester-walsh-hadamard"),
        ("axis", "string", "input-last-dimension"),
        ("block_size", "uint32", block),
        ("sign_mode", "string", "explicit" if signs else "identity"),
        ("weight_names", "array[string]", names),
        ("inverse_weight_names", "array[string]", []),
        ("gdn_v_grouped", "bool", False),
    ]
    if signs:
        prism += [
            ("sign_widths", "array[uint32]", widths),
            ("sign_values", "array[int32]", signs),
        ]
    return ours + [(f"prism.hadamard.{key}", kind, value) for key, kind, value in prism]


def _in_order(name: str) -> list:
    """Sorts blk.9 before blk.10."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _all_signs(rotation: Rotation, widths: list[int]) -> list[int]:
    """Every width's signs in one list, empty where none has any."""
    if not rotation.signs:
        return []
    each = [rotation.signs.get(w, np.ones(w, np.int8)) for w in widths]
    return np.concatenate(each).tolist()


def rotate_rows(x: np.ndarray, block: int, signs: np.ndarray | None = None) -> np.ndarray:
    """Rotate weights: every row w becomes FWHT(signs * w), block by block.

    The rule itself in NumPy; formats.fwht is its compiled form.

    Args:
        x: [N, K] float32 – finite.
        block: power of two that divides K.
        signs: [K] of +1 and -1, None for all +1.
    Returns:
        [N, K] float32.
    Exact: the butterfly of MODELS.md 12.3 in float64, one multiplication by 1/sqrt(block), one
    rounding to float32.
    """
    y = x.astype(np.float64)
    if signs is not None:
        y *= signs
    h = 1
    while h < block:
        pairs = y.reshape(-1, 2, h)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        h *= 2
    return (y * (1.0 / np.sqrt(block))).astype(np.float32)
