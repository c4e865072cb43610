"""Screens of the commands that test and explain: selftest, explain."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from pnrt.screen.parts import Renderable, group, table

if TYPE_CHECKING:
    from pnrt.debug.explain import Explanation
    from pnrt.debug.selftest import Failure, Report


def selftest_screen(report: Report) -> Renderable:
    """Cases per op, what was skipped and why, every failure, and the verdict."""
    out = table("op", "cases", "failed", right=(1, 2))
    failed: dict[str, int] = defaultdict(int)
    for failure in report.failures:
        failed[failure.case.split("(")[0]] += 1
    for op, count in report.executed.items():
        bad = failed[op]
        out.add_row(op, str(count), Text(str(bad), style="red" if bad else "green"))
    parts: list[Renderable] = [out] if report.executed else []
    parts += [Text(f"skipped: {line}", style="yellow") for line in _skips(report.skipped)]
    if report.untested:
        parts.append(Text(f"no case tries: {', '.join(report.untested)}", style="yellow"))
    parts += [_failure(failure) for failure in report.failures]
    return group(*parts, _verdict(report))


def _skips(skipped: dict[str, int]) -> list[str]:
    """One line per reason; reasons that differ in the format only are one."""
    grouped: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in skipped.items():
        head, _, form = reason.partition(" for ")
        grouped[head].append((form, count))
    lines = []
    for head, items in grouped.items():
        names = ", ".join(name for name, _ in items if name)
        count = sum(n for _, n in items)
        lines.append(f"{count} cases: {head}{f' for {names}' if names else ''}")
    return lines


def _failure(failure: Failure) -> Renderable:
    text = Text(f"{failure.case}\n", style="bold red")
    text.append(f"  {failure.kind}: {failure.text}\n", style="red")
    if failure.smallest:
        text.append(f"  smallest: {failure.smallest}\n", style="")
    if failure.file:
        text.append(f"  saved as {failure.file}\n", style="")
    text.append(f"  again: {failure.command}", style="dim")
    return text


def _verdict(report: Report) -> Text:
    cases, skipped = sum(report.executed.values()), sum(report.skipped.values())
    if not cases:
        return Text(
            f"no case was executed ({skipped} skipped): nothing is proven. "
            "Choose other --ops or --formats.",
            style="bold red",
        )
    judged = report.judged
    count = len(report.failures)
    text = (
        f"{report.backend}, seed {report.seed}: {cases} cases, {count} failed, {skipped} skipped, "
        f"{report.seconds:.1f} s; {judged.get('bits', 0)} results to the bit, "
        f"{judged.get('bound', 0)} within their bound, of these {judged.get('exactly', 0)} exact"
    )
    return Text(text, style="bold red" if count else "green")


def explain_screen(result: Explanation, most: int) -> Renderable:
    """The nearest guesses and the verdict."""
    out = table("distance", "guess", "what it means*", right=(0,))
    for guess in result.guesses[:most]:
        distance = guess["distance"]
        style = "green" if guess["name"] in result.named else None
        shown = "not finite" if distance is None else f"{distance:.3g}"
        out.add_row(shown, guess["name"], guess["says"], style=style)
    return group(Text(f"{result.about}: {result.kind}"), out, _explained(result))


def _explained(result: Explanation) -> Text:
    if not result.found:
        best = result.guesses[0]
        near = "" if best["distance"] is None else f", the nearest is {best['name']}"
        return Text(
            f"none of {len(result.guesses)} known mistakes makes these numbers{near}", style="red"
        )
    if "right" in result.named:
        return Text("nothing is wrong here: the right reading makes these numbers", style="green")
    if len(result.named) == 1:
        return Text(f"these numbers come from: {result.named[0]}", style="bold green")
    return Text(
        f"these numbers come from one of (they cannot be told apart): {'; '.join(result.named)}",
        style="bold green",
    )
