"""The command line. One function per command; the only module that prints.

Exit status: 0, or 1 where a command reports findings, or 2 for wrong usage and unusable files.
Results go to standard output, progress and speeds to standard error. Every import of weight is made
inside the command that needs it, so that `pnrt --help` is instant.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pnrt import __version__
from pnrt.errors import DeviceError, FormatError, ModelError, PnrtError

if TYPE_CHECKING:
    from rich.console import Console

    from pnrt.generate import Model


class Commands(TyperGroup):
    """Turns our errors into one message on standard error and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PnrtError as error:
            _fail(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                # the reader went away (`pnrt inspect | head`): nobody is left to tell
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            _fail(f"{error.filename or 'input/output'}: {error.strerror or error}")
        except MemoryError as error:
            _fail(f"not enough memory: {error or 'an allocation failed'}")
        except UnicodeDecodeError as error:
            _fail(f"the text is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}")


def _fail(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(2)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run block-quantized language models, and prove that they ran right.",
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="a GGUF file")]
Json = Annotated[bool, typer.Option("--json", help="write JSON instead of a table")]
Threads = Annotated[int | None, typer.Option(min=1, help="default: what the machine allows")]
Activations = Annotated[str, typer.Option(help="q8_0 or f32: how products see their input")]
Cache = Annotated[str, typer.Option("--kv", help="f16 or f32: how keys and values are kept")]
Chunk = Annotated[int, typer.Option(min=1, help="prompt tokens per step; changes no result")]
Rotation = Annotated[
    str | None, typer.Option(help="`none` for a PN file that does not say if it is rotated")
]
Context = Annotated[int | None, typer.Option(min=1, help="tokens to make room for")]
Temperature = Annotated[float, typer.Option("--temp", min=0, help="0 takes the likeliest token")]
TopK = Annotated[int, typer.Option(min=0, help="0: off")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="1: off")]
MinP = Annotated[float, typer.Option(min=0, max=1, help="0: off")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]
Prompt = Annotated[str, typer.Option("-p", "--prompt", metavar="TEXT")]


def main() -> None:
    """Entry point of the `pnrt` command."""
    app()


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"pnrt {__version__}")
        raise typer.Exit


