"""From a kernel's lowered source to PTX and a cubin, with no GPU needed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import linecache
import os
import re
from pathlib import Path
from typing import NamedTuple

from pnrt.cuda.kernel import Kernel
from pnrt.jit import cache_directory

P100 = (6, 0)
# modules whose kernels() list every kernel they can make
MODULES = (
    "activations", "argmax", "attention", "chain", "delta", "elementwise", "embed", "matmul",
    "norm", "rope", "rotate", "together",
)  # fmt: skip

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
    from pnrt.cuda.fuse import fused

    lowered = kernel.lowered
    # no word may have the name of a kernel
    name = "pnrt_" + re.sub(r"\W", "_", lowered.name)
    body, scope = fused(lowered)
    source = lowered._replace(name=name, body=body).source
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
    # the budget is Pascal's; later cards multiply in other ways and need more registers
    most = kernel.registers if capability[0] == 6 else min(255, 65536 // kernel.threads)
    options = LinkerOptions(
        arch=f"sm_{capability[0]}{capability[1]}",
        max_register_count=most,
        ptxas_options=["-v"],
    )
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
    cubin = linker.link("cubin").code
    return Built(text, bytes(cubin), entry, *_usage(linker.get_info_log()))


def cached(kernel: Kernel, capability: tuple[int, int]) -> Built:
    """As build, kept on disk under a hash of everything that decides what comes out."""
    directory = cache_directory()
    if directory is None:
        return build(kernel, capability)
    path = directory / f"{_key(kernel, capability)}.cubin"
    with contextlib.suppress(OSError, ValueError):
        head, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        # a truncated file is compiled anew
        if hashlib.sha256(cubin).hexdigest() == facts.pop("digest"):
            return Built(ptx="", cubin=cubin, **facts)
    built = build(kernel, capability)
    facts = built._asdict()
    del facts["ptx"], facts["cubin"]
    head = json.dumps({"digest": hashlib.sha256(built.cubin).hexdigest(), **facts}).encode()
    with contextlib.suppress(OSError):
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(head + b"\n" + built.cubin)
        os.replace(temporary, path)
    return built


def _key(kernel: Kernel, capability: tuple[int, int]) -> str:
    """Hash of a kernel's lowered source, of what gives its words meaning, and of the compilers."""
    digest = hashlib.sha256(kernel.lowered.source.encode())
    for name, value in sorted(kernel.lowered.words.items()):
        digest.update(f"{name} {value!r}\n".encode())
    packages = ("numba", "numba-cuda", "llvmlite", "nvidia-nvjitlink-cu12", "nvidia-nvjitlink")
    digest.update(repr([_version(p) for p in packages]).encode())
    digest.update(repr((kernel.registers, kernel.threads, capability)).encode())
    for name in ("intrinsics.py", "intrinsics_memory.py", "fuse.py", "build.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _usage(log: str) -> tuple[int, int, int, int]:
    """What ptxas -v reported: registers, spilled bytes, stack bytes, shared bytes."""

    def number(pattern):
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame")
    return registers, spills, stack, number(r"(\d+) bytes smem")
