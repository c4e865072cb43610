"""cyb's `.model` container: TOML frontmatter, `~~~` sections of text, then the weights.

Only `format_version = 2` is read: before it the same encoding names meant other bytes (u32 was raw
float32, q8 was Q8_0). Ternary tensors take their scale from a sibling tensor, NAME.scale.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pnrt.container.layout import REFETCH, REWRITE, TensorInfo
from pnrt.container.mapped import MappedFile, map_file
from pnrt.container.values import Problem
from pnrt.container.writer import TensorPlan, atomic, pieces
from pnrt.errors import FileError, FormatError
from pnrt.formats import FORMATS

# encoding name -> format; the k-quants are ggml's bytes, which importers write although the
# specification allows only the first five
ENCODINGS = {
    "u32": "cyb_u32", "u16": "cyb_u16", "q8": "cyb_q8", "q4": "cyb_q4", "ternary": "cyb_ternary",
    "q2k": "q2_K", "q3k": "q3_K", "q4k": "q4_K", "q5k": "q5_K", "q6k": "q6_K",
}  # fmt: skip
TERNARY = ("cyb_ternary", "bitnet_ternary")
SCALE_ENCODINGS = {"f32": "f32", "u32": "cyb_u32"}
FORMAT_VERSION = 2
DELIMITER = b"~~~weights\n"
# the text in front of the weights, a vocabulary included, is far smaller
MOST_TEXT = 256 << 20
SECTIONS = ("card", "config", "program", "graph", "chat", "tensors", "vocab", "eval")


class CybModel(MappedFile):
    """An open `.model` file; made by `open_model`.

    metadata: "cyb.NAME" and "config.NAME" with dots for tables -> TOML value.
    sections: name -> text. scales: ternary tensor -> its `.scale` sibling.
    """

    container = "cyb"

    def __init__(self, path: Path, mapped):
        super().__init__(path, mapped)
        self.version = FORMAT_VERSION
        self.sections: dict[str, str] = {}
        self.encodings: dict[str, str] = {}
        self.scales: dict[str, str] = {}
        self.scale_encoding: str | None = None

    def metadata_type(self, key: str) -> str:
        """The TOML type of a key; KeyError if absent."""
        value = self.metadata[key]
        return "array" if isinstance(value, list) else type(value).__name__

    def toml(self, section: str) -> dict:
        """A section as a dictionary; FileError if it is absent or no TOML."""
        if section not in self.sections:
            has = f"the file has {', '.join(self.sections) or 'none'}"
            _stop(self, "", f"there is no section {section}", has, "Import the model again.")
        return _toml(self.path, section, self.sections[section])

    def scaled(self, name: str, values: np.ndarray, start: int) -> np.ndarray:
        if name not in self.scales:
            return values
        scale = self.scale(name)
        return values * (scale[start : start + len(values), None] if scale.size > 1 else scale)

    def scale(self, name: str) -> np.ndarray:
        """[1] or [N] float32: the scale of a ternary tensor.

        Raises: FormatError while nobody has said how the sibling's u32 bytes are meant.
        """
        sibling = self.scales[name]
        if self.encodings[sibling] == "u32" and self.scale_encoding is None:
            raw = self.data(sibling).reshape(1, -1)
            bits, fixed = (FORMATS[f].decode(raw[:, :4])[0, 0] for f in SCALE_ENCODINGS.values())
            raise FormatError(
                f"{self.path}: {sibling}: its encoding is u32 and its first value is {bits:g} as "
                f"raw float32, {fixed:g} as 16.16 fixed point; the format does not decide between "
                "them. Say which: --scale-encoding f32 or --scale-encoding u32."
            )
        return self.values(sibling).reshape(-1)


def open_model(
    path: str | Path,
    *,
    scale_encoding: str | None = None,
    ternary: str = "cyb_ternary",
    problems: list[Problem] | None = None,
) -> CybModel:
    """Open and check a `.model` file (version 2).

    Args:
        scale_encoding: how u32 siblings of ternary tensors are meant: "f32" or "u32".
        ternary: the table of ternary codes, "cyb_ternary" or "bitnet_ternary".
        problems: if given, whatever does not stop the reading is appended here, not raised.
    Raises: FileError; FormatError for an unknown option.
    """
    path = Path(path)
    for what, value, allowed in (
        ("scale_encoding", scale_encoding, (None, *SCALE_ENCODINGS)),
        ("ternary", ternary, TERNARY),
    ):
        if value not in allowed:
            names = ", ".join(filter(None, allowed))
            raise FormatError(f"{what}: {value!r} was given; it is one of {names}. Choose one.")
    file = CybModel(path, map_file(path, "a .model file"))
    file.scale_encoding = scale_encoding

    def report(problem: Problem) -> None:
        if problems is None:
            raise problem.error()
        problems.append(problem)

    front = _sections(file)
    _weights_size(file, front, report)
    for name, table in file.toml("tensors").items():
        info = _entry(file, name, table, ternary, report)
        if info:
            file.tensors[name] = info
    _overlaps(file, report)
    _siblings(file, report)
    return file


def _sections(file: CybModel) -> dict:
    """Split the text into `file.sections`, fill the metadata; returns the frontmatter."""
    mapped = file.mapped()
    # a line of its own: at the start of the file, or behind a line end
    at_start = mapped[: len(DELIMITER)] == DELIMITER
    end = 0 if at_start else mapped.find(b"\n" + DELIMITER, 0, MOST_TEXT)
    if end < 0:
        allowed = "that line ends the text of a .model file"
        _stop(file, "", "has no line ~~~weights", allowed, REFETCH)
    end += mapped[end : end + 1] == b"\n"
    file.data_start = end + len(DELIMITER)
    try:
        text = mapped[:end].decode()
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} is not UTF-8"
        allowed = "the text in front of the weights is UTF-8"
        _stop(file, "text", found, allowed, REWRITE, error.start)
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.startswith("~~~")), len(lines))
    front = _toml(file.path, "frontmatter", "\n".join(lines[:first]))
    _version(file, front)
    # the card is markdown and may hold ~~~ fences: only names the frontmatter lists divide
    known = {each["name"] for each in _listed(front)} | {"tensors"}
    current: list[str] = []
    for line in lines[first:]:
        name = line[3:].strip()
        if line.startswith("~~~") and name in known and name not in file.sections:
            current = []
            file.sections[name] = current
        else:
            current.append(line)
    file.sections = {name: "\n".join(body) for name, body in file.sections.items()}
    _flatten(file.metadata, "cyb", front.get("cyb"))
    if "config" in file.sections:
        _flatten(file.metadata, "config", file.toml("config"))
    return front


def _listed(front: dict) -> list[dict]:
    """The entries of [[files]] that have a name."""
    files = front.get("files")
    entries = [each for each in files if isinstance(each, dict)] if isinstance(files, list) else []
    return [each for each in entries if isinstance(each.get("name"), str)]


def _version(file: CybModel, front: dict) -> None:
    cyb = front.get("cyb")
    version = cyb.get("format_version") if isinstance(cyb, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        _stop(
            file,
            "frontmatter",
            f"[cyb] format_version is {'absent' if version is None else repr(version)}",
            "2 is read; before it the same encoding names meant other bytes",
            "Import the source model again with a current tool.",
        )


def _weights_size(file: CybModel, front: dict, report) -> None:
    stated = [each.get("size") for each in _listed(front) if each["name"] == "weights"]
    held = file.size - file.data_start
    if stated and stated[0] is not None and stated[0] != held:
        found = f"size of the weights is given as {stated[0]}"
        allowed = f"the file holds {held} bytes behind ~~~weights"
        report(Problem(str(file.path), "frontmatter", found, allowed, REFETCH, file.data_start))


def _entry(file: CybModel, name: str, table, ternary: str, report) -> TensorInfo | None:
    """One tensor of the index; None if it cannot be used."""

    def bad(found: str, allowed: str, todo: str = REWRITE) -> None:
        report(Problem(str(file.path), f"tensor {name}", found, allowed, todo))

    table = table if isinstance(table, dict) else {}
    shape, encoding = table.get("shape"), table.get("encoding")
    offset, size = table.get("offset"), table.get("size")
    held = file.size - file.data_start
    if not (isinstance(shape, list) and len(shape) <= 4 and all(_count(n, 1) for n in shape)):
        return bad(f"shape is {shape!r}", "up to 4 whole numbers of at least 1 are allowed")
    if not isinstance(encoding, str):
        return bad(f"encoding is {encoding!r}", "a name is needed")
    if not (_count(offset, 0) and _count(size, 1)):
        return bad(f"offset {offset!r}, size {size!r}", "whole numbers are needed")
    if offset + size > held:
        found = f"takes bytes {offset} to {offset + size} of the weights"
        return bad(found, f"they have {held}, {offset + size - held} are missing", REFETCH)
    kind = ternary if encoding == "ternary" else ENCODINGS.get(encoding)
    form = FORMATS[kind] if kind else None
    file.encodings[name] = encoding
    info = TensorInfo(
        name, tuple(shape), None, form, file.data_start + offset, size, size, stock=encoding
    )
    if form is None:
        return info
    if info.columns % form.block:
        return bad(f"has rows of {info.columns}", f"{encoding} takes multiples of {form.block}")
    if size != info.rows * form.row_bytes(info.columns):
        need = info.rows * form.row_bytes(info.columns)
        return bad(f"size is {size}", f"{shape} as {encoding} takes {need} bytes")
    return info


def _overlaps(file: CybModel, report) -> None:
    end, before = file.data_start, ""
    for info in sorted(file.tensors.values(), key=lambda info: info.offset):
        if info.offset < end:
            found = f"begins {end - info.offset} bytes before {before} ends"
            allowed = "tensors do not share bytes"
            report(Problem(str(file.path), f"tensor {info.name}", found, allowed, REWRITE))
        elif info.offset - end >= 4096:
            # up to that much is padding, whichever document's alignment was followed
            found, allowed = f"follows {info.offset - end} unused bytes", "tensors are packed"
            ignored = "The bytes between are ignored."
            file.notes.append(
                Problem(str(file.path), f"tensor {info.name}", found, allowed, ignored, end)
            )
        end, before = max(end, info.offset + info.nbytes), info.name
    if file.size - end >= 4096:
        found, allowed = f"{file.size - end} unused bytes follow {before}", "weights end the file"
        ignored = "The bytes are ignored."
        file.notes.append(Problem(str(file.path), "weights", found, allowed, ignored, end))


def _siblings(file: CybModel, report) -> None:
    """Pair ternary tensors with their scales; a u32 scale is read as the caller said."""
    for name, encoding in file.encodings.items():
        if encoding != "ternary" or name not in file.tensors:
            continue
        sibling = file.tensors.get(f"{name}.scale")
        rows = file.tensors[name].rows
        if sibling is None or sibling.shape not in ((1,), (rows,)) or sibling.format is None:
            found = "has no tensor of the same name with .scale behind it"
            if sibling is not None:
                found = f"its scale has shape {list(sibling.shape)}, encoding {sibling.type_name}"
            allowed = f"a ternary tensor needs one of shape [1] or [{rows}]"
            todo = "Import the source model again, with its scales."
            report(Problem(str(file.path), f"tensor {name}", found, allowed, todo))
            continue
        file.scales[name] = sibling.name
        if file.encodings[sibling.name] != "u32":
            continue
        if file.scale_encoding == "f32":
            file.tensors[sibling.name] = replace(sibling, format=FORMATS["f32"])
        elif file.scale_encoding is None:
            found = "is a scale with the encoding u32"
            allowed = "the format does not say whether that is raw float32 or 16.16 fixed point"
            todo = "Say which to read its weights: --scale-encoding f32 or u32."
            about = f"tensor {sibling.name}"
            file.notes.append(Problem(str(file.path), about, found, allowed, todo, sibling.offset))


def write_model(
    path: str | Path,
    name: str,
    sections: Mapping[str, str],
    tensors: list[TensorPlan],
    encodings: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write a `.model` file (version 2), atomically, tensors packed without padding.

    Args:
        sections: name -> text, in file order; "tensors" is made here.
        tensors: what to write; their type ids are not used.
        encodings: tensor name -> encoding ("u32", "q8", "ternary", ...).
        facts: further keys of the frontmatter, dots for tables -> text, number, truth or list.
    Raises: FileError; the target is then untouched.
    """
    path = Path(path)
    index, total = [], 0
    for plan in tensors:
        shape = ", ".join(map(str, plan.shape))
        index.append(
            f"[{_quoted(path, plan.name)}]\nshape = [{shape}]\n"
            f"encoding = {_quoted(path, encodings[plan.name])}\n"
            f"offset = {total}\nsize = {plan.nbytes}\n"
        )
        total += plan.nbytes
    bodies = {key: body for key, body in sections.items() if key != "tensors"}
    bodies["tensors"] = "\n".join(index)
    with atomic(path, total) as stream:
        stream.write(_text(path, name, bodies, total, facts or {}).encode())
        start = stream.tell()
        for plan in tensors:
            for piece in pieces(path, plan):
                stream.write(piece)
                if progress:
                    progress(stream.tell() - start, total)


