"""What the tokens read so far leave behind, in one layout that belongs to no backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pnrt.errors import ModelError
from pnrt.program import Program


@dataclass(frozen=True)
class Snapshot:
    """A copy of caches and recurrent states after `position` tokens.

    kv: "f16" or "f32". keys, values: per attention layer [position, G, E] float16 or float32.
    states: name -> float32 array of the program's shape.
    """

    architecture: str
    position: int
    kv: str
    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    states: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return sum(a.nbytes for a in (*self.keys, *self.values, *self.states.values()))

    def check(self, program: Program, kv: str, limit: int) -> None:
        """Refuse a snapshot that does not fit.

        Args:
            kv: cache type of the session; limit: tokens it can hold.
        Raises: ModelError.
        """
        found = (self.architecture, self.kv, [k.shape[1:] for k in self.keys], self._shapes())
        needed = (program.architecture, kv, list(program.caches), dict(program.states))
        if found != needed:
            raise ModelError(
                f"snapshot: found one of {self._describe()}; needed one of "
                f"{program.architecture} with {len(program.caches)} {kv} caches and "
                f"{len(program.states)} states of this model's sizes. Restore what this model's "
                "snapshot() returned, under the same kv."
            )
        if self.position > limit:
            raise ModelError(
                f"snapshot: found {self.position} tokens; this context holds {limit}. "
                "Load the model with a larger context."
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: state.shape for name, state in self.states.items()}

    def _describe(self) -> str:
        return (
            f"{self.architecture} with {len(self.keys)} {self.kv} caches and "
            f"{len(self.states)} states"
        )
