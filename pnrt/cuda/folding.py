"""What is known while a kernel is lowered: its source, its variables, and plain values."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from pnrt.cuda.kernel import Device, KernelError, Op


@functools.cache
def _source_tree(code) -> ast.FunctionDef:
    return ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]


def parse(function: Callable) -> tuple[ast.FunctionDef, dict[str, Any]]:
    """A function's syntax tree, and what its free names mean. Raises KernelError for a lambda."""
    tree = _source_tree(function.__code__)
    if isinstance(tree, ast.FunctionDef):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return tree, {
            **vars(builtins),
            **function.__globals__,
            **{n: c.cell_contents for n, c in cells},
        }
    raise KernelError(f"{function.__qualname__}: a kernel is written with def")


def plain(value: Any) -> bool:
    """Whether a value is a number that can stand in lowered text."""
    return isinstance(value, bool | int | float | np.number | np.bool_)


class Scope:
    """The names of one function, and what is computed now because no variable is involved.

    env: what its free names mean; renamed: its variables -> names in the kernel; fixed: variables
    that are plain values (unrolled loops, constant arguments); words: Op or number of every name
    the lowered text uses; count: fresh numbers, shared.
    """

    def __init__(self, where: str, tree: ast.FunctionDef, env, words, count):
        self.where, self.env, self.words, self.count = where, env, words, count
        self.fixed: dict[str, Any] = {}
        self.renamed: dict[str, str] = {}
        self.variables, self.once, self.stored = _variables(tree)

    def fail(self, node: ast.AST, what: str):
        """Raise KernelError with the line."""
        line = ast.unparse(node).splitlines()[0]
        raise KernelError(f"{self.where}: {what}: {line}")

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        self.count[""] += 1
        return f"{name}_{self.count['']}_"

    def value(self, node: ast.expr) -> Any:
        """The plain Python value of an expression without variables; raises _Variable otherwise."""
        if isinstance(node, ast.Constant):
            return node.value
        env = {}
        for name in _names(node):
            if name in self.fixed:
                env[name] = self.fixed[name]
            elif name in self.variables or name not in self.env:
                raise _Variable
            else:
                env[name] = self.env[name]
            if isinstance(env[name], Op | Device):
                raise _Variable
        try:
            found = eval(_compiled(node), {"__builtins__": {}}, env)
        except KernelError:
            raise _Variable from None
        if isinstance(found, Op | Device):
            raise _Variable
        return found

    def known(self, node: ast.expr) -> tuple[bool, Any]:
        """Whether an expression has a plain value, and the value."""
        names = _names(node) - self.fixed.keys()
        if names and not names.isdisjoint(self.variables):
            return False, None
        try:
            return True, self.value(node)
        except _Variable:
            return False, None

    def number(self, node: ast.expr, value: Any) -> ast.expr:
        """A plain number as it stands in the lowered text."""
        if isinstance(value, bool | np.bool_):
            return self.word("true" if value else "false", call=True)
        if isinstance(value, np.number):
            return self.constant(value)
        if isinstance(value, float):
            return self.constant(np.float32(value))
        if isinstance(value, int):
            return ast.Constant(value)
        self.fail(node, f"a {type(value).__name__} is no number")

    def constant(self, value: np.number) -> ast.expr:
        """A number of one type, by a name of its own."""
        text = repr(value.item()).replace("-", "m").replace("+", "").replace(".", "p")
        name = f"{type(value).__name__}_{text}"
        self.words[name] = value
        return ast.Name(name, ast.Load())

    def word(self, name: str, *args: ast.expr, call: bool = False) -> ast.expr:
        """A call of a word, or without arguments its name."""
        self.words[name] = Op(name, "")
        node = ast.Name(name, ast.Load())
        return ast.Call(node, list(args), []) if args or call else node


@functools.cache
def _names(node: ast.expr) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))


@functools.cache
def _compiled(node: ast.expr):
    return compile(ast.fix_missing_locations(ast.Expression(node)), "<plain value>", "eval")


def _root(node) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id


@functools.cache
def _variables(tree: ast.FunctionDef) -> tuple[set[str], set[str], set[str]]:
    """Names of a function's variables; those assigned once; those assigned as a whole."""
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Subscript)]
    stored = [n for n in stored if isinstance(n.ctx, ast.Store)]
    arrays = {_root(n) for n in stored if isinstance(n, ast.Subscript)}
    names = [n.id for n in stored if isinstance(n, ast.Name)]
    once = {name for name in names if names.count(name) == 1}
    return {*names, *arrays, *(a.arg for a in tree.args.args)}, once, set(names)


class _Variable(Exception):
    """An expression has variables: it is not known while lowering."""
