"""Where a GGUF file's tensors lie: sizes, extents, overlaps, truncation.

GGUF stores no byte sizes. They follow from type and shape, and are believed only where the offsets
of the neighbours agree; an id that is no stock ggml id must fill its extent exactly.
"""

from dataclasses import dataclass, replace
from math import prod

from pnrt.container.values import Problem
from pnrt.formats import FORMATS, STOCK, Format

REFETCH = "The file is truncated or damaged: fetch it again."
REWRITE = "The file is damaged or was written by a broken tool: fetch or convert it again."
# ids that only a fork of ggml gives: they may mean something else elsewhere
FORK_ONLY = ("pn3t", "pn4t")
# encodings of other containers
NOT_GGUF = ("cyb_", "bitnet_")


def why_not_gguf(name: str) -> str:
    """A sentence, with a space before it, on a format that GGUF files cannot hold; "" for others.

    Args: name – of a format, or anything.
    """
    form = FORMATS.get(name)
    if form is None or (form.weight and form.type_id is not None):
        return ""
    if not form.weight:
        return f" {name} is a format of activations."
    if name == "e4m3":
        return " e4m3 needs an id: --e4m3-id 42."
    if name == "bitnet_ternary":
        return " bitnet_ternary is only read, from .model files: --ternary bitnet_ternary."
    if name.startswith(NOT_GGUF):
        return (
            f" {name} is only in .model files: `pnrt convert IN.model OUT.model --to FORMAT` "
            "writes those."
        )
    return f" No GGUF type means {name}; e4m3 weights become it when they are loaded: --repack."


