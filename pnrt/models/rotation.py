"""Is this file's weights rotated, and how: the reader of pnrt.rotation.* and prism.hadamard.*.

A rotated row of width K is stored as FWHT_b(signs * row), blocks of b columns, scaled by 1/sqrt(b).
A product then needs its input treated the same way; a looked-up embedding row needs the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pnrt.errors import ModelError

if TYPE_CHECKING:
    from pnrt.container.gguf import GGUFFile

PN_FORMATS = ("pn3t", "pn4t")
EMBEDDING = "token_embd.weight"
_OURS = "pnrt.rotation."
_PRISM = "prism.hadamard."
# `auto` takes no larger block: 1024 divides every width of the 27B model
LARGEST_BLOCK = 1024
_AUTO = -1
# a file with a key that starts so says how its weights are rotated
ROTATION_KEYS = (_OURS, _PRISM)
_OUR_KEYS = ("version", "type", "widths", "block_sizes", "sign_mode", "sign_values", "tensors")
_PRISM_KEYS = (
    "version",
    "transform",
    "axis",
    "block_size",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
)
_ADVICE = (
    "The declaration is damaged or newer than this pnrt: write the file again with `pnrt quantize`."
)


@dataclass(frozen=True)
class Rotation:
    """How the rows of a file's tensors are stored.

    kind: "none" or "hadamard". blocks: width K -> block b, a power of two dividing K. signs:
    width K -> [K] int8 of +1 and -1; a width without an entry has no signs. tensors: names of every
    tensor whose rows are stored rotated (products rotate their input, a look-up in
    token_embd.weight is rotated back). gdn_v_grouped: the columns of ssm_out are in grouped head
    order. source: what said so.
    """

    kind: str = "none"
    blocks: Mapping[int, int] = field(default_factory=dict)
    signs: Mapping[int, np.ndarray] = field(default_factory=dict)
    tensors: frozenset[str] = frozenset()
    gdn_v_grouped: bool = False
    source: str = ""

    def block_of(self, name: str, columns: int) -> int:
        """Block size a tensor's rows are rotated with, 0 when they are not."""
        return self.blocks[columns] if name in self.tensors else 0


def read_rotation(file: GGUFFile, choice: str | None = None) -> Rotation:
    """Find out whether a file's weights are rotated, or refuse to guess.

    Args:
        file: GGUFFile.
        choice: "none", "hadamard:BLOCK", "hadamard:auto" or None – what the user said (--rotation);
            it decides only for a file that declares nothing, and must not contradict one that does.
    Returns:
        The Rotation.
    Raises:
        ModelError: PN tensors with neither declaration nor choice, an invalid or unknown
            declaration, two that differ, or a choice that differs from the file.
    """
    block = None if choice is None else _parse_choice(choice)
    declared = [
        read(file)
        for prefix, read in ((_OURS, _read_ours), (_PRISM, _read_prism))
        if any(key.startswith(prefix) for key in file.metadata)
    ]
    if len(declared) == 2 and (difference := _difference(*declared)):
        raise ModelError(
            f"{file.path}: keys pnrt.rotation.* and prism.hadamard.*: found {difference}; "
            "both must say the same. " + _ADVICE
        )
    if declared:
        blocks = declared[0].blocks or {1: 0}
        if block is not None and any(_size(block, w) != b for w, b in blocks.items()):
            raise ModelError(
                f"{file.path}: --rotation {choice}: the file itself declares "
                f"{_describe(declared[0])} ({declared[0].source}); a choice must not "
                "contradict it. Leave --rotation out."
            )
        return declared[0]
    if block is not None:
        return _chosen(file, choice, block)
    pn = _pn_tensors(file)
    if pn:
        raise ModelError(
            f"{file.path}: rotation: found {len(pn)} PN tensors (the first: {pn[0].name}) and no "
            "key pnrt.rotation.* or prism.hadamard.* that says whether they are rotated; one is "
            "needed, because a wrong guess gives fluent noise, not an error. If you know how the "
            'file was made, say `--rotation none` (not rotated; in Python rotation="none") or '
            "`--rotation hadamard:BLOCK`."
        )
    return Rotation(source="no PN tensors")


def _pn_tensors(file: GGUFFile) -> list[Any]:
    return [
        t for t in file.tensors.values() if t.format is not None and t.format.name in PN_FORMATS
    ]


def auto_block(width: int) -> int:
    """The largest power of two that divides a width, at most LARGEST_BLOCK."""
    return min(LARGEST_BLOCK, width & -width)


def _size(block: int, width: int) -> int:
    return auto_block(width) if block == _AUTO else block


