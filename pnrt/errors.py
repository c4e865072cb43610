"""The errors pnrt raises: one base, five kinds.

A message has four parts in this order: where, what was found, what is allowed, what to do.
"""


class PnrtError(Exception):
    """Base of every error a user of pnrt can cause or meet."""


class FileError(PnrtError):
    """The file is not a valid container (GGUF, .model): header, bounds, alignment, duplicates."""


class FormatError(PnrtError):
    """Bytes or values break the rules of a weight format."""


class ModelError(PnrtError):
    """A valid file that is not a usable model: keys, shapes, architecture, tokenizer, template."""


class DeviceError(PnrtError):
    """The request cannot run here: missing kernel, instruction set, driver, memory, threads."""


class DifferenceError(PnrtError):
    """Two things that must agree do not."""
