"""What screens are made of: tables, facts, sizes, bars, and values as JSON knows them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.containers import Renderables
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# whatever rich can draw
Renderable = Any

UNITS = ("B", "KB", "MB", "GB", "TB")


def size(n: float) -> str:
    """Bytes for people: 1 MB is a million bytes."""
    for unit in UNITS:
        if n < 1000 or unit == UNITS[-1]:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("the last unit always returns")


def group(*parts: Renderable) -> Renderable:
    """One below the other."""
    return Renderables(parts)


def shape(sizes: Sequence[int]) -> str:
    """Row-major sizes: 49152 x 576."""
    return " x ".join(str(n) for n in sizes) or "1"


def table(*columns: str, right: Sequence[int] = (), title: str | None = None) -> Table:
    """An open table; `right` are the numbers of right-aligned columns. A name ending in * folds."""
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for i, name in enumerate(columns):
        out.add_column(
            name.rstrip("*"),
            justify="right" if i in right else "left",
            no_wrap=not name.endswith("*"),
            overflow="fold" if name.endswith("*") else "ellipsis",
        )
    return out


def facts(rows: Sequence[tuple[str, Any]]) -> Table:
    """Name and value, one pair per line."""
    out = Table.grid(padding=(0, 2))
    out.add_column(style="dim", no_wrap=True)
    out.add_column(overflow="fold")
    for name, value in rows:
        out.add_row(name, value if isinstance(value, Text) else escape(visible(str(value))))
    return out


def short(value: Any) -> str:
    """A float in six digits, anything else as it is."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def bits(value: float | None) -> str:
    """Bits per weight, or a dash."""
    return "-" if value is None else f"{value:.4g}"


def number(value: int | None) -> str:
    """A whole number, or a dash."""
    return "-" if value is None else str(value)


def visible(text: str) -> str:
    """Text with control characters shown, so that a model cannot drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def safe(text: Any) -> str:
    """Text of a file for a screen: no markup, no control characters, one line."""
    return escape(visible(str(text)).replace("\n", "\\n"))


def plain(value: Any) -> Any:
    """Values as JSON knows them; what is not finite becomes a string."""
    if dataclasses.is_dataclass(value):
        fields = {f.name for f in dataclasses.fields(value) if not f.name.startswith("_")}
        return {name: plain(v) for name, v in vars(value).items() if name in fields}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