def _parse_choice(choice: str) -> int:
    """The block size a user's words name, 0 for none."""
    if choice == "none":
        return 0
    if choice == "hadamard:auto":
        return _AUTO
    kind, _, number = choice.partition(":")
    block = int(number) if number.isascii() and number.isdigit() and len(number) < 7 else 0
    if kind != "hadamard" or block < 2 or block & (block - 1):
        raise ModelError(
            f"--rotation: found {choice!r}; needed none, or hadamard:BLOCK with a power of two "
            "from 2, such as hadamard:1024, or hadamard:auto for the largest that divides each "
            "width. Say how the file was made."
        )
    return block


def _chosen(file: GGUFFile, choice: str, block: int) -> Rotation:
    """The rotation a choice means for a file that declares nothing."""
    if not block:
        return Rotation(source="--rotation none")
    # embedding and output stay unrotated in the published mix, whatever their format
    rotated = [t for t in _pn_tensors(file) if t.name not in (EMBEDDING, "output.weight")]
    if not rotated:
        raise ModelError(
            f"{file.path}: --rotation {choice}: found no PN tensors to rotate; only their "
            "rotation can be chosen by hand. Leave --rotation out."
        )
    for info in rotated:
        if info.columns % _size(block, info.columns):
            raise ModelError(
                f"{file.path}: --rotation {choice}: tensor {info.name} has {info.columns} "
                f"columns; needed a multiple of {block}. Choose a block that divides "
                "every rotated width."
            )
    return Rotation(
        kind="hadamard",
        blocks={info.columns: _size(block, info.columns) for info in rotated},
        tensors=frozenset(info.name for info in rotated),
        source=f"--rotation {choice}",
    )


def _read_ours(file: GGUFFile) -> Rotation:
    keys = _Declaration(file, _OURS, _OUR_KEYS)
    keys.exactly("version", 1)
    kind = keys.one_of("type", ("hadamard", "none"))
    if kind == "none":
        keys.nothing_else(("version", "type"), "no rotation")
        return Rotation(source="pnrt.rotation.type")
    widths = keys.integers("widths")
    if any(w < 1 for w in widths) or any(a >= b for a, b in pairwise(widths)):
        keys.fail("widths", widths, "distinct positive widths in ascending order")
    sizes = keys.integers("block_sizes")
    if len(sizes) != len(widths):
        keys.fail(
            "block_sizes", f"{len(sizes)} blocks", f"one for each of the {len(widths)} widths"
        )
    blocks = dict(zip(widths, sizes, strict=True))
    for width, block in blocks.items():
        keys.check_block("block_sizes", block, width)
    tensors = keys.tensors("tensors")
    for name in tensors:
        if file.tensors[name].columns not in blocks:
            keys.fail(
                "tensors",
                f"{name} with {file.tensors[name].columns} columns",
                f"only tensors of the declared widths {widths}",
            )
    signs = {}
    if keys.one_of("sign_mode", ("none", "explicit")) == "explicit":
        signs = keys.signs(widths)
    else:
        keys.absent("sign_values", "with sign_mode none")
    return Rotation("hadamard", blocks, signs, frozenset(tensors), source="pnrt.rotation keys")


def _read_prism(file: GGUFFile) -> Rotation:
    keys = _Declaration(file, _PRISM, _PRISM_KEYS)
    keys.exactly("version", 1)
    keys.exactly("transform", "normalized-sylvester-walsh-hadamard")
    keys.exactly("axis", "input-last-dimension")
    block = keys.integer("block_size")
    products = keys.tensors("weight_names")
    inverse = keys.tensors("inverse_weight_names", optional=True)
    if any(name != EMBEDDING for name in inverse):
        keys.fail(
            "inverse_weight_names", inverse, f"only {EMBEDDING}, the one tensor that is looked up"
        )
    if EMBEDDING in products and not inverse:
        keys.fail(
            "weight_names",
            EMBEDDING,
            "it in inverse_weight_names too, or its look-up stays rotated",
        )
    names = {*products, *inverse}
    widths = sorted({file.tensors[name].columns for name in names})
    for width in widths:
        keys.check_block("block_size", block, width)
    signs = {}
    if keys.one_of("sign_mode", ("identity", "explicit")) == "explicit":
        signed = keys.integers("sign_widths")
        if len(set(signed)) != len(signed) or any(w < 1 for w in signed):
            keys.fail("sign_widths", signed, "distinct positive widths")
        if missing := [w for w in widths if w not in signed]:
            keys.fail("sign_widths", signed, f"also {missing}, widths of listed tensors")
        signs = {w: s for w, s in keys.signs(signed).items() if w in widths}
    else:
        keys.absent("sign_widths", "with sign_mode identity")
        keys.absent("sign_values", "with sign_mode identity")
    return Rotation(
        "hadamard",
        dict.fromkeys(widths, block),
        signs,
        frozenset(names),
        keys.flag("gdn_v_grouped"),
        "prism.hadamard keys",
    )


