"""A stand-in for an open GGUF file: the keys and tensor list of a golden model, easy to damage."""

import copy
import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

HEADERS = json.loads(
    (Path(__file__).parent.parent / "golden" / "models" / "headers.json").read_text()
)


class FakeFile:
    """The part of GGUFFile that pnrt.models reads; `metadata` and `tensors` may be edited."""

    def __init__(self, metadata, tensors, path="model.gguf"):
        self.path = path
        self.metadata = metadata
        self.tensors = {}
        for name, (shape, kind) in tensors.items():
            self.add(name, shape, kind)

    def add(self, name, shape, kind="f32"):
        """Put a tensor in, or replace it; kind None is a type id pnrt does not know."""
        self.tensors[name] = SimpleNamespace(
            name=name,
            shape=tuple(shape),
            rows=prod(shape[:-1]),
            columns=shape[-1],
            type_id=999,
            type_name="id 999" if kind is None else kind,
            format=None if kind is None else SimpleNamespace(name=kind),
        )

    def advice(self, info):
        return "Convert the tensor."


def fake(name):
    """The header of a golden file, for example "llama_s.f32"."""
    header = copy.deepcopy(HEADERS[name])
    return FakeFile(header["metadata"], header["tensors"])
