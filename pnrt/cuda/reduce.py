"""Several sums over a warp at once, in the butterfly's order."""

from __future__ import annotations

from pnrt.cuda.kernel import device, unroll
from pnrt.cuda.lanes import lane, shuffle_xor


@device
def reduce(v, count):
    """Sum v[0 .. count-1] over the warp; lane l holds the sum of v[l >> (5 - log2 count)].

    The butterfly, with what is not kept sent away: the additions and their operands are the same.
    """
    for s, half in unroll(_halvings(count)):
        if half:
            upper = (lane() & s) != 0
            for i in unroll(half):
                kept = v[i + half] if upper else v[i]
                v[i] = kept + shuffle_xor(v[i] if upper else v[i + half], s)
        else:
            v[0] = v[0] + shuffle_xor(v[0], s)
    return v[0]


def _halvings(count):
    steps = []
    for s in (16, 8, 4, 2, 1):
        count //= 2
        steps.append((s, count))
    return steps
