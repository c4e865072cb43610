"""Compile the kernels of all formats into the cache, beside the tests: python -m tests.warm

The tests compile what they need on one CPU; started with them, this uses another one. What both
compile at once is written twice, which the cache allows.
"""

from pnrt.cpu import matmul, matvec, pack, unpack
from pnrt.cpu.activations import TILE
from pnrt.cuda import packers

from .ops.cases import QUANTIZED


def main() -> None:
    """Compile format by format, in the order of the product's tests."""
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


if __name__ == "__main__":
    main()
