"""Use a model: run, chat, tokenize, logits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pnrt.cli.app import app
from pnrt.cli.loading import extra_types, load, naming, prompted, sampling, text_of
from pnrt.cli.options import (
    Chunk,
    Context,
    E4M3Id,
    File,
    Json,
    MinP,
    Pre,
    Prompt,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    runs_model,
)
from pnrt.cli.output import ask, show, show_json, speeds, write
from pnrt.cli.watch import Dispatch, NanStop, watched


@app.command()
@runs_model
def run(
    file: File,
    prompt: Prompt,
    n: Annotated[int, typer.Option("-n", min=0, help="tokens to write at most")] = 128,
    temp: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="with --json: this many of the likeliest tokens")
    ] = None,
    chunk: Chunk = 512,
    context: Context = None,
    nan_stop: NanStop = False,
    dispatch: Dispatch = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Continue a text; special tokens in it are understood."""
    from pnrt.stream import Answer, prompt_tokens
    from pnrt.text.sampling import Recorder

    sampler = sampling(temp, top_k, top_p, min_p, seed)
    if logprobs is not None:
        sampler = Recorder(sampler, logprobs)
    with load(file, context=context, validate=not nan_stop, **options) as model:
        tokens = prompt_tokens(model.tokenizer, prompt)
        answer = Answer(model, tokens, n, sampler, chunk, stop or ())
        with watched(model, nan_stop, dispatch):
            for piece in answer:
                if not as_json:
                    write(piece)
    if as_json:
        told = {} if logprobs is None else {"logprobs": sampler.rows}
        show_json({**answer.report(), **told, "notes": model.notes})
        return
    write("\n")
    speeds(answer)


@app.command()
@runs_model
def chat(
    file: File,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a Jinja template instead of the model's")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="tokens per answer at most")] = 512,
    temp: Temperature = 0.8,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    min_p: MinP = 0.05,
    seed: Seed = None,
    stop: Stop = None,
    context: Context = None,
    **options: Any,
) -> None:
    """Talk with a model: one line per message, an empty line or end of input leaves.

    Ctrl-C ends an answer, and between answers the conversation.
    """
    from pnrt.stream import Answer, chat_tokens
    from pnrt.text.template import template_of

    messages = [{"role": "system", "content": system}] if system else []
    sampler = sampling(temp, top_k, top_p, min_p, seed)
    seen: list[int] = []
    own = text_of(template) if template else None
    with load(file, context=context, **options) as model, naming(file):
        own = template_of(model.file.metadata if own is None else own)
        while line := ask("> "):
            messages.append({"role": "user", "content": line})
            tokens = chat_tokens(model, messages, own)
            # what the model holds is not read again, unless the template rewrote the past
            if tokens[: len(seen)] != seen or len(tokens) == len(seen):
                seen = []
                model.reset()
            answer = Answer(model, tokens[len(seen) :], n, sampler, stop=stop or ())
            try:
                for piece in answer:
                    write(piece)
            except KeyboardInterrupt:
                # what an interrupted step left behind is not to be trusted: all is read again
                model.reset()
            write("\n")
            speeds(answer)
            messages.append({"role": "assistant", "content": answer.text})
            seen = (tokens + answer.ids)[: model.position]


@app.command()
def tokenize(
    file: File,
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    special: Annotated[bool, typer.Option(help="understand special tokens in the text")] = False,
    e4m3_id: E4M3Id = None,
    pre: Pre = None,
    as_json: Json = False,
) -> None:
    """Show how a text becomes tokens."""
    from pnrt.container.gguf import open_gguf
    from pnrt.screen import models as screen
    from pnrt.text.tokenizer import Tokenizer

    with open_gguf(file, extra_types=extra_types(e4m3_id)) as opened, naming(file):
        tokenizer = Tokenizer.from_metadata(opened.metadata, pre=pre)
    rows = [
        {
            "id": i,
            "token": tokenizer.token(i),
            "bytes": tokenizer.token_bytes(i).hex(),
            "kind": tokenizer.kind(i),
        }
        for i in tokenizer.encode(text, parse_special=special)
    ]
    show(as_json, rows, lambda: screen.tokens_table(rows))


@app.command()
@runs_model
def logits(
    file: File,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.npz")],
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="ids, instead of -p")] = None,
    all_positions: Annotated[bool, typer.Option("--all", help="every position's logits")] = False,
    chunk: Chunk = 512,
    nan_stop: NanStop = False,
    dispatch: Dispatch = False,
    **options: Any,
) -> None:
    """Write float32 logits: keys `tokens` [T] int32, `logits` [V] or with --all [T, V]."""
    import numpy as np

    from pnrt.container.writer import atomic, check_target

    check_target(out, file)
    with prompted(file, prompt, tokens, validate=not nan_stop, **options) as (model, ids):
        with watched(model, nan_stop, dispatch):
            values = model.eval(ids, chunk=chunk, all=all_positions)
        with atomic(out) as stream:
            np.savez(stream, tokens=np.array(ids, np.int32), logits=np.asarray(values, np.float32))