@app.command()
def demo(
    svg: Annotated[Path | None, typer.Option(help="also write the screen as an SVG file")] = None,
    offline: Annotated[bool, typer.Option(help="do not use the network")] = False,
    n: Annotated[int, typer.Option("-n", min=1, help="tokens per answer")] = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Quantize a small real model to PN, let both answer, and measure the distance."""
    from pnrt import demo as demos
    from pnrt import screen

    out = _console(record=svg is not None, quiet=as_json)
    with _progress() as tell:
        try:
            if offline and demos.cached_model() is None:
                raise DeviceError("the real model is not in the cache and --offline was given.")
            pair = demos.real_pair(tell)
        except DeviceError as error:
            tell(f"{error}\nA tiny random model, made here and now, stands in for it.", -1, 0)
            pair = demos.tiny_pair(tell)
    out.print(screen.demo_head(pair))
    with _progress() as tell:
        result = demos.run(pair, n=n, threads=threads, progress=tell)
    if as_json:
        _json(result)
        return
    out.print(screen.demo_answers(result))
    out.print(screen.demo_table(result))
    if svg:
        out.save_svg(str(svg), title="pnrt demo")


@app.command()
def inspect(
    file: File,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="look at one tensor")] = None,
    block: Annotated[
        str | None, typer.Option(metavar="ROW,BLOCK", help="and at one of its blocks")
    ] = None,
    hashes: Annotated[bool, typer.Option("--hash", help="sha256 of every tensor")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a file: keys and tensors, one tensor, or one block byte by byte."""
    from pnrt import screen
    from pnrt.container.gguf import open_gguf
    from pnrt.debug.inspect import block_view, file_view, parse_block, tensor_view

    if block and tensor is None:
        raise FormatError("--block needs --tensor: a block belongs to a tensor. Name it.")
    with open_gguf(file) as opened, _progress() as tell:
        if block:
            view = block_view(opened, tensor, *parse_block(block))
            shown = screen.block_screen
        elif tensor is not None:
            view, shown = tensor_view(opened, tensor), screen.tensor_screen
        else:
            view = file_view(
                opened, hashes=hashes, progress=lambda done, total: tell("hashing", done, total)
            )
            shown = screen.file_screen
    _show(as_json, view, lambda: shown(view))


@app.command()
def check(file: File, as_json: Json = False) -> None:
    """Find everything that is wrong with a file; exit status 1 if anything is."""
    from pnrt import screen
    from pnrt.debug.check import FileFinding, check_file

    notes: list[FileFinding] = []
    with _progress() as tell:
        found = check_file(
            file, notes=notes, progress=lambda done, total: tell("checking", done, total)
        )
    result = {"file": file, "findings": found, "notes": notes}
    _show(as_json, result, lambda: screen.check_screen(result))
    raise typer.Exit(1 if found else 0)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    mix: Annotated[str, typer.Option(help="pn3, pn4, p0k, q4_k_m, q8_0, q4_0 or f16")],
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=FORMAT", help="format of the tensors a pattern matches"),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="print the plan, write nothing")] = False,
    report: Annotated[bool, typer.Option(help="print the error of every tensor")] = False,
    rotation: Rotation = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a model in other weight formats."""
    from pnrt import screen
    from pnrt.container.gguf import open_gguf
    from pnrt.quantize import plan, quantize_file

    rules = [_rule(text) for text in tensor_type or []]
    with open_gguf(source) as file:
        decisions = plan(file, mix, rules)
    if dry_run:
        _show(as_json, decisions, lambda: screen.plan_table(decisions))
        return
    with _progress() as tell:
        errors = quantize_file(
            source, target, mix, rules, rotation=rotation, threads=threads, progress=tell
        )
    summary = {
        "file": target,
        "bytes": target.stat().st_size,
        "source_bytes": source.stat().st_size,
        "fallbacks": [d for d in decisions if "no multiple" in d.reason],
        "tensors": errors,
    }
    _show(as_json, summary, lambda: screen.quantized(summary, errors if report else []))


@app.command()
def run(
    file: File,
    prompt: Prompt,
    n: Annotated[int, typer.Option("-n", min=0, help="tokens to write at most")] = 128,
    temp: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    seed: Seed = None,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    chunk: Chunk = 512,
    context: Context = None,
    rotation: Rotation = None,
    as_json: Json = False,
) -> None:
    """Continue a text; special tokens in it are understood."""
    from pnrt.stream import Answer

    with _load(file, threads, activations, kv, rotation, context) as model:
        tokens = model.tokenizer.encode(prompt, parse_special=True)
        answer = Answer(model, tokens, n, _sampler(temp, top_k, top_p, min_p, seed), chunk)
        for piece in answer:
            if not as_json:
                _write(piece)
    if as_json:
        _json(answer.report())
        return
    _write("\n")
    _speeds(answer)


@app.command()
def chat(
    file: File,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="tokens per answer at most")] = 512,
    temp: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    seed: Seed = None,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    context: Context = None,
    rotation: Rotation = None,
) -> None:
    """Talk with a model: one line per message, an empty line or end of input leaves."""
    from pnrt.stream import Answer, chat_tokens

    messages = [{"role": "system", "content": system}] if system else []
    sampler = _sampler(temp, top_k, top_p, min_p, seed)
    seen: list[int] = []
    with _load(file, threads, activations, kv, rotation, context) as model:
        while line := _ask("> "):
            messages.append({"role": "user", "content": line})
            tokens = chat_tokens(model, messages)
            # what the model holds is not read again, unless the template rewrote the past
            if tokens[: len(seen)] != seen or len(tokens) == len(seen):
                seen = []
                model.reset()
            answer = Answer(model, tokens[len(seen) :], n, sampler)
            for piece in answer:
                _write(piece)
            _write("\n")
            _speeds(answer)
            messages.append({"role": "assistant", "content": answer.text})
            seen = (tokens + answer.ids)[: model.position]


@app.command()
def score(
    file: File,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="a UTF-8 text file")],
    against: Annotated[
        Path | None, typer.Option(metavar="FILE2", help="also the KL divergence from this model")
    ] = None,
    ctx: Annotated[int, typer.Option(help="tokens per window")] = 512,
    chunks: Annotated[int | None, typer.Option(help="use only the first windows")] = None,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    rotation: Rotation = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a model on a text; with --against the distance of two models."""
    from pnrt import score as scores
    from pnrt import screen

    words = text.read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(_load(file, threads, activations, kv, rotation, ctx))
        cut = scores.text_windows(model, words, ctx, chunks)
        if against is None:
            steps = scores.perplexity(model, cut)
        else:
            base = stack.enter_context(_load(against, threads, activations, kv, rotation, ctx))
            scores.same_text(base, cut, words, ctx, chunks)
            steps = scores.compare(base, model, cut)
        with _progress() as tell:
            tell("scoring windows", 0, len(cut))
            for result in steps:
                now = getattr(result, "perplexity", None) or result.model
                tell(f"scoring, perplexity {now.value:.4f}", result.windows, len(cut))
    names = (file.name, against.name if against else "")
    _show(as_json, result, lambda: screen.score_table(result, *names))


@app.command()
def tokenize(
    file: File,
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    special: Annotated[bool, typer.Option(help="understand special tokens in the text")] = False,
    as_json: Json = False,
) -> None:
    """Show how a text becomes tokens."""
    from pnrt import screen
    from pnrt.container.gguf import open_gguf
    from pnrt.text.tokenizer import Tokenizer

    with open_gguf(file) as opened, _naming(file):
        tokenizer = Tokenizer.from_metadata(opened.metadata)
    rows = [
        {"id": i, "token": tokenizer.token(i), "bytes": tokenizer.token_bytes(i).hex()}
        for i in tokenizer.encode(text, parse_special=special)
    ]
    _show(as_json, rows, lambda: screen.tokens_table(rows))


@app.command()
def logits(
    file: File,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.npz")],
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="ids, instead of -p")] = None,
    all_positions: Annotated[bool, typer.Option("--all", help="every position's logits")] = False,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    chunk: Chunk = 512,
    rotation: Rotation = None,
) -> None:
    """Write float32 logits: keys `tokens` [T] int32, `logits` [V] or with --all [T, V]."""
    import numpy as np

    from pnrt.container.writer import atomic

    if (prompt is None) == (tokens is None):
        raise ModelError("logits needs -p TEXT or --tokens IDS, and only one of them.")
    text = prompt is not None
    with _load(file, threads, activations, kv, rotation, None, text) as model:
        ids = _ids(tokens) if prompt is None else model.tokenizer.encode(prompt, parse_special=True)
        _fits(model, ids)
        values = model.eval(ids, chunk=chunk, all=all_positions)
        with atomic(out) as stream:
            np.savez(stream, tokens=np.array(ids, np.int32), logits=np.asarray(values, np.float32))


