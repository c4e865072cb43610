"""How large a model is, what fits where, and how fast memory lets it be. Nothing is loaded.

Sizes are bytes. Everything is counted from the file's tensor list and the model's program, or from
a preset's, so the model need not exist.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pnrt.backend import CACHE_TYPES, check_choice
from pnrt.errors import ModelError
from pnrt.generate import build_program, chosen_context
from pnrt.mixes import is_matrix
from pnrt.models.config import read_config
from pnrt.models.rotation import PN_FORMATS, ROTATION_KEYS, read_rotation
from pnrt.models.weights import check_weights, mtp_tensors

if TYPE_CHECKING:
    from pnrt.container.layout import TensorInfo
    from pnrt.container.mapped import MappedFile
    from pnrt.models.config import Config
    from pnrt.models.presets import Blueprint
    from pnrt.program import Program

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20}
UNITS |= {"G": 2**30}
# logits are kept for this many rows of a chunk at most
HEAD_ROWS = 64
# bytes of an activation coded in 8 bits: 32 codes, a scale and three sums per block of 32
CODED = 48 / 32
# python, numba, LLVM and the compiled kernels of a process
PROCESS = 300 << 20
# a CUDA context, its modules and what the allocator rounds up
CUDA_CONTEXT = 512 << 20
VECTORS = "norms, taps and other vectors"
CONTEXTS = (1, 4096, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True)
class Place:
    """What one memory has room for.

    name: what runs there; budget: bytes there are; weights, state, activations, overhead: bytes
    whatever the context; per_token: bytes for each token of context; needed: bytes for the context
    asked for; fits: whether that is within the budget; most: the longest context that fits, 0 if
    there is none.
    """

    name: str
    budget: int
    weights: int
    state: int
    activations: int
    overhead: int
    per_token: int
    needed: int
    fits: bool
    most: int


def parse_bytes(text: str, option: str) -> int:
    """A size in words: 16280MiB, 17GB, 24G (2^30), or plain bytes. Raises: ModelError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].upper() not in UNITS:
        raise ModelError(
            f"{option} {text}: needed a size such as 16280MiB, 24GiB or 17GB. Correct it."
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def machine_memory() -> int | None:
    """Bytes of this machine's memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def device_memory() -> tuple[int, str]:
    """(bytes of the GPU's memory, a sentence about it). Raises: DeviceError where there is none."""
    from pnrt.cuda.launch import open_device

    device = open_device()
    free, total = device.memory()
    return total, f"{device.name}: {free} of {total} bytes are free now, this process's context off"


def plan(
    file: MappedFile | Blueprint,
    *,
    context: int | None = None,
    kv: str = "f16",
    vram: int | None = None,
    ram: int | None = None,
    bandwidth: float | None = None,
    chunk: int = 512,
) -> dict[str, Any]:
    """Plan a model's memory.

    Args:
        file: an open file or a preset's blueprint.
        context: tokens wanted; None for the model's own length, at most 8192.
        kv: 'f16' or 'f32' cache.
        vram, ram: bytes of a GPU's memory and of the host's; a place is planned for each given.
        bandwidth: of the memory the weights are read from, GB/s (10^9 bytes).
        chunk: tokens of a prompt read at once.
    Returns:
        a dict ready for JSON: model, classes, sequence, read, places, bound and notes.
    Raises:
        ModelError: not a whole model pnrt knows, a context it does not have, a bad number;
        DeviceError: another kv.
    """
    check_choice("kv", kv, CACHE_TYPES)
    config = read_config(file)
    context = chosen_context(config, context, "--context")
    if bandwidth is not None and not (bandwidth > 0 and math.isfinite(bandwidth)):
        raise ModelError(f"--bandwidth {bandwidth}: needed GB/s above zero. A P100 has 732.")
    tensors = check_weights(file, config)
    used = {info.name: info for info in tensors.values()}
    notes = [str(note) for note in getattr(file, "notes", ()) if isinstance(note, str)]
    program = build_program(config, set(used), _rotation(file, notes))
    sequence = _sequence(program, kv, context)
    read = _read(program, used, sequence)
    places = []
    if vram is not None:
        places.append(_gpu(program, used, sequence, vram, config, chunk))
    if ram is not None:
        places.append(_cpu(program, used, sequence, ram, config, chunk))
    if skipped := mtp_tensors(file, config):
        size = sum(file.tensors[name].nbytes for name in skipped)
        notes.append(f"{len(skipped)} tensors ({size} bytes) for drafting are not loaded")
    return {
        "model": _model(file, config, used),
        "classes": _classes(used),
        "sequence": sequence,
        "read": read,
        "places": places,
        "bound": _bound(read, bandwidth, context, config),
        "notes": notes,
    }


def _rotation(file: MappedFile | Blueprint, notes: list[str]):
    """The file's rotation; a PN file that does not say it is planned as an unrotated one."""
    silent = not any(key.startswith(ROTATION_KEYS) for key in file.metadata)
    if silent and any(t.format and t.format.name in PN_FORMATS for t in file.tensors.values()):
        notes.append("the file does not say whether it is rotated; sizes do not depend on it")
    return read_rotation(file, "none" if silent else None)


def _model(file: MappedFile | Blueprint, config: Config, used: dict[str, TensorInfo]) -> dict:
    nbytes = sum(t.nbytes for t in used.values())
    weights = sum(t.elements for t in used.values())
    return {
        "name": str(file.path),
        "title": getattr(file, "title", file.metadata.get("general.name", "")),
        "architecture": config.architecture,
        "layers": config.n_layers,
        "recurrent_layers": sum(config.recurrent),
        "context_length": config.context_length,
        "tensors": len(used),
        "weights": weights,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / weights,
    }


def _classes(used: dict[str, TensorInfo]) -> list[dict]:
    """Tensors of one name (without the block's number), shape and format; vectors in one row."""
    rows: dict[tuple, dict] = {}
    for t in used.values():
        name, shape = VECTORS, ()
        if is_matrix(t.name, t.shape):
            name, shape = re.sub(r"^blk\.\d+\.", "", t.name).removesuffix(".weight"), t.shape
        new = {"name": name, "shape": shape, "format": t.type_name}
        new |= {"count": 0, "weights": 0, "bytes": 0}
        row = rows.setdefault((name, shape, t.type_name), new)
        row["count"] += 1
        row["weights"] += t.elements
        row["bytes"] += t.nbytes
    return sorted(rows.values(), key=lambda row: row["name"] == VECTORS)


def _sequence(program: Program, kv: str, context: int) -> dict:
    """What one sequence of tokens keeps: recurrent states and the cache."""
    size = 2 if kv == "f16" else 4
    per_token = sum(2 * groups * dim for groups, dim in program.caches) * size
    states: dict[str, int] = {}
    for name, shape in program.states.items():
        kind = name.split(".")[-2]
        states[kind] = states.get(kind, 0) + 4 * math.prod(shape)
    return {
        "kv": kv,
        "context": context,
        "cache_per_token": per_token,
        "cache": per_token * context,
        "states": states,
        "state": sum(states.values()),
    }


def _read(program: Program, used: dict[str, TensorInfo], sequence: dict) -> dict:
    """Bytes a generated token reads (and writes, for the states)."""
    matrices = set(program.matrices())
    weights = sum(t.nbytes for t in used.values())
    table = used["token_embd.weight"]
    if table.name not in matrices:
        # of a table that is only looked up, a token reads one row
        weights -= table.nbytes - table.nbytes // table.rows
    return {
        "weights": weights,
        "state": 2 * sequence["state"],
        "cache_per_token": sequence["cache_per_token"],
        "cache": sequence["cache"],
        "total": weights + 2 * sequence["state"] + sequence["cache"],
    }


def _activations(program: Program, chunk: int) -> int:
    """Buffers of a chunk of tokens: every slot in float32, inputs of products also coded."""
    head = {step.output for step in program.head}
    inputs = {step.inputs[0] for step in program.steps if step.op == "matmul"}
    total = 0.0
    for name, width in program.slots.items():
        rows = min(HEAD_ROWS, chunk) if name in head else chunk
        total += rows * width * (4 + (CODED if name in inputs else 0))
    return int(total)


def _gpu(program, used, sequence, budget, config, chunk) -> Place:
    """One GPU: packed planes are as large as the file's blocks; the embedding stays on the host."""
    matrices = set(program.matrices())
    weights = sum(
        t.nbytes for t in used.values() if t.name in matrices or t.name != "token_embd.weight"
    )
    per_token = sequence["cache_per_token"] + _rope(config)
    buffers = _activations(program, chunk)
    return _place("GPU", budget, weights, buffers, CUDA_CONTEXT, per_token, sequence, config)


def _cpu(program, used, sequence, budget, config, chunk) -> Place:
    """The host: matrices are packed; the embedding's rows are read from the mapped file."""
    from pnrt.machine import default_threads

    matrices = set(program.matrices())
    weights = 0
    for t in used.values():
        if t.name in matrices:
            weights += _packed(t)
        elif t.name != "token_embd.weight":
            weights += 4 * t.elements
    # and one row of attention scores for each thread
    per_token = sequence["cache_per_token"] + _rope(config) + 4 * default_threads()[0]
    buffers = _activations(program, chunk)
    return _place("CPU", budget, weights, buffers, PROCESS, per_token, sequence, config)


def _rope(config: Config) -> int:
    """Bytes of one position in the tables of cosines and sines."""
    return 2 * 4 * (config.rope_dim // 2)


def _packed(info: TensorInfo) -> int:
    """Bytes of a matrix as the CPU keeps it; as the file does where it has no kernel for it."""
    from pnrt.cpu import pack

    if info.type_name not in (*pack.CODECS, *pack.FLOATS):
        return info.nbytes
    weight = pack.layout(info.type_name, info.rows, info.columns)
    return weight.panels * weight.stride


def _place(name, budget, weights, buffers, overhead, per_token, sequence, config) -> Place:
    fixed = weights + sequence["state"] + buffers + overhead
    needed = fixed + per_token * sequence["context"]
    room = (budget - fixed) // per_token if per_token else config.context_length
    return Place(
        name, budget, weights, sequence["state"], buffers, overhead, per_token, needed,
        needed <= budget, max(0, min(room, config.context_length)),
    )  # fmt: skip


def _bound(read: dict, bandwidth: float | None, context: int, config: Config) -> list[dict]:
    """Tokens per second if every byte were read at the full bandwidth, by context length."""
    if bandwidth is None:
        return []
    lengths = sorted({context, *(c for c in CONTEXTS if c <= config.context_length)})
    out = []
    for length in lengths:
        nbytes = read["weights"] + read["state"] + read["cache_per_token"] * length
        out.append(
            {
                "context": length,
                "bytes": nbytes,
                "bandwidth": bandwidth,
                "tokens_per_second": bandwidth * 1e9 / nbytes,
            }
        )
    return out
