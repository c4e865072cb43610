"""What kernels cost on a P100, read from their machine code: python -m perf.sm60 --help

No GPU takes part. Each kernel is compiled for sm_60 and disassembled. Of a one-token product every
instruction of the loop over rows is counted, inner loops times their trips, and divided by the
weights of a trip: issue slots per weight. Beside it stands what the card's bandwidth leaves. Of the
kernels that read prompts the innermost loop is counted. Only a GPU tells the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pnrt.cuda import attention, build, delta, matmul, matvec
from pnrt.cuda.kernel import Kernel
from pnrt.cuda.pack import layout
from pnrt.errors import DeviceError, PnrtError

# Tesla P100 PCIe 16 GB: multiprocessors, lanes that start an instruction per clock, Hz, bytes/s
PROCESSORS, LANES, CLOCK, BANDWIDTH = 56, 64, 1.328e9, 732e9
ISSUE = PROCESSORS * LANES * CLOCK
CASES = {
    ("pn3t", 5120): 1.9,
    ("pn4t", 5120): 2.1,
    ("pn4t", 6144): 2.1,
    ("pn4t", 17408): 2.1,
    ("q4_K", 5120): 3.5,
    ("q3_K", 5120): 3.5,
    ("q8_0", 5120): 3.5,
}
# instructions that take a scheduler more than one slot on GP100 (half and quarter rate)
HALF = frozenset(
    [
        "SHR",
        "SHL",
        "SHF",
        "LEA",
        "ISCADD",
        "ISETP",
        "IMNMX",
        "BFE",
        "BFI",
        "FSETP",
        "FMNMX",
        "ICMP",
        "PSETP",
        "ISET",
        "SHFL",
        "PRMT",
    ]
)
QUARTER = frozenset(["I2F", "F2I", "F2F", "I2I", "MUFU", "POPC", "FLO", "S2R"])
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+\{?\s*(.*?)\s*[;}]")
_LABEL = re.compile(r"^(\.L_\w+):")
_BRANCH = re.compile(r"\bBRA\b.*?(\.L_\w+)")


class Loop(NamedTuple):
    """Instructions first .. last of the listing, the last branches back to the first."""

    first: int
    last: int


def disassembler(given: str | None = None) -> str:
    """The path of a CUDA 12 nvdisasm; later ones do not know sm_60.

    Raises: DeviceError where there is none.
    """
    path = shutil.which(given or os.environ.get("NVDISASM") or "nvdisasm")
    if not path:
        raise DeviceError(
            "nvdisasm: not found in --nvdisasm, NVDISASM or PATH; one of CUDA 12 is needed. The "
            "triton 3.3.1 wheel holds it: triton/backends/nvidia/bin/nvdisasm."
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)", said)
    if not found or int(found.group(1)) != 12:
        raise DeviceError(f"{path}: says {said.strip()!r}; CUDA 12 knows sm_60. Give another.")
    return path


def listing(cubin: bytes, nvdisasm: str) -> tuple[list[str], list[Loop]]:
    """A cubin's instructions and its loops."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [nvdisasm, "-c", "-hex", str(path)], capture_output=True, text=True, check=True
        )
    return parse(done.stdout)


