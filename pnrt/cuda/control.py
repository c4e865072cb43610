"""Where a thread works, and the two numbers that change from run to run.

control is [2] u32 in device memory: the tokens of the run, the position of the first. Kernels read
it when they run, so one captured graph serves every position.
"""

from __future__ import annotations

from pnrt.cuda.kernel import Kernel, device
from pnrt.cuda.lanes import block, load_u32, thread, threads


@device
def index():
    """This thread's number in the grid's x direction."""
    return block() * threads() + thread()


@device
def tokens(control):
    """Tokens of the run."""
    return load_u32(control)


@device
def start(control):
    """Position of the first token."""
    return load_u32(control + 4)


def elements(n: int, rows: int, which: Kernel) -> tuple[int, int]:
    """The grid of a kernel with a thread per element and block_y for the token."""
    return -(-n // which.threads), rows
