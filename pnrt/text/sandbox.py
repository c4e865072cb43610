"""The process a chat template runs in: `python sandbox.py`, a job on stdin, an answer on stdout.

A template comes out of a model file: it is a program by a stranger. Its language is jinja2's
sandbox (no attributes with underscores, nothing mutable); its appetite is bounded by the operating
system, because a single `'a' * 10**10` never comes back to any check of ours. `template.py` starts
it; it imports nothing of pnrt.
"""

import datetime
import json
import signal
import sys


def main() -> None:
    """Render the job {path, template, variables, now, seconds, memory, output} read from stdin."""
    job = json.load(sys.stdin)
    # the interpreter was started isolated; it finds jinja2 where its parent does
    sys.path[:] = job["path"]
    # imported here, before the clock of the template starts
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    _limit(job["seconds"], job["memory"])
    try:
        answer = {"text": _render(job)}
    except Exception as error:
        answer = {"error": _kind(error), "found": f"{type(error).__name__}: {error}"}
        answer["line"] = getattr(error, "lineno", 0) or _line(error.__traceback__)
    json.dump(answer, sys.stdout)


class Refusal(Exception):
    """The template itself called raise_exception."""


class TooLong(Exception):
    """The output passed its limit."""


def _kind(error: Exception) -> str:
    from jinja2 import TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    kinds = {
        Refusal: "refusal",
        TooLong: "output",
        MemoryError: "memory",
        RecursionError: "recursion",
        TemplateSyntaxError: "syntax",
        SecurityError: "security",
    }
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "failure")


def _limit(seconds: float, memory: int) -> None:
    """Let the operating system end this process when it has used its CPU time or memory."""
    if not hasattr(signal, "setitimer"):
        return
    import resource

    # its default action ends the process, also in the middle of a long C call
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    for what, most in (
        ("RLIMIT_AS", memory),
        ("RLIMIT_CPU", int(seconds) + 1),
        ("RLIMIT_FSIZE", 0),
    ):
        number = getattr(resource, what)
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(number, (most, hard))
        except (ValueError, OSError):
            # macOS has no limit on address space; the timer still holds
            continue


def _render(job: dict) -> str:
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            # jinja2 would print nothing and go on
            raise SecurityError(f"reaches for {attribute!r} of a {type(obj).__name__}")

    class Generation(Extension):
        """`{% generation %}` marks what a model said, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    now = datetime.datetime.fromisoformat(job["now"]) if job["now"] else datetime.datetime.now()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    parts, length = [], 0
    for part in environment.from_string(job["template"]).generate(**job["variables"]):
        length += len(part)
        if length > job["output"]:
            raise TooLong
        parts.append(part)
    return "".join(parts)


def _tojson(value, indent=None, ensure_ascii=False, separators=None, sort_keys=False):
    """JSON as models were trained on it: nothing escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message):
    raise Refusal(message)


def _line(trace) -> int:
    """The template line an error came from, or 0."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


if __name__ == "__main__":
    main()
