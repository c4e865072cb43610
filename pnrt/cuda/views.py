"""How pairs of codes are seen without unpacking them: masks, and what activations are scaled by.

A pn3t word holds five pairs in bits 3j and 16 + 3j. Inside a run of pairs with one weight and one
activation scale, pair j is seen through a mask that keeps everything from bit 3j to the run's end;
what it sees of later pairs is taken back by their activations, x[j] - 8 x[j - 1]. So the first view
of a word needs no mask. Pairs 0 to 2 are summed times 2^6, pairs 3 and 4 times 2^12.
"""

from __future__ import annotations


def _pn3t_segments():
    """Per segment of a unit: its activation block, its weight block, its (word, pair, mask)."""
    segments: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for word in range(16):
        of = [((10 * word + 2 * j) // 32, (10 * word + 2 * j) // 80) for j in range(5)]
        for j, segment in enumerate(of):
            # bits 15 and 31 are zero, so the last run may as well end there
            end = 3 * (j + of[j:].count(segment))
            mask = ((1 << (16 if end == 15 else end)) - (1 << 3 * j)) * 0x00010001
            segments.setdefault(segment, []).append((word, j, mask))
    return tuple((block, which, tuple(views)) for (block, which), views in segments.items())


PN3T_SEGMENTS = _pn3t_segments()
