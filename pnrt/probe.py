"""Which rotation does a file's text make sense under: the same weights, run under each in turn.

A wrong rotation is no error and looks like no error: the model answers, fluently and beside the
point. Perplexity tells them apart. Random signs cannot be guessed, so a file that was rotated with
some makes sense under none of these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pnrt.errors import ModelError
from pnrt.generate import Model, build_program
from pnrt.models.rotation import EMBEDDING, PN_FORMATS, Rotation, auto_block
from pnrt.models.steps import SIGNS
from pnrt.models.weights import check_weights
from pnrt.score import Estimate, perplexity

if TYPE_CHECKING:
    from pnrt.container.mapped import MappedFile

# smaller blocks spread nothing, and no public engine has larger ones
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# a perplexity so many times another's is no accident of a short text
FAR = 1.5


@dataclass(frozen=True)
class Probe:
    """One rotation's result. declared: what the file itself says."""

    name: str
    blocks: dict[int, int]
    declared: bool
    tokens: int
    perplexity: Estimate


def candidates(file: MappedFile, declared: Rotation | None) -> list[tuple[str, Rotation]]:
    """Rotations a PN file may have been written with, the declared one first.

    Args:
        declared: what the file's keys say; None where they say nothing.
    Raises: ModelError for a file without PN matrices.
    """
    names = [
        t.name
        for t in file.tensors.values()
        if t.format and t.format.name in PN_FORMATS and t.name not in (EMBEDDING, "output.weight")
    ]
    if declared and declared.tensors:
        names = sorted(declared.tensors - {EMBEDDING})
    if not names:
        raise ModelError(
            f"{file.path}: --rotation-probe: found no PN matrices and no rotation in its keys; "
            "there is nothing to probe. Leave it out."
        )
    widths = sorted({file.tensors[name].columns for name in names})
    found: list[tuple[str, Rotation]] = [("declared", declared)] if declared else []
    found.append(("none", Rotation()))
    shapes = [(f"hadamard:{b}", dict.fromkeys(widths, b)) for b in BLOCKS]
    shapes.append(("hadamard:auto", {w: auto_block(w) for w in widths}))
    seen = [declared.blocks if declared and not declared.signs else {}, {}]
    for name, blocks in shapes:
        if all(w % b == 0 for w, b in blocks.items()) and blocks not in seen:
            seen.append(blocks)
            found.append((name, Rotation("hadamard", blocks, {}, frozenset(names), source=name)))
    if declared and declared.kind == "none":
        del found[1]
    return found


def probe(model: Model, rotations: list[tuple[str, Rotation]], cut: np.ndarray) -> Iterator[Probe]:
    """Perplexity under each rotation; the weights are loaded and packed once.

    Args:
        model: loaded under any rotation.
        rotations: of `candidates`.
        cut: [W, ctx] int32 windows of the text, see score.text_windows.
    """
    for name, rotation in rotations:
        other = under(model, rotation)
        try:
            *_, result = perplexity(other, cut)
        finally:
            other.session.close()
        declared = name == "declared"
        yield Probe(name, dict(rotation.blocks), declared, result.tokens, result.perplexity)


def under(model: Model, rotation: Rotation) -> Model:
    """The model as if its file declared another rotation; file and weights are shared.

    Close its session, not the model.
    """
    tensors = {info.name for info in check_weights(model.file, model.config).values()}
    program = build_program(model.config, tensors, rotation)
    old = model.session
    weights = {name: w for name, w in old.weights.items() if not name.startswith(SIGNS)}
    weights |= {f"{SIGNS}{w}": s.astype(np.float32) for w, s in rotation.signs.items()}
    session = old.backend.bind(
        program, weights, rope_tables=old.rope_tables, positions=old.limit, chunk=old.chunk,
        kv=old.kv, activations=old.activations,
    )  # fmt: skip
    reader = copy.copy(model.reader)
    reader.rotation = rotation
    return Model(reader, model.config, program, session, model.context)


def verdict(results: list[Probe]) -> str:
    """What the perplexities say, in a sentence."""
    best, *others = sorted(results, key=lambda r: r.perplexity.value)
    if not others:
        return f"only {best.name} is possible"
    ratio = others[0].perplexity.value / best.perplexity.value
    if not ratio >= FAR:
        return (
            "no rotation stands out: the text is too short or not of the model's language, or the "
            "weights were rotated with signs, which cannot be guessed"
        )
    text = f"{best.name} fits: its perplexity is {ratio:.3g} times lower than the next"
    if best.declared:
        return text
    if any(r.declared for r in others):
        return text + "; what the file declares is wrong"
    return text + f". Say `--rotation {best.name}`"
