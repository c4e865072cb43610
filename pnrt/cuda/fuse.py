"""One numba intrinsic per statement: what numba infers and lowers is a fifth of the words.

numba takes ten seconds for a few thousand calls, most of it in bookkeeping that grows with the
square of a block's length. So the expression of each statement becomes one intrinsic over its
variables; inside, the words are typed and emitted one after the other, as numba would.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from pnrt.cuda.intrinsics import LLVM
from pnrt.cuda.intrinsics_memory import WORDS
from pnrt.cuda.kernel import Lowered

_NUMBERS = {
    np.dtype(np.uint32): types.uint32, np.dtype(np.int32): types.int32,
    np.dtype(np.uint64): types.uint64, np.dtype(np.float32): types.float32,
}  # fmt: skip


def fused(lowered: Lowered) -> tuple[list[ast.stmt], dict[str, Any]]:
    """A kernel's statements with one call per expression, and what the calls mean."""
    fusing = _Fusing(lowered.words)
    return [fusing.visit(copy.deepcopy(node)) for node in lowered.body], fusing.scope


class _Fusing(ast.NodeTransformer):
    """Replaces every expression that stands in a statement."""

    def __init__(self, words: dict[str, Any]):
        self.words = words
        self.scope: dict[str, Any] = {}
        self.names: dict[str, str] = {}

    def visit_Tuple(self, node):
        node.elts = [self.visit(e) for e in node.elts]
        return node

    def visit_Call(self, node):
        leaves = sorted(
            {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id not in self.words}
        )
        # the same expression over other variables is the same intrinsic
        places = {name: f"x{i}" for i, name in enumerate(leaves)}
        tree = _Renaming(places).visit(copy.deepcopy(node))
        key = ast.unparse(tree)
        if key not in self.names:
            self.names[key] = f"fused_{len(self.names)}"
            self.scope[self.names[key]] = _expression(tree, list(places.values()), self.words)
        args = [ast.Name(name, ast.Load()) for name in leaves]
        return ast.copy_location(ast.Call(ast.Name(self.names[key], ast.Load()), args, []), node)

    def visit_Name(self, node):
        if node.id in self.words:
            self.scope[node.id] = self.words[node.id]
        return node


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]):
        self.names = names

    def visit_Name(self, node):
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def _expression(tree: ast.expr, leaves: list[str], words: dict[str, Any]):
    """An intrinsic of the leaves that computes an expression of words."""

    def infer(typingctx, node, kinds):
        """The expression's type, and emit(context, builder, values) for its LLVM value."""
        if isinstance(node, ast.Constant):
            return types.literal(node.value), lambda context, builder, values: None
        if isinstance(node, ast.Name):
            if node.id in kinds:
                return kinds[node.id], lambda context, builder, values: values[node.id]
            kind = _NUMBERS[words[node.id].dtype]
            constant = ir.Constant(LLVM[kind], words[node.id].item())
            return kind, lambda context, builder, values: constant
        parts = [infer(typingctx, arg, kinds) for arg in node.args]
        word = words[node.func.id]
        signature, generate = WORDS[word.name]._defn(typingctx, *(kind for kind, _ in parts))

        def emit(context, builder, values):
            done = [part(context, builder, values) for _, part in parts]
            return generate(context, builder, signature, done)

        return signature.return_type, emit

    def typed(typingctx, args):
        kind, emit = infer(typingctx, tree, dict(zip(leaves, args, strict=True)))

        def generate(context, builder, signature, values):
            return emit(context, builder, dict(zip(leaves, values, strict=True)))

        return kind(*args), generate

    names = "".join(f", {leaf}" for leaf in leaves)
    scope = {"typed": typed}
    exec(f"def fused(typingctx{names}): return typed(typingctx, [{names[2:]}])", scope)
    return intrinsic(scope["fused"])
