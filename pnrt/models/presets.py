"""Models on paper: keys, shapes and formats of a data file, in the form of an open GGUF file.

from pnrt.models.presets import blueprint
paper = blueprint("qwen3.8-27b-pn3")
paper.tensors["blk.0.ffn_up.weight"].nbytes
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pnrt.container.layout import TensorInfo
from pnrt.errors import ModelError
from pnrt.formats import FORMATS
from pnrt.mixes import MIXES, is_matrix
from pnrt.models.config import MAX_BLOCKS, read_config
from pnrt.models.rotate import choose_rotation, rotation_keys
from pnrt.models.weights import expected_tensors

FOLDER = Path(__file__).parent.parent / "data" / "presets"


@dataclass
class Blueprint:
    """What an open GGUF file says about a model, for one that need not exist.

    path: the preset's name; entries: (key, type, value) for write_gguf, rotation keys included;
    metadata: key -> value; tensors: name -> TensorInfo (offset 0); vocabulary: pre, size, control
    (first control token), bos, eos, padding; bandwidth: GB/s of the machine the model is meant for.
    """

    path: Path
    title: str
    notes: list[str]
    vocabulary: Mapping[str, Any]
    bandwidth: float | None = None
    entries: list[tuple[str, str, object]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    def declare(self, entries: list[tuple[str, str, object]]) -> None:
        """Add metadata entries."""
        self.entries += entries
        self.metadata |= {key: value for key, _, value in entries}


def presets() -> list[str]:
    """Names of the presets there are."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def blueprint(name: str, layers: int | None = None) -> Blueprint:
    """Build a preset.

    Args:
        name: one of presets().
        layers: blocks instead of the model's own number.
    Raises:
        ModelError: an unknown name, or a number of layers no model has.
    """
    if name not in presets():
        raise ModelError(
            f"--preset {name}: no such preset; there are {', '.join(presets())}. Choose one."
        )
    if layers is not None and not 1 <= layers <= MAX_BLOCKS:
        raise ModelError(f"--layers {layers}: needed 1 to {MAX_BLOCKS}. Choose a number of blocks.")
    data = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    paper = Blueprint(
        Path(name), data["title"], data["notes"], data["vocabulary"], data.get("bandwidth")
    )
    keys = dict(_flat(data["keys"]))
    architecture = keys["general.architecture"]
    if layers is not None:
        keys[f"{architecture}.block_count"] = layers
    keys[f"{architecture}.vocab_size"] = data["vocabulary"]["size"]
    paper.declare([(key, _type(value), value) for key, value in keys.items()])
    mix = MIXES[data["mix"]]
    for tensor, need in expected_tensors(read_config(paper)).items():
        form = "f32"
        if is_matrix(tensor, need.shape) and not need.exact:
            form, _ = mix.choose(tensor, need.shape[-1])
        elif need.optional:
            continue
        paper.tensors[tensor] = _info(tensor, need.shape, form)
    paper.declare(rotation_keys(choose_rotation(paper, data["rotate"])))
    return paper


def _info(name: str, shape: tuple[int, ...], form: str) -> TensorInfo:
    kind = FORMATS[form]
    info = TensorInfo(name, shape, kind.type_id, kind, 0, 0, 0)
    nbytes = info.rows * kind.row_bytes(info.columns)
    return TensorInfo(name, shape, kind.type_id, kind, 0, nbytes, nbytes)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _type(value: Any) -> str:
    """GGUF type of a TOML value."""
    if isinstance(value, list):
        return "array[int32]"
    kinds = {str: "string", bool: "bool", int: "uint32", float: "float32"}
    return kinds[type(value)]
