"""Run commands in process, and rewrite files for them."""

from __future__ import annotations

from typer.testing import CliRunner

from pnrt.cli import app
from pnrt.container.gguf import TensorPlan, open_gguf, write_gguf


def pnrt(*args):
    """Run a command; nothing but a clean exit may come out of it."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def rewrite(source, target, keys=None, tensors=None):
    """Copy a GGUF file with some keys or tensors replaced (None drops them)."""
    keys, tensors = keys or {}, tensors or {}
    with open_gguf(source) as file:
        entries = [e for e in file.raw_metadata() if e[0] not in keys]
        entries += [(k, *v) for k, v in keys.items() if v is not None]
        plans = []
        for t in file.tensors.values():
            if t.name not in tensors:
                data = file.data(t.name).copy()
                plans.append(_plan(t.name, t.shape, t.type_id, data))
            elif tensors[t.name] is not None:
                plans.append(_plan(t.name, *tensors[t.name]))
        write_gguf(target, entries, plans)
    return target


def _plan(name, shape, type_id, data):
    return TensorPlan(name, shape, type_id, data.nbytes, lambda: iter([data]))
