"""pnrt: run and prove block-quantized language models.

Importing it is cheap: neither numba nor a driver is touched until a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pnrt.errors import (
    DeviceError,
    DifferenceError,
    FileError,
    FormatError,
    ModelError,
    PnrtError,
)

if TYPE_CHECKING:
    from pnrt.generate import Model

__version__ = "0.1.0"

__all__ = [
    "DeviceError",
    "DifferenceError",
    "FileError",
    "FormatError",
    "Model",
    "ModelError",
    "PnrtError",
    "__version__",
    "load",
]


def load(path: Any, **options: Any) -> Model:
    """Load a GGUF model; see `pnrt.generate.load` for the options."""
    from pnrt.generate import load as load_model

    return load_model(path, **options)


def __getattr__(name: str) -> Any:
    if name == "Model":
        from pnrt.generate import Model

        return Model
    if name == "backend":
        import importlib

        return importlib.import_module("pnrt.backend")
    raise AttributeError(f"module 'pnrt' has no attribute {name!r}")
