"""Plain Python functions lowered to a small language that two machines run.

`@kernel` takes a function whose parameters are annotated u64, u32, i32 or f32, or with a tuple of
them, which makes an array of parameters. Lowering leaves only assignments, if, while and calls of
words (lanes.py):

    a + b, a < b, -a       become words, so that widths and rounding are ours, not numba's
    a if c else b          a word: both sides are evaluated
    for i in range(..)     a while loop on 32-bit integers
    for i in unroll(..)    copies of the body, i a plain number (or tuple) in each
    f(..) of @device       the body of f, in place
    x = registers(); x[3]  the variable x_3: an array of registers, never of memory
    x = plain value        x is that value, where nothing else is ever assigned to x
    plain Python           what involves no variable (tables, closures) is computed now;
                           an `if` on it keeps one branch

There is no break, no continue, and a return only at the end of a @device function.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable
from typing import Any

from pnrt.cuda.folding import Scope, parse, plain
from pnrt.cuda.kernel import TYPES, Device, KernelError, Lowered, Op, registers, unroll

_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.BitAnd: "and_",
    ast.BitOr: "or_", ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "shr",
    ast.FloorDiv: "quotient", ast.Mod: "remainder",
}  # fmt: skip
_UNARY = {ast.USub: "neg", ast.Not: "not_", ast.Invert: "invert"}
_COMPARE = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_BUILTINS = {builtins.min: "minimum", builtins.max: "maximum", builtins.abs: "absolute"}


def lower(name: str, function: Callable) -> Lowered:
    """A kernel's function in the small language.

    Raises: KernelError where it says something the language does not have.
    """
    tree, env = parse(function)
    params = []
    for arg in tree.args.args:
        kind = env.get(arg.annotation.id) if isinstance(arg.annotation, ast.Name) else None
        found = list(_parameters(arg.arg, kind))
        if not found or any(kind not in TYPES for _, kind in found):
            raise KernelError(f"{name}: parameter {arg.arg} needs one of {', '.join(TYPES)}")
        params += found
    lowering = _Lowering(name, tree, env, {}, {"": 0})
    body = lowering.block(tree.body)
    return Lowered(name, tuple(params), body, lowering.words)


def _parameters(name: str, kind: Any):
    """(name, type) of a parameter, or of each element of an array of them."""
    if isinstance(kind, tuple):
        for i, each in enumerate(kind):
            yield from _parameters(f"{name}_{i}", each)
    else:
        yield name, getattr(kind, "name", None)


class _Lowering(Scope):
    """One function on its way into the small language; out: its statements so far."""

    def __init__(self, where: str, tree: ast.FunctionDef, env, words, count):
        super().__init__(where, tree, env, words, count)
        self.out: list[ast.stmt] = []

    # expressions

    def expr(self, node: ast.expr) -> ast.expr:
        known, value = self.known(node)
        if known and plain(value):
            return self.number(node, value)
        if known and isinstance(value, tuple):
            return ast.Tuple([self.number(node, v) for v in value], ast.Load())
        method = getattr(self, f"expr_{type(node).__name__.lower()}", None)
        if method is None:
            self.fail(node, "not in the language")
        return method(node)

    def expr_name(self, node):
        if node.id not in self.variables:
            self.fail(node, f"{node.id} is neither a variable nor a number")
        return ast.Name(self.renamed.get(node.id, node.id), ast.Load())

    def expr_tuple(self, node):
        return ast.Tuple([self.expr(e) for e in node.elts], ast.Load())

    def expr_subscript(self, node, ctx=None):
        return ast.Name(self.slot(node), ctx or ast.Load())

    def slot(self, node) -> str:
        """The variable behind a name or an array's element."""
        if isinstance(node, ast.Name):
            return self.renamed.get(node.id, node.id)
        known, index = self.known(node.slice)
        if not (
            known and isinstance(index, int) and isinstance(node.value, ast.Name | ast.Subscript)
        ):
            self.fail(node, "an index must be a plain number of a variable")
        return f"{self.slot(node.value)}_{index}"

    def expr_binop(self, node):
        name = _BINARY.get(type(node.op))
        if name is None:
            self.fail(node, "no such operator")
        return self.word(name, self.expr(node.left), self.expr(node.right))

    def expr_unaryop(self, node):
        return self.word(_UNARY[type(node.op)], self.expr(node.operand))

    def expr_boolop(self, node):
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        sides = [self.expr(v) for v in node.values]
        return functools.reduce(lambda a, b: self.word(name, a, b), sides)

    def expr_compare(self, node):
        sides = [self.expr(v) for v in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides, sides[1:], strict=False)
        tests = [self.word(_COMPARE[type(op)], a, b) for op, a, b in pairs]
        return functools.reduce(lambda a, b: self.word("and_", a, b), tests)

    def expr_ifexp(self, node):
        known, value = self.known(node.test)
        if known:
            return self.expr(node.body if value else node.orelse)
        return self.word("select", *(self.expr(e) for e in (node.test, node.body, node.orelse)))

    def expr_call(self, node):
        called = self.called(node.func)
        if node.keywords:
            self.fail(node, "arguments have no names here")
        if isinstance(called, Device):
            return self.inline(node, called)
        if isinstance(called, Op):
            return self.word(called.name, *(self.expr(a) for a in node.args), call=True)
        if called in _BUILTINS:
            return self.word(_BUILTINS[called], *(self.expr(a) for a in node.args))
        self.fail(node, "only words and @device functions can be called")

    def called(self, node):
        if isinstance(node, ast.Name):
            return self.fixed.get(node.id, self.env.get(node.id))
        if isinstance(node, ast.Attribute):
            return getattr(self.called(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return self.called(node.value)[self.value(node.slice)]
        self.fail(node, "cannot be called")

    def inline(self, node: ast.Call, called: Device) -> ast.expr:
        tree, env = parse(called.function)
        where = f"{self.where}: {called.function.__name__}"
        inner = _Lowering(where, tree, env, self.words, self.count)
        params = [a.arg for a in tree.args.args]
        if len(params) != len(node.args):
            self.fail(node, f"{called.function.__name__} takes {len(params)} arguments")
        stored = inner.stored
        for name, arg in zip(params, node.args, strict=True):
            known, value = self.known(arg)
            if name not in stored and (known or isinstance(self.callee(arg), Op | Device)):
                inner.fixed[name] = value if known else self.callee(arg)
            elif name not in stored and isinstance(arg, ast.Name | ast.Subscript):
                inner.renamed[name] = self.slot(arg)
            else:
                inner.renamed[name] = self.fresh(name)
                self.out.append(self.assign(inner.renamed[name], self.expr(arg)))
        for name in inner.variables - set(params):
            inner.renamed[name] = self.fresh(name)
        body = list(tree.body)
        last = body.pop() if isinstance(body[-1], ast.Return) else None
        inner.out = self.out
        inner.statements(body)
        if last is None or last.value is None:
            return ast.Constant(None)
        return inner.expr(last.value)

    def callee(self, node):
        return self.called(node) if isinstance(node, ast.Name | ast.Attribute) else None

    # statements

    def assign(self, name: str | ast.expr, value: ast.expr) -> ast.stmt:
        if isinstance(value, ast.Constant) and not isinstance(value.value, bool | None):
            value = self.word("i32", value)
        target = ast.Name(name, ast.Store()) if isinstance(name, str) else name
        return ast.Assign([target], value)

    def block(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        outer, self.out = self.out, []
        self.statements(nodes)
        mine, self.out = self.out, outer
        return mine

    def statements(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            method = getattr(self, f"stmt_{type(node).__name__.lower()}", None)
            if method is None:
                self.fail(node, "not in the language")
            method(node)

    def target(self, node):
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self.target(e) for e in node.elts], ast.Store())
        if isinstance(node, ast.Subscript):
            return self.expr_subscript(node, ast.Store())
        # what was a plain value in an unrolled loop is a variable from here
        self.fixed.pop(node.id, None)
        return ast.Name(self.renamed.get(node.id, node.id), ast.Store())

    def stmt_assign(self, node):
        if isinstance(node.value, ast.Call) and self.callee(node.value.func) is registers:
            return
        if len(node.targets) != 1:
            self.fail(node, "one target at a time")
        target = node.targets[0]
        known, plain = self.known(node.value)
        if known and isinstance(target, ast.Name) and target.id in self.once:
            self.fixed[target.id] = plain
            return
        value = self.expr(node.value)
        if isinstance(value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
            # literals inside become numbers of a type, as they do alone
            value.elts = [self.assign("_", v).value for v in value.elts]
        self.out.append(self.assign(self.target(node.targets[0]), value))

    def stmt_augassign(self, node):
        self.stmt_assign(_assignment(node))

    def stmt_expr(self, node):
        if isinstance(node.value, ast.Constant):
            return
        value = self.expr(node.value)
        if not isinstance(value, ast.Constant):
            self.out.append(ast.Expr(value))

    def stmt_pass(self, node):
        pass

    def stmt_if(self, node):
        known, value = self.known(node.test)
        if known:
            self.statements(node.body if value else node.orelse)
            return
        test = self.expr(node.test)
        body, orelse = self.block(node.body), self.block(node.orelse)
        if body or orelse:
            self.out.append(ast.If(test, body or [ast.Pass()], orelse))

    def stmt_while(self, node):
        before = len(self.out)
        test = self.expr(node.test)
        if len(self.out) != before:
            self.fail(node, "a @device function with statements cannot stand in a while's test")
        body = self.block(node.body)
        self.out.append(ast.While(test, body, []))

    def stmt_for(self, node):
        call = node.iter
        if not isinstance(call, ast.Call) or node.orelse:
            self.fail(node, "for goes over range(..) or unroll(..)")
        called = self.called(call.func)
        if called is unroll:
            self.unrolled(node, unroll(self.value(call.args[0])))
        elif called is range:
            self.ranged(node, call.args)
        else:
            self.fail(node, "for goes over range(..) or unroll(..)")

    def unrolled(self, node, items):
        for item in items:
            self.bind(node.target, item)
            self.statements(node.body)

    def bind(self, target, value):
        """Let names of a loop's target stand for plain values."""
        if isinstance(target, ast.Tuple):
            for each, part in zip(target.elts, value, strict=True):
                self.bind(each, part)
        else:
            self.fixed[target.id] = value

    def ranged(self, node, args):
        start, stop, step = (ast.Constant(0), *args, ast.Constant(1)) if len(args) == 1 else (
            *args, ast.Constant(1))[:3]  # fmt: skip
        first, last, pace = self.expr(start), self.expr(stop), self.expr(step)
        name = self.renamed.get(node.target.id, node.target.id)
        if not isinstance(last, ast.Constant | ast.Name):
            held = self.fresh("stop")
            self.out.append(self.assign(held, last))
            last = ast.Name(held, ast.Load())
        self.out.append(self.assign(name, self.word("like", first, last)))
        here = ast.Name(name, ast.Load())
        body = self.block(node.body)
        body.append(self.assign(name, self.word("add", here, pace)))
        loop = ast.While(self.word("lt", here, last), body, [])
        self.out.append(loop)


@functools.cache
def _assignment(node: ast.AugAssign) -> ast.Assign:
    """a += b as a = a + b."""
    left = ast.parse(ast.unparse(node.target), mode="eval").body
    return ast.Assign([node.target], ast.BinOp(left, node.op, node.value))
