"""From a file to tokens: load a model, feed it, generate.

with pnrt.load("model.gguf") as model:
    for token in model.generate(model.tokenizer.encode("Once upon"), n=32):
        ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pnrt import backend as backends
from pnrt.container.gguf import open_gguf
from pnrt.errors import ModelError
from pnrt.formats.repack import Repack
from pnrt.models.config import Config, read_config
from pnrt.models.rope import rope_tables
from pnrt.models.rotation import Rotation, read_rotation
from pnrt.models.state import Snapshot
from pnrt.models.weights import check_weights, mtp_tensors
from pnrt.program import Program
from pnrt.reading import WeightReader

if TYPE_CHECKING:
    from pnrt.text.sampling import Sampler
    from pnrt.text.tokenizer import Tokenizer

# the default context: enough for a chat, and the caches are only touched as they fill
DEFAULT_CONTEXT = 8192

Progress = Callable[[str, int, int], None]


class Model:
    """A loaded model; made by `load`, a context manager.

    config: Config; file: GGUFFile; rotation: Rotation; program: Program; context: tokens it can
    hold; position: tokens it has read; threads; notes: sentences about what of the file is not
    used, or used in another form; tokenizer (built when first asked for).
    """

    def __init__(
        self,
        reader: WeightReader,
        config: Config,
        program: Program,
        session: Any,
        context: int,
        pre: str | None = None,
    ):
        self.reader, self.file, self.rotation = reader, reader.file, reader.rotation
        self.config, self.program = config, program
        self.session, self.context = session, context
        self.notes = _notes(reader, config, session)
        self.threads, self.pre = session.threads, pre

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Give back weights, caches and the file."""
        self.session.close()
        self.file.close()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the file's metadata describes."""
        from pnrt.text.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self.file.metadata, pre=self.pre)

    @property
    def position(self) -> int:
        """Tokens read so far."""
        return self.session.position

    def reset(self) -> None:
        """Forget every token."""
        self.session.reset()

    def snapshot(self) -> Snapshot:
        """A copy of everything the tokens read so far have left behind.

        Recurrent blocks overwrite their state, so a prefix can only be gone back to with one.
        """
        return self.session.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; what follows has the bits it would have had then.

        Raises: ModelError for a snapshot of another model, another kv, or longer than the context.
        """
        self.session.restore(snapshot)

    def vector(self, name: str) -> np.ndarray:
        """A weight that is not a matrix of products, decoded, as the program's steps name it."""
        return self.reader.vector(name)

    def logits(self, tokens: Sequence[int], chunk: int = 512) -> np.ndarray:
        """Logits of every position, from an empty state.

        Args:
            tokens: [T] ids.
            chunk: tokens fed at a time; the result does not depend on it, to the bit.
        Returns: [T, V] float32.
        """
        self.reset()
        return self.eval(tokens, chunk, all=True)

    def eval(self, tokens: Sequence[int], chunk: int = 512, all: bool = False) -> np.ndarray:
        """Feed tokens after those already read.

        Returns: float32 [V] of the last token, or [T, V] with all.
        Raises: ModelError for no tokens, ids outside the vocabulary, a full context.
        """
        parts = self._parts(tokens, chunk)
        rows = [self.session.run(part, len(part) if all else 0) for part in parts[:-1]]
        rows.append(self.session.run(parts[-1], len(parts[-1]) if all else 1))
        return np.concatenate(rows) if all else rows[-1][-1]

    def next(self, tokens: Sequence[int], sampler: Sampler | None = None, chunk: int = 512) -> int:
        """Feed tokens after those already read; choose the one that follows.

        Where the likeliest is wanted a GPU finds it itself, and no logits are copied.

        Args:
            sampler: None for greedy.
        Raises: ModelError as eval, and with a sampler for logits that are not numbers.
        """
        greedy = sampler is None or sampler.temperature == 0
        if not (greedy and hasattr(self.session, "run_greedy")):
            logits = self.eval(tokens, chunk)
            return sampler.sample(logits) if sampler else int(np.argmax(logits))
        *before, last = self._parts(tokens, chunk)
        for part in before:
            self.session.run(part, 0)
        token, logit = self.session.run_greedy(last)
        if sampler:
            from pnrt.text.sampling import check_largest

            check_largest(token, logit)
        return token

    def _parts(self, tokens: Sequence[int], chunk: int) -> list[np.ndarray]:
        """Checked ids, as many as a session takes at a time in each part."""
        ids = np.asarray(tokens, np.int64).reshape(-1)
        bad = np.flatnonzero((ids < 0) | (ids >= self.config.vocab_size))
        if bad.size:
            raise ModelError(
                f"token {bad[0]} is {ids[bad[0]]}: ids are 0 to {self.config.vocab_size - 1}. "
                "Check the ids, or the model they came from."
            )
        if not ids.size:
            raise ModelError("no tokens: a model needs at least one to go on from. Give it a text.")
        if chunk < 1:
            raise ModelError(
                f"chunk: found {chunk}; at least 1 is needed. Any size gives the same bits."
            )
        if self.position + ids.size > self.context:
            raise ModelError(
                f"the context is full: {self.position} + {ids.size} tokens, it holds "
                f"{self.context}. Use a shorter prompt or load with a larger context."
            )
        step = min(chunk, self.session.chunk)
        return [ids[start : start + step] for start in range(0, ids.size, step)]

    def generate(
        self,
        tokens: Sequence[int],
        n: int = 128,
        sampler: Sampler | None = None,
        chunk: int = 512,
    ) -> Iterator[int]:
        """Feed tokens, then sample up to n more.

        Args:
            sampler: None for greedy.
        Yields: token ids; ends at an end-of-generation token (not yielded) or a full context.
        """
        stop = self.tokenizer.eog
        if n < 1:
            self.eval(tokens, chunk)
            return
        token = self.next(tokens, sampler, chunk)
        for i in range(n):
            if token in stop:
                return
            yield token
            if i + 1 == n or self.position == self.context:
                return
            token = self.next([token], sampler)


