"""The CUDA backend's ops have the CPU's files, names and parameters, in the CPU's order."""

import importlib
import re

import pytest

from pnrt import jit
from pnrt.cuda import kernel

MODULES = ("delta", "elementwise", "norm", "rope", "rotate")


def twins(module, kind):
    """Names of a module's public kernels -> kernel."""
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, kind) and not name.startswith("_")
    }


def arguments(cpu_kernel):
    """Argument names from a CPU kernel's docstring, as they would stand in a signature."""
    text = cpu_kernel.function.__doc__
    listed = re.search(r"Arguments: (.*?)\.\s", " ".join(text.split()) + " ").group(1)
    listed = re.sub(r"\([^)]*\)|\[[^]]*\]", "", listed)
    names = [re.sub(r" (bits|float32)$", "", n.strip()) for n in listed.split(",")]
    return [re.sub(r"\W+", "_", n.strip()) for n in names]


def expected(name, each):
    if each.name == "swiglu":
        return arguments(importlib.import_module("pnrt.cpu.elementwise").add_kernel)
    return arguments(each)


@pytest.mark.parametrize("name", MODULES)
def test_files_names_and_parameters(name):
    cpu = twins(importlib.import_module(f"pnrt.cpu.{name}"), jit.Kernel)
    cuda = twins(importlib.import_module(f"pnrt.cuda.{name}"), kernel.Kernel)
    assert cpu.keys() == cuda.keys() != set()
    for public, each in cpu.items():
        assert cuda[public].name == each.name
        assert [p for p, _ in cuda[public].lowered.params] == expected(public, each)


def test_embedding_and_attention():
    cpu, cuda = (importlib.import_module(f"pnrt.{b}.embed") for b in ("cpu", "cuda"))
    assert [p for p, _ in cuda.take_kernel.lowered.params] == arguments(cpu.take_kernel)
    assert cuda.lookup.__code__.co_varnames[:3] == cpu.lookup.__code__.co_varnames[:3]
    cpu, cuda = (importlib.import_module(f"pnrt.{b}.attention") for b in ("cpu", "cuda"))
    assert cpu.attention_kernels.keys() == cuda.attention_kernels.keys()
    assert cpu.POSITIONS == cuda.POSITIONS