def _text(path: Path, name: str, bodies: Mapping[str, str], total: int, facts: Mapping) -> str:
    """Everything in front of the weights."""
    formats = {"card": "md", "program": "rs", "graph": "hex"}
    out = [
        f'[cyb]\ntypes = ["model"]\nname = {_quoted(path, name)}\n'
        f"format_version = {FORMAT_VERSION}\n"
    ]
    for key, value in facts.items():
        dotted = ".".join(_quoted(path, part) for part in key.split("."))
        out.append(f"{dotted} = {json.dumps(value, ensure_ascii=False, default=str)}\n")
    for key in bodies:
        out.append(f'[[files]]\nname = "{key}"\nformat = "{formats.get(key, "toml")}"\n')
    out.append(f'[[files]]\nname = "weights"\nformat = "tensors"\nsize = {total}\n')
    dividers = {f"~~~{key}" for key in (*bodies, "weights")}
    sections = []
    for key, body in bodies.items():
        if key not in SECTIONS or dividers & {line.strip() for line in body.split("\n")}:
            raise FileError(
                f"{path}: section {key} is unknown or holds a line that divides sections; sections "
                f"are {', '.join(SECTIONS)}. Rename it or remove the line."
            )
        sections.append(f"~~~{key}\n{body}" + "\n" * (not body.endswith("\n")))
    return "\n".join(out) + "".join(sections) + DELIMITER.decode()


def _quoted(path: Path, text: str) -> str:
    """A TOML basic string."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise FileError(
            f"{path}: name {text!r} has control characters; names are plain text. Rename it."
        )
    return json.dumps(text, ensure_ascii=False)


def _toml(path: Path, section: str, text: str) -> dict:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"is not TOML: {error}".replace("\n", " ")
        raise Problem(
            str(path), f"section {section}", found, "a .model file holds TOML there", REWRITE
        ).error() from None


def _flatten(out: dict[str, object], prefix: str, value) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(out, f"{prefix}.{key}", item)
    elif value is not None:
        out[prefix] = value


def _count(value, least: int) -> bool:
    return type(value) is int and value >= least


def _stop(file: CybModel, about: str, found: str, allowed: str, todo: str, byte=None):
    raise Problem(str(file.path), about, found, allowed, todo, byte).error()