@app.command()
def bench(
    file: File,
    prompt: Annotated[int, typer.Option("-p", min=0, help="prompt tokens")] = 512,
    n: Annotated[int, typer.Option("-n", min=0, help="generated tokens")] = 128,
    repeats: Annotated[int, typer.Option("-r", min=1, help="counted runs of each")] = 3,
    threads: Threads = None,
    activations: Activations = "q8_0",
    kv: Cache = "f16",
    chunk: Chunk = 512,
    rotation: Rotation = None,
    as_json: Json = False,
) -> None:
    """Time a model: prompt and generated tokens per second."""
    from pnrt import screen
    from pnrt.bench import bench as time_model

    start = time.perf_counter()
    with _load(file, threads, activations, kv, rotation, None, text=False) as model:
        load = time.perf_counter() - start
        with _progress() as tell:
            result = time_model(model, prompt, n, repeats, chunk, tell)
    settings = {"activations": activations, "kv": kv, "chunk": chunk, "load_seconds": load}
    result = {"file": file.name, "bytes": file.stat().st_size, **settings, **result}
    _show(as_json, result, lambda: screen.bench_table(result))


@app.command()
def doctor(
    kernels: Annotated[bool, typer.Option(help="list every kernel by op and format")] = False,
    as_json: Json = False,
) -> None:
    """Say what this machine offers and what is missing; exit status 1 if something is."""
    from pnrt import screen
    from pnrt.doctor import doctor as examine

    report = examine(kernels)
    _show(as_json, report, lambda: screen.doctor_screen(report))
    raise typer.Exit(1 if report["problems"] else 0)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A")],
    b: Annotated[Path, typer.Argument(metavar="B")],
    as_json: Json = False,
) -> None:
    """Compare two files: keys, tensors, types, weights; exit status 1 if anything differs."""
    from pnrt import screen
    from pnrt.debug.compare import compare_files

    with _progress() as tell:
        result = compare_files(a, b, tell)
    _show(as_json, result, lambda: screen.compare_screen(result))
    raise typer.Exit(0 if result["equal"] else 1)