# no weight format stores more weights in a byte than this
MOST_PER_BYTE = 64


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    shape: row-major, (N, K) for a matrix. offset: absolute byte. nbytes: what the type needs, or
    the extent for an unknown id. extent: bytes up to the next tensor or the end of the file.
    type_id: None where the container has none. stock: the name of a type pnrt does not decode
    (for ggml's ids: where the extent agrees with it).
    """

    name: str
    shape: tuple[int, ...]
    type_id: int | None
    format: Format | None
    offset: int
    nbytes: int
    extent: int
    stock: str = ""

    @property
    def columns(self) -> int:
        """K, the weights of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """N, the number of rows (1 for a vector)."""
        return prod(self.shape[:-1])

    @property
    def elements(self) -> int:
        """N times K."""
        return self.rows * self.columns

    @property
    def type_name(self) -> str:
        """The format's name, or `id 16 (iq2_xxs)` for a type pnrt does not decode."""
        if self.format:
            return self.format.name
        if self.type_id is None:
            return self.stock
        return f"id {self.type_id}" + (f" ({self.stock})" if self.stock else "")


def place(file, infos: list[TensorInfo], report) -> None:
    """Fill `file.tensors` and `file.notes` from entries with relative offsets.

    Args:
        file: a GGUFFile with path, size, alignment and data_start set.
        report: called with each Problem; may raise.
    """
    infos = [replace(info, offset=file.data_start + info.offset) for info in infos]
    order = {}
    for info in infos:
        if info.name in order:
            _complain(report, file, info, "occurs twice", "names are unique", REWRITE)
        elif (info.offset - file.data_start) % file.alignment:
            found = f"offset {info.offset - file.data_start} is not aligned"
            allowed = f"offsets are multiples of {file.alignment} (general.alignment)"
            _complain(report, file, info, found, allowed, REWRITE)
        else:
            order[info.name] = _sized(file, info, report)
    by_offset = sorted(order.values(), key=lambda info: info.offset)
    for i, info in enumerate(by_offset):
        after = by_offset[i + 1] if i + 1 < len(by_offset) else None
        order[info.name] = by_offset[i] = _extent(file, info, after, report)
    _truncation(file, by_offset, report)
    file.tensors = {
        name: info for name, info in order.items() if info.offset + info.nbytes <= file.size
    }


def readings(info: TensorInfo, alignment: int) -> list[str]:
    """Names of the other GGUF formats whose bytes fill the extent of `info` exactly (padded).

    Formats without an id of their own come first: they are what a strange id may mean.
    """
    names = []
    for name, kind in FORMATS.items():
        if kind is info.format or not kind.weight or name.startswith(NOT_GGUF):
            continue
        if info.columns % kind.block == 0:
            need = info.rows * kind.row_bytes(info.columns)
            if need <= info.extent <= padded(need, alignment):
                names.append(name)
    return sorted(names, key=lambda name: FORMATS[name].type_id is not None)


def padded(n: int, alignment: int) -> int:
    """`n` rounded up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment


def _sized(file, info: TensorInfo, report) -> TensorInfo:
    """`info` with the bytes its type needs (0 if unknown); a row that does not fit is reported."""
    if info.format is None:
        _, block, size = STOCK.get(info.type_id, ("", 1, 0))
        return replace(info, nbytes=info.elements * size // block)
    if info.columns % info.format.block:
        found = f"has rows of {info.columns} weights"
        allowed = f"{info.format.name} (id {info.type_id}) takes multiples of {info.format.block}"
        _complain(report, file, info, found, allowed, REWRITE)
        return replace(info, format=None)
    return replace(info, nbytes=info.rows * info.format.row_bytes(info.columns))


def _truncation(file, by_offset: list[TensorInfo], report) -> None:
    ends = [info.offset + info.nbytes for info in by_offset]
    if max(ends, default=0) <= file.size:
        return
    first = next(i for i, end in enumerate(ends) if end > file.size)
    info = by_offset[first]
    found = f"takes bytes {info.offset:#x} to {ends[first]:#x} as {info.type_name}"
    allowed = f"the file ends at {file.size:#x}, {max(ends) - file.size} bytes are missing in all"
    todo = REFETCH if info is not by_offset[-1] else _other(info, file.alignment, REFETCH)
    _complain(report, file, info, found, allowed, todo)


def _extent(file, info: TensorInfo, after: TensorInfo | None, report) -> TensorInfo:
    """`info` with its extent, compared with what its type needs; truncation is told later."""
    extent = (after.offset if after else max(file.size, info.offset)) - info.offset
    info = replace(info, extent=extent)
    if after is None and info.offset + info.nbytes > file.size:
        return info
    full = padded(info.nbytes, file.alignment)
    if info.format is None and info.nbytes <= extent:
        if info.elements > extent * MOST_PER_BYTE:
            found = f"has shape {list(info.shape)} and {extent} bytes"
            allowed = f"no format stores more than {MOST_PER_BYTE} weights per byte"
            _complain(report, file, info, found, allowed, REWRITE)
        stock = STOCK[info.type_id][0] if info.nbytes > 0 and extent <= full else ""
        return replace(info, nbytes=extent, stock=stock)
    needs = f"needs {info.nbytes} bytes as {info.type_name}"
    other = _other(info, file.alignment, REWRITE)
    if info.nbytes > extent:
        _complain(report, file, info, needs, f"{after.name} begins {extent} bytes later", other)
    elif extent > full:
        ahead = f"the next tensor, {after.name}" if after else "the end of the file"
        room = f"{extent} bytes lie before {ahead}"
        # slack in a stock type is only odd; under a fork's id, or one mapped by hand, it is
        # evidence that the id means another format (unless it is the file's tail)
        if _certain(info) or (after is None and not readings(info, file.alignment)):
            ignored = "The bytes between are ignored; most tools pack tensors tightly."
            file.notes.append(_problem(file, info, needs, room, ignored))
        else:
            _complain(report, file, info, needs, room, other)
    return info


def _certain(info: TensorInfo) -> bool:
    """Whether every program means the same by the tensor's id."""
    kind = info.format
    return kind is not None and kind.type_id == info.type_id and kind.name not in FORK_ONLY


def _other(info: TensorInfo, alignment: int, otherwise: str) -> str:
    if _certain(info):
        return otherwise
    if info.type_id in STOCK:
        name, block, size = STOCK[info.type_id]
        need = info.elements * size // block
        if need <= info.extent <= padded(need, alignment):
            return (
                f"The bytes fit {name}, which released ggml means by id {info.type_id}: open the "
                "file without mapping that id by hand (extra_types, --e4m3-id)."
            )
    fits = readings(info, alignment)
    if not fits:
        return otherwise
    return (
        f"The bytes would fit {', '.join(fits)}: id {info.type_id} may mean another format in this "
        f"file; ask its author, or map the id by hand (extra_types{_hint(fits, info)})."
    )


def _hint(fits: list[str], info: TensorInfo) -> str:
    return f", --e4m3-id {info.type_id}" if "e4m3" in fits else ""


def _problem(file, info: TensorInfo, found: str, allowed: str, todo: str) -> Problem:
    return Problem(str(file.path), f"tensor {info.name}", found, allowed, todo, info.offset)


def _complain(report, file, info: TensorInfo, *parts: str) -> None:
    report(_problem(file, info, *parts))
