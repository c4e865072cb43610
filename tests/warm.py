"""Compile into the cache what the tests will need, beside them: python -m tests.warm

The tests compile what they need on one CPU; started with them, this uses another one. What both
compile at once is written twice, which the cache allows.
"""

import contextlib
import os
import subprocess
import sys

from pnrt.cpu import matmul, matvec, pack, unpack
from pnrt.cpu.activations import TILE
from pnrt.cuda import packers
from pnrt.debug.sides import tier_environment
from pnrt.errors import DeviceError

from .ops.cases import QUANTIZED


def main() -> None:
    """Compile format by format, in the order of the product's tests, then for other CPUs."""
    for name in QUANTIZED:
        kernels = (
            pack.pack_kernel(name),
            packers.packer(name),
            matvec.one_kernel(name),
            unpack.unpack_kernel(name, "q8_0"),
            matmul.matmul_kernel(name, "q8_0", TILE),
            unpack.unpack_kernel(name, "f32"),
        )
        for kernel in kernels:
            kernel.address  # noqa: B018  (compiles)
    for tier in ("avx2", "plain"):
        with contextlib.suppress(DeviceError):
            forced = {**os.environ, **tier_environment(tier)}
            command = [sys.executable, "-m", "tests.ops.tier_digests"]
            subprocess.run(command, env=forced, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