class _Declaration:
    """Typed reads of one key set; an unknown key is refused, it could change what others mean."""

    def __init__(self, file: GGUFFile, prefix: str, known: tuple[str, ...]):
        self.file = file
        self.prefix = prefix
        for key in file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                self.fail(key.removeprefix(prefix), "an unknown key", "only " + ", ".join(known))

    def fail(self, key: str, found: Any, needed: str) -> NoReturn:
        shown = str(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ModelError(
            f"{self.file.path}: key {self.prefix}{key}: found {shown}; needed {needed}. {_ADVICE}"
        )

    def get(self, key: str) -> Any:
        return self.file.metadata.get(self.prefix + key)

    def exactly(self, key: str, needed: Any) -> None:
        value = self.get(key)
        if value != needed or isinstance(value, bool):
            self.fail(key, "nothing" if value is None else repr(value), repr(needed))

    def one_of(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.get(key)
        if value not in allowed:
            self.fail(key, "nothing" if value is None else repr(value), " or ".join(allowed))
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, True, False):
            self.fail(key, repr(value), "true or false")
        return bool(value)

    def integer(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, "nothing" if value is None else repr(value), "an integer")
        return value

    def _list(self, key: str, kind: type, optional: bool = False) -> list[Any]:
        value = self.get(key)
        if value is None and optional:
            return []
        if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
            self.fail(key, "nothing" if value is None else repr(value), "an array")
        values = list(value)
        for entry in values:
            if not isinstance(entry, kind) or isinstance(entry, bool):
                self.fail(key, f"an entry {entry!r}", f"an array of {kind.__name__}")
        return values

    def integers(self, key: str) -> list[int]:
        return self._list(key, int)

    def tensors(self, key: str, optional: bool = False) -> list[str]:
        """Names of tensors that exist in the file and are matrices of products."""
        names = self._list(key, str, optional)
        if not names and not optional:
            self.fail(key, "an empty array", "at least one name")
        for name in names:
            info = self.file.tensors.get(name)
            # a convolution is not a product, nothing rotates its input
            if info is None or len(info.shape) != 2 or name.endswith("ssm_conv1d.weight"):
                found = "no such tensor" if info is None else f"shape {list(info.shape)}"
                self.fail(key, f"{name} ({found})", "names of this file's projections")
        return names

    def signs(self, widths: list[int]) -> dict[int, np.ndarray]:
        """sign_values cut by width; all-ones vectors are left out, they change nothing."""
        values = self.integers("sign_values")
        if len(values) != sum(widths):
            self.fail("sign_values", f"{len(values)} values", f"{sum(widths)}, the sum of {widths}")
        if any(v not in (1, -1) for v in values):
            self.fail("sign_values", next(v for v in values if v not in (1, -1)), "only 1 and -1")
        cut = np.split(np.array(values, np.int8), np.cumsum(widths)[:-1])
        return {w: s for w, s in zip(widths, cut, strict=True) if (s < 0).any()}

    def check_block(self, key: str, block: int, width: int) -> None:
        if block < 1 or block & (block - 1) or width % block:
            self.fail(key, f"{block} for width {width}", "a power of two that divides the width")

    def absent(self, key: str, why: str) -> None:
        value = self.get(key)
        if value is not None and not (hasattr(value, "__len__") and len(value) == 0):
            self.fail(key, "a value", f"no such key {why}")

    def nothing_else(self, allowed: tuple[str, ...], why: str) -> None:
        for key in self.file.metadata:
            short = key.removeprefix(self.prefix)
            if key.startswith(self.prefix) and short not in (*allowed, "sign_mode"):
                self.absent(short, f"with {why}")


def _difference(a: Rotation, b: Rotation) -> str:
    """Where two declarations of one file differ, or an empty string."""
    if a.kind != b.kind:
        return f"{a.kind} in one and {b.kind} in the other"
    if a.tensors != b.tensors:
        return f"{min(a.tensors ^ b.tensors)} rotated in only one of them"
    if a.gdn_v_grouped != b.gdn_v_grouped:
        return "gdn_v_grouped true, which pnrt.rotation has no key for"
    for width in sorted(set(a.blocks) & set(b.blocks)):
        if a.blocks[width] != b.blocks[width]:
            return f"blocks {a.blocks[width]} and {b.blocks[width]} for width {width}"
        ones = np.ones(width, np.int8)
        if not np.array_equal(a.signs.get(width, ones), b.signs.get(width, ones)):
            return f"different signs for width {width}"
    return ""


def _describe(rotation: Rotation) -> str:
    if rotation.kind == "none":
        return "no rotation"
    blocks = ", ".join(map(str, sorted(set(rotation.blocks.values()))))
    return f"a hadamard rotation with blocks of {blocks}"
