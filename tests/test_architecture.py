"""Who may know whom: the import rules of the package, read from its syntax trees."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import pnrt

ROOT = Path(pnrt.__file__).parent
# what a room of the foundation may import of pnrt; jit itself loads numba only when it compiles
BELOW = {
    "errors": set(),
    "scalars": {"errors"},
    "machine": set(),
    "emit": {"machine"},
    "native": {"emit"},
    "simd": {"emit"},
    "jit": {"errors", "machine", "native"},
    "formats": {"errors", "scalars", "machine", "emit", "simd", "jit"},
    "reference": {"errors", "scalars", "formats"},
    "rows": {"formats", "jit", "simd"},
}
BACKENDS = {"backend", "cpu", "cuda"}
# numba at the top of a module: the kernels, what they and jit share, what quantizing imports late
COMPILED = tuple(f"formats/{name}.py" for name in ("pn_search", "fwht", "fit_search"))
NUMBA_AT_THE_TOP = ("cpu/", "cuda/", "native.py", "emit.py", "rows.py", "simd.py", *COMPILED)
NUMBA_INSIDE = (*NUMBA_AT_THE_TOP, "jit.py", "machine.py")
FRONT = ("cli/", "__main__.py")


class Import(NamedTuple):
    """One imported module. top: it runs when the importing module is loaded."""

    module: str
    line: int
    top: bool


class Module(NamedTuple):
    name: str
    tree: ast.Module
    imports: list[Import]

    @property
    def room(self) -> str:
        return self.name.removesuffix(".py").split("/")[0]


def read_imports(tree: ast.Module, name: str) -> list[Import]:
    """All imports of a module but those for type checkers."""
    found: list[Import] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are written in full"
            found.append(Import(node.module, node.lineno, top))
            # `from pnrt import jit` knows pnrt.jit
            found.extend(Import(f"{node.module}.{a.name}", node.lineno, top) for a in node.names)
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, top and not inner)

    visit(tree, True)
    return found


@functools.cache
def modules() -> list[Module]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))
        found.append(Module(name, tree, read_imports(tree, name)))
    assert len(found) > 30
    return found


def rooms_of(module: Module) -> list[tuple[str, int]]:
    """The rooms of pnrt that a module imports, with the line."""
    parts = [(i.module.split("."), i.line) for i in module.imports]
    return [(p[1], line) for p, line in parts if p[0] == "pnrt" and len(p) > 1]


def nodes(kind):
    return ((m, node) for m in modules() for node in ast.walk(m.tree) if isinstance(node, kind))


def test_the_reader_sees_every_kind_of_import():
    source = (
        "import a.b\nfrom pnrt import jit\nif TYPE_CHECKING:\n    import hidden\n"
        "def f():\n    from pnrt.cpu import norm\n"
    )
    assert read_imports(ast.parse(source), "x.py") == [
        Import("a.b", 1, True),
        Import("pnrt", 2, True),
        Import("pnrt.jit", 2, True),
        Import("pnrt.cpu", 6, False),
        Import("pnrt.cpu.norm", 6, False),
    ]


@pytest.mark.parametrize("room", BELOW)
def test_the_foundation_imports_downwards(room):
    mine = [m for m in modules() if m.room == room]
    assert mine
    wrong = [
        f"pnrt/{m.name}:{line} imports pnrt.{other}"
        for m in mine
        for other, line in rooms_of(m)
        if other not in BELOW[room] | {room}
    ]
    assert not wrong


def test_backends_do_not_know_each_other():
    for m in modules():
        known = {room for room, _ in rooms_of(m)}
        assert not (m.room == "cpu" and "cuda" in known), m.name
        assert not (m.room == "cuda" and "cpu" in known), m.name


def test_models_and_programs_know_no_backend():
    mine = [m for m in modules() if m.room in ("models", "program")]
    assert len(mine) > 3
    wrong = [(m.name, r, line) for m in mine for r, line in rooms_of(m) if r in BACKENDS]
    assert not wrong


def test_only_kernels_import_numba():
    wrong = []
    for m in modules():
        for i in m.imports:
            if i.module.split(".")[0] not in ("numba", "llvmlite"):
                continue
            allowed = NUMBA_AT_THE_TOP if i.top else NUMBA_INSIDE
            if not m.name.startswith(allowed):
                wrong.append(f"pnrt/{m.name}:{i.line} imports {i.module}")
            if i.module.startswith("numba.cuda") and m.room != "cuda":
                wrong.append(f"pnrt/{m.name}:{i.line} imports numba.cuda")
    assert not wrong


def test_kernel_modules_are_imported_when_needed():
    """Nobody outside a kernel room loads one at the top of a module."""
    compiled = (f"pnrt.{name.removesuffix('.py').replace('/', '.')}" for name in COMPILED)
    targets = (
        "pnrt.cpu",
        "pnrt.cuda",
        "pnrt.emit",
        "pnrt.native",
        "pnrt.rows",
        "pnrt.simd",
        *compiled,
    )
    wrong = [
        f"pnrt/{m.name}:{i.line} imports {i.module}"
        for m in modules()
        if not m.name.startswith(NUMBA_AT_THE_TOP)
        for i in m.imports
        if i.top and i.module.startswith(targets)
    ]
    assert not wrong


def test_only_the_command_line_prints_and_exits():
    calls = ("print", "exit", "quit", "sys.exit", "os._exit", "sys.stdout.write", "input")
    wrong = [
        f"pnrt/{m.name}:{node.lineno} calls {ast.unparse(node.func)}"
        for m, node in nodes(ast.Call)
        if ast.unparse(node.func) in calls and not m.name.startswith(FRONT)
    ]
    wrong += [
        f"pnrt/{m.name}:{node.lineno} raises SystemExit"
        for m, node in nodes(ast.Raise)
        if node.exc and "SystemExit" in ast.unparse(node.exc) and not m.name.startswith(FRONT)
    ]
    assert not wrong


def test_only_the_command_line_has_a_console():
    consoles = ("rich.console", "rich.progress", "rich.live", "rich.print", "typer")
    wrong = [
        f"pnrt/{m.name}:{i.line} imports {i.module}"
        for m in modules()
        for i in m.imports
        if i.module.startswith(consoles) and not m.name.startswith(FRONT)
    ]
    # screen/ builds what the command line prints; nothing else knows rich at all
    wrong += [
        f"pnrt/{m.name}:{i.line} imports {i.module}"
        for m in modules()
        for i in m.imports
        if i.module.split(".")[0] == "rich" and not m.name.startswith((*FRONT, "screen/"))
    ]
    assert not wrong


def test_no_arithmetic_is_relaxed():
    """No fastmath, and no fast-math flag on an LLVM instruction."""
    relaxed = ("fast", "reassoc", "contract", "nnan", "ninf", "nsz", "arcp", "afn", "fastmath")
    wrong = [
        f"pnrt/{m.name}:{node.value.lineno} {node.arg}"
        for m, node in nodes(ast.keyword)
        if node.arg == "fastmath"
        or (node.arg == "flags" and any(f"'{flag}'" in ast.unparse(node.value) for flag in relaxed))
    ]
    wrong += [
        f"pnrt/{m.name}:{node.lineno} {node.value!r}"
        for m, node in nodes(ast.Constant)
        if node.value == "fastmath"
    ]
    assert not wrong


def test_type_ids_are_numbers_only_in_formats():
    """Elsewhere a format is an object or a name; no 124, no `type_id == 12`."""
    wrong = [
        f"pnrt/{m.name}:{node.lineno} {node.value}"
        for m, node in nodes(ast.Constant)
        if m.room != "formats" and type(node.value) is int and node.value in (124, 125)
    ]
    for m, node in nodes(ast.Compare):
        sides = [node.left, *node.comparators]
        about_ids = any(ast.unparse(s).split(".")[-1] == "type_id" for s in sides)
        literal = any(
            type(c) is ast.Constant and type(c.value) is int for s in sides for c in ast.walk(s)
        )
        if m.room != "formats" and about_ids and literal:
            wrong.append(f"pnrt/{m.name}:{node.lineno} {ast.unparse(node)}")
    assert not wrong


def test_public_functions_say_what_they_do():
    wrong = []
    for m in modules():
        if m.tree.body and not ast.get_docstring(m.tree):
            wrong.append(f"pnrt/{m.name}: the module")
        for node in m.tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and not ast.get_docstring(node):
                wrong.append(f"pnrt/{m.name}:{node.lineno} {node.name}")
    assert not wrong


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"import sys; {statement}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )
    return set(done.stdout.split())


def test_importing_pnrt_is_cheap():
    heavy = {"numba", "llvmlite", "numpy", "rich", "typer", "tokenizers", "jinja2", "gguf"}
    assert "pnrt" in loaded_by("import pnrt")
    assert not heavy & loaded_by("import pnrt")


@pytest.mark.parametrize("name", ["formats", "reference", "scalars", "jit", "backend", "generate"])
def test_rooms_without_kernels_load_no_numba(name):
    assert not {"numba", "llvmlite", "tokenizers"} & loaded_by(f"import pnrt.{name}")


def test_compiled_code_decides_the_caches_name():
    """A kernel outside jit.SOURCES would be loaded stale after an edit."""
    from pnrt import jit

    named = {path for pattern in jit.SOURCES for path in ROOT.glob(pattern)}
    parts = ("pnrt.jit.inline", "pnrt.jit.kernel", "pnrt.simd", "pnrt.emit", "pnrt.native")
    made = {ROOT / m.name for m in modules() for i in m.imports if i.module.startswith(parts)}
    assert len(made) > 20
    assert not made - named