@app.command()
def formats(
    error: Annotated[
        Path | None, typer.Option(metavar="FILE", help="measure each format on this model")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="also write the screen as an SVG file")] = None,
    as_json: Json = False,
) -> None:
    """The table of weight formats."""
    from pnrt import screen
    from pnrt.debug.survey import format_errors, format_rows

    rows = format_rows()
    if error:
        with _progress() as tell:
            measured = format_errors(error, tell)
        rows = [{**row, "relative_rms": measured.get(row["name"])} for row in rows]
    _show(as_json, rows, lambda: screen.formats_table(rows), svg)


# what the commands share


@contextlib.contextmanager
def _load(
    path: Path,
    threads: int | None,
    activations: str,
    kv: str,
    rotation: str | None,
    context: int | None,
    text: bool = True,
) -> Iterator[Model]:
    """A loaded model, with progress while its weights are packed and its kernels compiled.

    text: whether its tokenizer will be needed; a fault of it then shows before any waiting.
    """
    import pnrt

    with _progress() as tell:
        model = pnrt.load(
            path,
            threads=threads,
            activations=activations,
            kv=kv,
            rotation=rotation,
            context=context,
            progress=tell,
        )
    with model:
        if text:
            with _naming(path):
                model.tokenizer  # noqa: B018  (builds it)
        yield model


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of code that sees only a file's metadata get the file's name."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _sampler(temp: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> Any:
    from pnrt.text.sampling import Sampler

    if temp == 0:
        return Sampler.greedy()
    return Sampler(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ModelError(f"--tensor-type {text}: REGEX=FORMAT is needed, e.g. 'ffn_down=q8_0'.")
    return pattern, name


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ModelError(
            f"--tokens {text}: whole numbers with commas between are needed."
        ) from None


def _fits(model: Model, ids: list[int]) -> None:
    from pnrt.stream import context

    if not 0 < len(ids) <= context(model):
        raise ModelError(f"{len(ids)} tokens; 1 to {context(model)} fit the context.")
    bad = [i for i in ids if not 0 <= i < model.config.vocab_size]
    if bad:
        raise ModelError(f"token {bad[0]}: ids are 0 to {model.config.vocab_size - 1}.")


def _write(piece: str) -> None:
    """Stream a model's text; on a terminal its control characters are shown, not sent."""
    from pnrt.screen import visible

    sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def _ask(mark: str) -> str:
    if sys.stdin.isatty():
        sys.stderr.write(mark)
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def _speeds(answer: Any) -> None:
    text = (
        f"prompt {len(answer.tokens)} tokens, {answer.prompt_speed:.1f} tokens/s; "
        f"generation {len(answer.ids)} tokens, {answer.speed:.1f} tokens/s"
    )
    if answer.cut and len(answer.ids) == answer.limit:
        text += "; the context is full"
    typer.echo(text, err=True)


def _console(record: bool = False, quiet: bool = False) -> Console:
    from rich.console import Console

    # a screen that is kept has one width, and what goes into a pipe is not cut to a terminal
    width = 100 if record else (None if sys.stdout.isatty() else 180)
    return Console(record=record, width=width, quiet=quiet, highlight=False)


def _show(as_json: bool, data: Any, table: Callable[[], Any], svg: Path | None = None) -> None:
    if as_json:
        _json(data)
        return
    out = _console(record=svg is not None)
    out.print(table())
    if svg:
        out.save_svg(str(svg), title=f"pnrt {svg.stem}")


def _json(data: Any) -> None:
    from pnrt.screen import plain

    typer.echo(json.dumps(plain(data), indent=1, allow_nan=False))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[..., None]]:
    """A callable tell(what, done, total, ...) that shows waits on standard error.

    On a terminal a bar that vanishes; elsewhere a line at most every five seconds. done < 0 is a
    remark that stays.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[count]}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    last = time.monotonic()
    task = None

    def tell(what: str, done: int, total: int) -> None:
        nonlocal task, last
        if done < 0:
            console.print(what)
            return
        count = f"{done}/{total}" if total < 10_000 else f"{100 * done // max(total, 1)} %"
        if console.is_terminal:
            if task is None:
                task = bar.add_task(what, total=total, count=count)
            bar.update(task, description=what, completed=done, total=total, count=count)
        elif time.monotonic() - last > 5:
            last = time.monotonic()
            console.print(f"{what} {count}")

    with bar if console.is_terminal else contextlib.nullcontext():
        yield tell
