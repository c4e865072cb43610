"""Which neighbouring steps become one launch: a peephole over a program's steps.

A chain ends in what products read: norm, gate, order of heads, rotation, activations. A group is
one token's products of one input, with what is added to each. Slots between their steps are not
written, so nothing else may read them; an observer gets the steps one by one instead (tap.py).
Small steps of one token that do not wait for each other go out together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pnrt.cuda import chain, parts
from pnrt.cuda.chain import Chain, Gate, Norm, Regroup
from pnrt.cuda.rotate import LARGEST
from pnrt.program import Step

# steps of a chain in their order, any of them left out
STAGES = (("rms_norm",), ("swiglu", "sigmoid_gate"), ("regroup",), ("hadamard",))

# steps of one small kernel without shared memory
SMALL = {
    "add", "add_bias", "conv_silu", "decay", "l2_norm", "regroup", "rms_norm", "rope", "scale",
    "sigmoid", "sigmoid_gate", "store_kv", "swiglu",
}  # fmt: skip
# (step of a product) -> its view, columns
View = Callable[[Step], tuple[str, int]]


class Fused(NamedTuple):
    """Steps that a chain replaces.

    steps: in order; chain: its kernel; products: of each of its views the first step that reads it.
    """

    steps: tuple[Step, ...]
    chain: Chain
    products: tuple[Step, ...]


class Product(NamedTuple):
    """A matmul step and the step that adds to what it makes, if there is one."""

    matmul: Step
    add: Step | None

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.matmul, self.add) if self.add else (self.matmul,)

    @property
    def output(self) -> str:
        """The slot that is written."""
        return self.steps[-1].output

    @property
    def added(self) -> str:
        """The slot or the vector that is added, '' for nothing."""
        if self.add is None:
            return ""
        if self.add.op == "add_bias":
            return self.add.weights[0]
        return next(slot for slot in self.add.inputs if slot != self.matmul.output)


def readers(steps: Sequence[Step], at: int) -> list[Step]:
    """The steps that read what step `at` writes, before it is written anew."""
    found, slot = [], steps[at].output
    for step in steps[at + 1 :]:
        if slot in step.inputs:
            found.append(step)
        if step.output == slot:
            break
    return found


def find_chain(steps: Sequence[Step], at: int, view: View) -> Fused | None:
    """The longest chain that begins with step `at`, or None."""
    found: list[Step] = []
    for stage in STAGES:
        here = at + len(found)
        if here < len(steps) and steps[here].op in stage and _follows(steps[here], found):
            found.append(steps[here])
    for count in range(len(found), 0, -1):
        if fused := _chain(steps, at, tuple(found[:count]), view):
            return fused
    return None


def _follows(step: Step, before: list[Step]) -> bool:
    if step.op == "hadamard" and (step.numbers["inverse"] or step.numbers["block"] > LARGEST):
        return False
    if step.op == "regroup" and before and before[0].op == "rms_norm":
        numbers = before[0].numbers
        if any(step.numbers[key] != numbers[key] for key in ("n", "heads")):
            return False
    if not before:
        return True
    made = before[-1].output
    # of a gate only x can be what was just made
    return step.inputs.count(made) == 1 and (step.op == "swiglu" or step.inputs[0] == made)


def _chain(steps: Sequence[Step], at: int, found: tuple[Step, ...], view: View) -> Fused | None:
    """The chain of these steps, if all that reads their slots is in it or a product."""
    ops = {step.op: step for step in found}
    width = _width(found[-1])
    if any(_width(step) != width for step in found):
        return None
    ends = {len(found) - 1, len(found) - 2 if "hadamard" in ops else len(found) - 1}
    products: dict[tuple[bool, str], Step] = {}
    for i, step in enumerate(found):
        for reader in readers(steps, at + i):
            if reader is (found[i + 1] if i + 1 < len(found) else None):
                continue
            if i not in ends or reader.op != "matmul" or view(reader)[1] != width:
                return None
            products.setdefault((step.op == "hadamard", view(reader)[0]), reader)
    if not 1 <= len(products) <= chain.MOST:
        return None
    norm, gate, order = (ops.get(op) for op in ("rms_norm", "sigmoid_gate", "regroup"))
    turn, join = ops.get("hadamard"), "sigmoid_gate" if gate else ""
    if swiglu := ops.get("swiglu"):
        join = "swiglu of y" if norm and swiglu.inputs[1] == norm.output else "swiglu"
    kernel = Chain(
        width,
        Norm(*(norm.numbers[key] for key in Norm._fields)) if norm else None,
        join,
        Gate(*(gate.numbers[key] for key in Gate._fields)) if gate else None,
        Regroup(*(order.numbers[key] for key in Regroup._fields)) if order else None,
        turn.numbers["block"] if turn else 0,
        bool(turn and turn.weights),
        tuple(products),
    )
    return Fused(found, kernel, tuple(products.values()))


def _width(step: Step) -> int:
    return step.numbers["n"] * step.numbers.get("heads", 1)


def operands(fused: Fused) -> tuple[str, str, str, str]:
    """Slots x and y of a chain, its norm's weight, its rotation's signs; '' for what it lacks."""
    first = fused.steps[0]
    x, y, weight, signs = first.inputs[0], "", "", ""
    for step in fused.steps:
        if step.op == "rms_norm":
            weight = step.weights[0]
        if step.op in ("swiglu", "sigmoid_gate"):
            # x or what a norm made of it is one of the inputs, y the other
            y = (
                step.inputs[1]
                if step is first
                else next(slot for slot in step.inputs if slot != first.output)
            )
        if step.op == "hadamard" and step.weights:
            signs = step.weights[0]
    return x, y, weight, signs


def find_group(
    steps: Sequence[Step], at: int, alike: Callable[[Step], object], rows: Callable[[Step], int]
) -> list[Product]:
    """The products that go out with the matmul step `at`, itself first.

    Args:
        alike: what products of one launch have in common. rows: of a step's matrix or sum.
    """
    found: list[Product] = []
    while at < len(steps) and steps[at].op == "matmul" and len(found) < parts.MOST:
        product = Product(steps[at], _addition(steps, at, rows))
        taken = {name for other in found for name in (other.output, other.added)}
        if found and (
            alike(product.matmul) != alike(found[0].matmul)
            or bool(product.add) != bool(found[0].add)
            or product.output in taken
            or product.added in {other.output for other in found}
        ):
            break
        found.append(product)
        at += len(product.steps)
    return found


def _addition(steps: Sequence[Step], at: int, rows: Callable[[Step], int]) -> Step | None:
    """The step behind a product that adds a bias or another slot to it, and alone reads it."""
    product, step = steps[at], steps[at + 1] if at + 1 < len(steps) else None
    if step is None or rows(step) != rows(product):
        return None
    if step.op == "add_bias" and step.output == product.output:
        return step
    if step.op == "add" and step.inputs.count(product.output) == 1:
        return step if readers(steps, at) == [step] else None
    return None


def find_together(steps: Sequence[Step], at: int, states: Collection[str], view: View) -> int:
    """How many small steps from `at` on do not wait for each other; at least 1."""
    read: set[str] = set()
    written: set[str] = set()
    for count, step in enumerate(steps[at:]):
        # a state among the inputs is also written
        changed = {step.output, *(name for name in step.inputs if name in states)}
        alone = step.op not in SMALL or (count and find_chain(steps, at + count, view))
        if alone or written.intersection(step.inputs) or changed & (read | written):
            return max(1, count)
        read |= set(step.inputs)
        written |= changed
    return len(steps) - at
