"""What every architecture's program is put together with: norms, projections, rotations, the head.

Where a file's matrices are stored rotated, their input is rotated once, into a slot of its own
("h.rot" beside "h"): matrices that are not rotated go on reading the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np

from pnrt.models.config import Config
from pnrt.models.rotation import EMBEDDING, Rotation
from pnrt.program import Program, Step

# signs of a rotation are in the file's keys, not among its tensors: steps name them by their width
SIGNS = "rotation.signs."


class Builder:
    """Collects the steps of one program.

    Args:
        tensors: names present in the file.
        slots: name -> width; slots of rotated inputs are added.
    """

    def __init__(
        self, config: Config, tensors: Container[str], rotation: Rotation, slots: dict[str, int]
    ):
        self.config, self.tensors, self.rotation = config, tensors, rotation
        self.slots = {"x": config.d_model, "y": config.d_model, "logits": config.vocab_size}
        self.slots |= slots
        self.steps: list[Step] = []
        self.caches: list[tuple[int, int]] = []
        self.states: dict[str, tuple[int, ...]] = {}
        self._writer: dict[str, str] = {}
        self._rotated: set[str] = set()

    def step(self, name: str, op: str, inputs, weights, output: str, **numbers) -> None:
        """Append one step; what was rotated of the slot it writes is stale from here on."""
        self.steps.append(Step(name, op, tuple(inputs), tuple(weights), output, numbers))
        self._writer[output] = name
        self._rotated.discard(output)

    def norm(
        self, name: str, source: str, weight: str, target: str, n: int, heads: int = 1,
        stride: int | None = None,
    ) -> None:  # fmt: skip
        """RMS norm of `heads` runs of n numbers, `stride` apart in the source."""
        numbers = {"n": n, "heads": heads, "stride": stride or n, "eps": self.config.eps}
        self.step(name, "rms_norm", [source], [weight], target, **numbers)

    def linear(
        self, name: str, source: str, weight: str, target: str, bias: str = "", n: int = 0
    ) -> None:
        """A product, of the rotated source if the matrix is rotated; its scale and its bias if any.

        n: columns of the matrix where the slot may be wider.
        """
        self.step(name, "matmul", [self._input(source, weight, n)], [weight], target)
        scale = f"{weight.removesuffix('.weight')}.scale"
        if scale in self.tensors:
            self.step(f"{name}_scale", "scale", [target], [scale], target)
        if bias in self.tensors:
            self.step(f"{name}_bias", "add_bias", [target], [bias], target)

    def _input(self, source: str, weight: str, n: int) -> str:
        if weight not in self.rotation.tensors:
            return source
        target = f"{source}.rot"
        if source not in self._rotated:
            self.slots[target] = self.slots[source]
            self.rotate(f"{self._writer[source]}_rot", source, target, n or self.slots[source])
            self._rotated.add(source)
        return target

    def rotate(self, name: str, source: str, target: str, n: int, inverse: bool = False) -> None:
        """signs, then the transform; inverse: the transform, then the signs."""
        signs = [f"{SIGNS}{n}"] if n in self.rotation.signs else []
        numbers = {"n": n, "block": self.rotation.blocks[n], "inverse": inverse}
        self.step(name, "hadamard", [source], signs, target, **numbers)

    def embed(self) -> None:
        """Rows of the tokens; a table that is stored rotated is rotated back."""
        self.step("token_embd", "embed", [], [EMBEDDING], "x")
        if EMBEDDING in self.rotation.tensors:
            self.rotate("token_embd_rot", "x", "x", self.config.d_model, inverse=True)

    def cache(self, name: str, groups: int, q: str, k: str, v: str, target: str, heads: int):
        """Store keys and values of one layer, then attend."""
        index, dim = len(self.caches), self.config.head_dim
        self.caches.append((groups, dim))
        self.step(f"{name}kv", "store_kv", [k, v], [], f"cache.{index}", cache=index)
        inputs, numbers = [q, f"cache.{index}"], {"cache": index, "heads": heads}
        self.step(f"{name}attn", "attention", inputs, [], target, **numbers, scale=root(dim))

    def rope(self, name: str, slot: str, heads: int) -> None:
        """Rotary embedding in place."""
        c = self.config
        numbers = {"dim": c.head_dim, "pairs": c.rope_dim // 2, "neox": c.neox}
        self.step(name, "rope", [slot], [], slot, heads=heads, **numbers)

    def feed_forward(self, il: int, norm: str) -> None:
        """x + W_down (silu(W_gate h) * (W_up h)) with h the norm of x."""
        b = f"blk.{il}."
        self.norm(f"{b}{norm}", "x", f"{b}{norm}.weight", "h", self.config.d_model)
        # layers may differ in width: the slots are as wide as the widest
        width = self.config.d_ff[il]
        for part in ("gate", "up"):
            name = f"{b}ffn_{part}"
            self.linear(name, "h", f"{name}.weight", part, f"{name}.bias")
        self.step(f"{b}ffn_act", "swiglu", ["gate", "up"], [], "act", n=width)
        name = f"{b}ffn_down"
        self.linear(name, "act", f"{name}.weight", "o", f"{name}.bias", n=width)
        self.step(f"{b}ffn_residual", "add", ["x", "o"], [], "x")

    def program(self) -> Program:
        """Close the body, add the head."""
        body, self.steps = self.steps, []
        output = "output.weight" if "output.weight" in self.tensors else EMBEDDING
        self.step("output_rows", "take", ["x"], [], "y")
        self.norm("output_norm", "y", "output_norm.weight", "y", self.config.d_model)
        self.linear("output", "y", output, "logits", "output.bias")
        return Program(
            self.config.architecture, self.slots, tuple(body), tuple(self.steps),
            tuple(self.caches), self.states,
        )  # fmt: skip


def root(n: int) -> float:
    """1 / sqrt(n), rounded to float32."""
    return float(np.float32(1.0 / math.sqrt(n)))
