"""Chat templates: the Jinja program in a GGUF file that writes a conversation as one text.

It runs in a process of its own (`sandbox.py`) with bounded time, memory and output, which costs
about a tenth of a second per conversation and holds whatever the template does.
"""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pnrt.errors import ModelError, PnrtError

KEY = "tokenizer.chat_template"
SECONDS = 1.0  # of CPU time, after the interpreter has started
MEMORY = 512 << 20  # bytes of address space
OUTPUT = 16 << 20  # characters

# what ends a wait where the operating system has no CPU timer, or does not schedule the child
_PATIENCE = 20.0 if hasattr(signal, "setitimer") else 3.0
_EMPTY = "Pass one (`pnrt chat --template FILE`), or use `pnrt run`, which needs none."
_REPAIR = "Correct the template in the file, or pass another one."


def render_chat(
    metadata_or_template: Mapping[str, Any] | str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = "",
    eos_token: str | None = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    **extra: Any,
) -> str:
    """The conversation as the text a model was trained on.

    Tokenize it with parse_special=True and add_bos=False: the template writes its own bos.

    Args:
        metadata_or_template: a GGUF file's metadata, or the template itself.
        messages: dicts with `role` and `content`; everything passed must be JSON data.
        tools, extra: further variables of the template (`enable_thinking=False`, ...).
        now: the time `strftime_now` tells; None = the clock's.
    Raises: ModelError when there is no template, it is wrong, refuses the conversation, reaches
        outside its sandbox or takes too much time, memory or output; PnrtError for variables
        that are not JSON.
    """
    variables = {
        "messages": list(messages),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token or "",
        "eos_token": eos_token or "",
        "tools": tools,
        **extra,
    }
    job = {
        "path": [str(folder) for folder in sys.path],
        "template": template_of(metadata_or_template),
        "variables": variables,
        "now": now and now.isoformat(),
        "seconds": SECONDS,
        "memory": MEMORY,
        "output": OUTPUT,
    }
    try:
        task = json.dumps(job)
    except (TypeError, ValueError, RecursionError) as error:
        raise PnrtError(
            f"chat variables: {error}; a template takes JSON data (dicts, lists, strings, "
            "numbers). Convert the messages, tools and options first."
        ) from None
    answer = _answer(task)
    if "error" in answer:
        raise ModelError(_explain(answer))
    return answer["text"]


def template_of(source: Mapping[str, Any] | str) -> str:
    """The template itself. Raises: ModelError where the metadata has none."""
    if isinstance(source, str):
        return source
    template = source.get(KEY)
    if not isinstance(template, str):
        found = "missing" if template is None else f"a {type(template).__name__}"
        raise ModelError(f"{KEY}: {found}; a chat needs a template, a string. {_EMPTY}")
    return template


def _answer(task: str) -> dict:
    """Run the sandbox on a job and read what it says, or why it died."""
    command = [sys.executable or "python3", "-I", "-S", str(Path(__file__).with_name("sandbox.py"))]
    try:
        done = subprocess.run(
            command,
            input=task,
            capture_output=True,
            encoding="ascii",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "time"}
    except OSError as error:
        raise PnrtError(
            f"{command[0]}: {error}; chat templates run in a process of their own. "
            "Allow Python to start one."
        ) from error
    killers = [getattr(signal, name, None) for name in ("SIGPROF", "SIGXCPU")]
    if -done.returncode in killers:
        return {"error": "time"}
    if done.returncode == 0:
        return json.loads(done.stdout)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": "death", "found": f"its process ended with {done.returncode}: {last}"}


def _explain(answer: dict) -> str:
    """The four parts of the message for a template that gave no text."""
    where = f"{KEY} line {answer['line']}" if answer.get("line") else KEY
    found = " ".join(str(answer.get("found", "")).split())[:500].rstrip(".")
    plain = found.partition(": ")[2]
    found, allowed, todo = {
        "refusal": (
            f"the template refuses this conversation: {plain}",
            "its author decides what it takes",
            "Change the messages (roles, order, tools).",
        ),
        "syntax": (f"not a template: {plain}", "it must be Jinja", _REPAIR),
        "security": (
            plain,
            "a template may use its variables and plain methods only",
            "It may be malicious: do not trust the file, and pass another template.",
        ),
        "time": (
            f"still running after {SECONDS:g} s",
            f"a template may take {SECONDS:g} s of CPU time",
            _REPAIR,
        ),
        "memory": (
            f"wants more than {MEMORY >> 20} MiB of memory",
            "that is the most a template may take",
            _REPAIR,
        ),
        "output": (
            f"writes more than {OUTPUT:,} characters",
            "that is the most a template may write",
            _REPAIR,
        ),
        "recursion": (
            "calls itself without end",
            "macros may nest some hundred deep",
            _REPAIR,
        ),
    }.get(answer["error"], (found, "a template must render every conversation", _REPAIR))
    return f"{where}: {found}; {allowed}. {todo}"