def load(
    path: str | Path,
    backend: str | backends.Backend = "cpu",
    activations: str = "q8_0",
    kv: str = "f16",
    threads: int | None = None,
    rotation: str | None = None,
    context: int | None = None,
    chunk: int = 512,
    extra_types: Mapping[int, str] | None = None,
    validate: bool = True,
    repack: str | None = None,
    pre: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a GGUF model.

    Args:
        backend: 'cpu', 'cuda', 'auto' (cuda where a GPU can be used, else cpu) or 'reference'; or
            what pnrt.backend.open returned, which this model then closes.
        activations: 'q8_0' (8-bit, the fast one) or 'f32'; f32, f16 and bf16 weights take f32.
        kv: 'f16' or 'f32' cache.
        threads: None for what the affinity mask and container quota allow.
        rotation: what a PN file without rotation keys needs said: 'none' or 'hadamard:BLOCK'.
        context: tokens the caches hold; None for the model's own, at most 8192.
        chunk: tokens at most per run of a prompt.
        extra_types: type ids mapped by hand to format names, e.g. {42: "e4m3"}.
        validate: refuse weights that break a rule of their format (NaN scales, reserved bits);
            False only to watch what they do.
        repack: 'mxfp8:ceil' or 'mxfp8:floor' takes e4m3 weights as mxfp8; see formats.repack.
        pre: the pre-tokenizer, for a file that names none or one pnrt does not know.
        progress: told (what, done, total).
    Raises:
        FileError, ModelError, DeviceError: before any weight is read.
        FormatError: a block breaks a rule of its format.
    """
    tell = progress or (lambda what, done, total: None)
    backends.check_choice("activations", activations, backends.ACTIVATIONS)
    backends.check_choice("kv", kv, backends.CACHE_TYPES)
    target = Repack.parse(repack) if repack else None
    engine = backends.open(backend, threads) if isinstance(backend, str) else backend
    file = open_gguf(path, extra_types=extra_types)
    try:
        config = read_config(file)
        tensors = check_weights(file, config)
        rotated = read_rotation(file, rotation)
        context = chosen_context(config, context)
        program = build_program(config, {info.name for info in tensors.values()}, rotated)
        reader = WeightReader(file, rotated, validate, target)
        backends.check_program(engine, program, reader.format)
        options = {"positions": context, "chunk": chunk, "kv": kv, "activations": activations}
        engine.reserve(program, reader.shape, **options)
        weights = reader.read(program, engine, tell)
        rope = _rope(reader, config, context)
        session = engine.bind(program, weights, rope_tables=rope, **options)
        session.progress = lambda done, total, name, seconds: tell(
            f"compiling kernels, {seconds:.1f} s", done, total
        )
        session.prepare()
        return Model(reader, config, program, session, context, pre)
    except BaseException:
        file.close()
        engine.close()
        raise


def chosen_context(config: Config, asked: int | None, name: str = "context") -> int:
    """Tokens of context: those asked for, or for None the model's own, at most DEFAULT_CONTEXT.

    Args: name – what the caller calls it.
    Raises: ModelError for more than the model has.
    """
    if asked is None:
        return min(config.context_length, DEFAULT_CONTEXT)
    if not 1 <= asked <= config.context_length:
        raise ModelError(
            f"{name} {asked}: this model holds 1 to {config.context_length} tokens. "
            "Ask for no more than that (--context, --ctx)."
        )
    return asked


def build_program(config: Config, tensors: Container[str], rotation: Rotation) -> Program:
    """The program of a model.

    Args:
        tensors: names present in the file.
    """
    from pnrt.models import llama, qwen35

    family = qwen35 if config.architecture == "qwen35" else llama
    return family.build(config, tensors, rotation)


def _notes(reader: WeightReader, config: Config, session: Any) -> tuple[str, ...]:
    # a backend that was not asked for by name says why it runs
    notes = [note] if (note := getattr(session.backend, "note", "")) else []
    skipped = mtp_tensors(reader.file, config)
    if skipped:
        blocks = "1 block" if config.mtp_layers == 1 else f"{config.mtp_layers} blocks"
        notes.append(
            f"skipped: {blocks} for drafting several tokens at once ({len(skipped)} tensors); "
            "the result does not depend on them"
        )
    stated = reader.file.metadata[f"{config.architecture}.context_length"]
    if config.context_length < stated:
        notes.append(
            f"context: {config.context_length} of {stated} tokens, the model's sliding window; "
            "pnrt attends to every token, which is the same up to there and not beyond"
        )
    if reader.repack:
        notes.append(reader.repack.sentence())
    return tuple(notes)


def _rope(reader: WeightReader, config: Config, context: int) -> tuple[np.ndarray, np.ndarray]:
    factors = None
    if "rope_freqs.weight" in reader.file.tensors:
        factors = reader.vector("rope_freqs.weight")
    return rope_tables(config, np.arange(context), factors)