def parse(text: str) -> tuple[list[str], list[Loop]]:
    """The instructions of a listing without predicates, and its loops."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(code)
        if not (found := _INSTRUCTION.match(line)):
            continue
        branch = _BRANCH.search(found.group(2))
        if branch and labels.get(branch.group(1), len(code)) < len(code):
            loops.append(Loop(labels[branch.group(1)], len(code)))
        code.append(re.sub(r"^@!?U?P\w+\s+", "", found.group(2)))
    return code, loops


def count(code: list[str], loops: list[Loop], trips: int) -> Counter[str]:
    """Instructions of one trip of the loop over rows (the one that shuffles), inner loops
    `trips` times."""
    rows = [b for b in loops if any(c.startswith("SHFL") for c in code[b.first : b.last + 1])]
    outer = min(rows, key=lambda b: b.last - b.first)
    total = Counter(_name(c) for c in code[outer.first : outer.last + 1])
    for loop in loops:
        if outer.first < loop.first and loop.last < outer.last:
            inner = Counter(_name(c) for c in code[loop.first : loop.last + 1])
            for name, times in inner.items():
                total[name] += times * (trips - 1)
    return total


def _name(instruction: str) -> str:
    return instruction.split()[0].split(".")[0]


def measure(name: str, K: int, nvdisasm: str) -> dict[str, Any]:
    """One row of the table."""
    built = build.build(matvec.product(name, K))
    steps = layout(name, 1, K).units // 32
    pace = matvec.pace_of(name, K)
    total = count(*listing(built.cubin, nvdisasm), trips=steps // pace)
    weights = matvec.ROWS * K / 32
    weight = layout(name, 1, K)
    bandwidth = BANDWIDTH / (sum(weight.row_bytes) / K)
    slots = sum(total.values()) / weights
    rates = sum(n * (4 if c in QUARTER else 2 if c in HALF else 1) for c, n in total.items())
    return {
        "format": name, "K": K, "registers": built.registers, "spills": built.spills,
        "local": built.local, "slots": slots, "weighted": rates / weights,
        "bits": 8 * sum(weight.row_bytes) / K, "budget": ISSUE / bandwidth,
        "bandwidth_bound": ISSUE / bandwidth / slots, "target": CASES.get((name, K)),
        "instructions": dict(total.most_common()),
    }  # fmt: skip


def innermost(code: list[str], loops: list[Loop]) -> Counter[str]:
    """Instructions of the loop that contains no other and most multiply-adds."""
    inside = [a for a in loops if not any(a != b and a.first <= b.first < a.last for b in loops)]
    counts = [Counter(_name(c) for c in code[a.first : a.last + 1]) for a in inside]
    return max(counts, key=lambda c: c["XMAD"] + c["FFMA"])


def prompt_kernels() -> list[tuple[str, Kernel, Callable[[Counter[str]], float]]]:
    """What a slot is counted per, the kernel, and how many of those its innermost loop does."""
    found = []
    for name, K in CASES:
        for view in ("q8_0", "f32"):
            call = matmul.multiply(layout(name, 64, K), 0, view, 0, 0, 64, 64)
            # a trip is a block of 32 weights of each row, for each token of a warp's tile
            work = 32 * 64 * 64 / (matmul.WARPS * call.grid[0] * call.grid[1])
            found.append(("weight and token", call.kernel, lambda c, work=work: work))
    scores, _, mix, _ = attention.attention_kernels["f16"]
    for kernel in (scores, mix):
        found.append(("position and element", kernel, lambda c: c["FFMA"]))
    # three multiply-adds: what is recalled, renewed, put out
    found.append(("element of a state", delta.kernel_for(128), lambda c: c["FFMA"] / 3))
    return found


def measure_prompt(nvdisasm: str) -> list[dict[str, Any]]:
    """The second table."""
    rows = []
    for unit, kernel, work in prompt_kernels():
        built = build.build(kernel)
        total = innermost(*listing(built.cubin, nvdisasm))
        rows.append({
            "kernel": kernel.name, "registers": built.registers, "spills": built.spills,
            "local": built.local, "unit": unit, "slots": sum(total.values()) / work(total),
            "instructions": dict(total.most_common()),
        })  # fmt: skip
    return rows


def main(words: list[str] | None = None) -> int:
    """0: every kernel within its target; 1: one is not; 2: it could not be told."""
    parser = argparse.ArgumentParser(prog="python -m perf.sm60", description=__doc__)
    parser.add_argument("--nvdisasm", help="a CUDA 12 nvdisasm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    try:
        nvdisasm = disassembler(options.nvdisasm)
        rows = [measure(name, K, nvdisasm) for name, K in CASES]
        prompts = measure_prompt(nvdisasm)
    except PnrtError as error:
        print(f"perf.sm60: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"token": rows, "prompt": prompts}, indent=1))
    else:
        print("format      K  regs spills  slots/w  weighted  target  budget  x bandwidth")
        for r in rows:
            print(
                f"{r['format']:6} {r['K']:6} {r['registers']:5} {r['spills']:6} {r['slots']:8.3f} "
                f"{r['weighted']:9.3f} {r['target']:7.1f} {r['budget']:7.2f} "
                f"{r['bandwidth_bound']:8.2f}"
            )
        print("\nprompt kernel                    regs spills  slots  per")
        for r in prompts:
            figures = f"{r['registers']:4} {r['spills']:6} {r['slots']:6.2f}"
            print(f"{r['kernel']:32} {figures}  {r['unit']}")
    late = any(r["slots"] > r["target"] for r in rows)
    return int(late or any(r["spills"] or r["local"] for r in rows + prompts))


if __name__ == "__main__":
    sys.exit(main())
