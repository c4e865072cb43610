"""From a kernel's lowered source to PTX and a cubin, with no GPU needed."""

from __future__ import annotations

import functools
import importlib
import linecache
import re
from typing import NamedTuple

from pnrt.cuda.kernel import Kernel, Op

P100 = (6, 0)
# modules whose kernels() list every kernel they can make
MODULES = ("activations", "matmul", "norm")

# arithmetic on f32 as it must not stand in PTX: without .rn, or made by the compiler
_FUNCTIONS = "add|sub|mul|div|fma|mad|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|tanh"
_UNROUNDED = re.compile(rf"\b({_FUNCTIONS})\.(?!rn\.f32)\S*f32")
_ARITHMETIC = re.compile(rf"\b({_FUNCTIONS})\.\S*f32")
_WIDE = re.compile(r"\.f64\b")
_HALF = re.compile(rf"\b({_FUNCTIONS}|min|max|neg|abs|setp)\.\S*f16")


class Built(NamedTuple):
    """A kernel linked for one compute capability.

    registers, spills and local are per thread (registers, bytes, bytes); shared is bytes per block.
    """

    ptx: str
    cubin: bytes
    entry: str
    registers: int
    spills: int
    local: int
    shared: int


def kernels() -> list[Kernel]:
    """Every kernel of the backend."""
    found = (importlib.import_module(f"pnrt.cuda.{name}").kernels() for name in MODULES)
    return [each for module in found for each in module]


def audit(text: str) -> list[str]:
    """Lines of PTX that break the contract: f64, fp16 arithmetic, f32 not rounded as written.

    Every f32 operation we ask for is inline assembly; one outside was made by the compiler.
    """
    wrong, ours = [], False
    for line in text.splitlines():
        ours = "begin inline asm" in line or (ours and "end inline asm" not in line)
        code = line.split("//")[0]
        bad = [p for p in (_UNROUNDED, _WIDE, _HALF) if p.search(code)]
        if bad or (_ARITHMETIC.search(code) and not ours):
            wrong.append(line.strip())
    return wrong


def python_function(kernel: Kernel):
    """The lowered kernel as a Python function over numba intrinsics."""
    from pnrt.cuda.intrinsics import WORDS

    lowered = kernel.lowered
    name = re.sub(r"\W", "_", lowered.name)
    source = lowered._replace(name=name).source
    scope = {n: WORDS[v.name] if isinstance(v, Op) else v for n, v in lowered.words.items()}
    place = f"<kernel {kernel.name}>"
    # so that numba's errors show the line
    linecache.cache[place] = (len(source), None, source.splitlines(True), place)
    exec(compile(source, place, "exec"), scope)
    return scope[name]


def ptx(kernel: Kernel, capability: tuple[int, int] = P100) -> tuple[str, str]:
    """Compile a kernel: its PTX text and the name of its entry."""
    from numba import cuda, types

    kinds = {"u64": types.uint64, "u32": types.uint32, "i32": types.int32, "f32": types.float32}
    signature = tuple(kinds[kind] for _, kind in kernel.lowered.params)
    text, _ = cuda.compile_ptx(python_function(kernel), signature, cc=capability)
    (entry,) = re.findall(r"\.entry\s+([\w$]+)\(", text)
    return text, entry


@functools.lru_cache(maxsize=1024)
def build(kernel: Kernel, capability: tuple[int, int] = P100) -> Built:
    """Compile and link a kernel for a compute capability."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    text, entry = ptx(kernel, capability)
    options = LinkerOptions(
        arch=f"sm_{capability[0]}{capability[1]}",
        max_register_count=kernel.registers,
        ptxas_options=["-v"],
    )
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
    cubin = linker.link("cubin").code
    return Built(text, bytes(cubin), entry, *_usage(linker.get_info_log()))


def _usage(log: str) -> tuple[int, int, int, int]:
    """What ptxas -v reported: registers, spilled bytes, stack bytes, shared bytes."""

    def number(pattern):
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame")
    return registers, spills, stack, number(r"(\d+) bytes smem")
