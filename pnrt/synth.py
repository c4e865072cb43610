"""Write a GGUF file with the shapes, formats and vocabulary of a real model and random weights.

The bytes are random blocks, not quantized numbers: code bits are drawn, scales are set so that
the decoded weights have the spread of a trained matrix. A tensor's bytes depend on the seed and its
name only. What the model writes means nothing; how fast it writes does.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pnrt.container.layout import TensorInfo
from pnrt.container.writer import TensorPlan, write_gguf
from pnrt.demo import TEMPLATE
from pnrt.errors import FormatError
from pnrt.formats import Format
from pnrt.models.presets import Blueprint
from pnrt.text.merging import ALPHABET

# bytes drawn and written at a time
CHUNK = 1 << 22


def synthesize(
    paper: Blueprint,
    path: str | Path,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write a model of random blocks; the file appears under its name only when it is complete.

    Args:
        paper: shapes and formats.
        path: the file to write.
        progress: called with ("writing", MiB done, MiB in all).
    Raises: FileError where it cannot be written.
    """
    plans = [
        TensorPlan(t.name, t.shape, t.format.type_id, t.nbytes, lambda t=t: _data(t, seed))
        for t in paper.tensors.values()
    ]

    def tell(done: int, total: int) -> None:
        if progress:
            progress("writing", done >> 20, total >> 20)

    write_gguf(path, paper.entries + vocabulary_keys(paper), plans, progress=tell)


def vocabulary_keys(paper: Blueprint) -> list[tuple[str, str, object]]:
    """Metadata of a byte-level vocabulary of the preset's size: texts of one, two, three bytes.

    Every text can be written with it, and every token but the control ones is the merge of two
    before it.
    """
    spec = paper.vocabulary
    size, control = spec["size"], spec["control"]
    # a space begins words: the bytes most texts are made of come first
    first = sorted(ALPHABET, key=lambda c: (not ("a" <= c <= "z" or c == ALPHABET[32]), c))
    pairs = itertools.product(first, first)
    triples = (((a, b), c) for a, b, c in itertools.product(first, first, first))
    longer = itertools.chain(pairs, ((a + b, c) for (a, b), c in triples))
    merges = list(itertools.islice(longer, control - len(ALPHABET)))
    tokens = [*ALPHABET, *(a + b for a, b in merges)]
    named = {spec["bos"]: "<|endoftext|>", spec["eos"] - 1: "<|im_start|>"}
    named[spec["eos"]] = "<|im_end|>"
    tokens += [named.get(i, f"<|reserved_{i}|>") for i in range(control, size)]
    return [
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", spec["pre"]),
        ("tokenizer.ggml.tokens", "array[string]", tokens),
        ("tokenizer.ggml.token_type", "array[int32]", [1] * control + [3] * (size - control)),
        ("tokenizer.ggml.merges", "array[string]", [f"{a} {b}" for a, b in merges]),
        ("tokenizer.ggml.bos_token_id", "uint32", spec["bos"]),
        ("tokenizer.ggml.eos_token_id", "uint32", spec["eos"]),
        ("tokenizer.ggml.padding_token_id", "uint32", spec["padding"]),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.chat_template", "string", TEMPLATE),
    ]


def _data(info: TensorInfo, seed: int) -> Iterator[np.ndarray]:
    """The bytes of one tensor, a few megabytes at a time."""
    draw = np.random.Generator(
        np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(info.name.encode())]))
    )
    if info.format.name == "f32":
        yield _vector(info, draw).astype("<f4")
        return
    # the last product sees normed input of size one: logits of a spread near three
    spread = (3.0 if info.name == "output.weight" else 1.0) * info.columns**-0.5
    fields = scales(info.format, spread)
    blocks = info.nbytes // info.format.nbytes
    step = CHUNK // info.format.nbytes
    for start in range(0, blocks, step):
        yield random_blocks(info.format, min(step, blocks - start), draw, fields)


def _vector(info: TensorInfo, draw: np.random.Generator) -> np.ndarray:
    """A float tensor with the magnitudes trained models have."""
    name, shape = info.name, info.shape
    if name.endswith("ssm_a"):
        return -draw.uniform(1, 16, shape)
    if name.endswith("ssm_dt.bias"):
        # softplus of it is a step between 0.001 and 0.1
        return np.log(np.expm1(np.exp(draw.uniform(np.log(1e-3), np.log(0.1), shape))))
    noise = draw.standard_normal(shape)
    if "conv1d" in name or name.endswith(".bias"):
        return 0.5 * noise
    return 1 + 0.1 * noise


def random_blocks(
    form: Format, n: int, draw: np.random.Generator, fields: dict[int, float]
) -> np.ndarray:
    """Valid blocks with random codes.

    Args:
        n: how many.
        fields: byte offset of an fp16 field -> its value, see `scales`.
    Returns: [n, S] uint8.
    """
    words = -(-n * form.nbytes // 8)
    raw = draw.integers(0, 1 << 64, words, dtype=np.uint64).view(np.uint8)[: n * form.nbytes]
    if getattr(form, "reserved", 0):
        raw &= _used_bits(form, n)
    blocks = raw.reshape(n, form.nbytes)
    for offset, value in fields.items():
        high, low = divmod(int(np.float16(value).view(np.uint16)), 256)
        blocks[:, offset] = low
        if len(fields) == 1:
            # half of the scales are negative, so that lopsided codes average to nothing
            blocks[:, offset + 1] &= 0x80
            blocks[:, offset + 1] |= high
        else:
            blocks[:, offset + 1] = high
    return blocks


@functools.lru_cache(4)
def _used_bits(form: Format, n: int) -> np.ndarray:
    """Mask of n PN blocks: a scale, then words with bits that must be zero; [n * S] uint8."""
    words = np.full((form.nbytes - 2) // 4, ~form.reserved, "<u4").view(np.uint8)
    return np.tile(np.concatenate([np.full(2, 0xFF, np.uint8), words]), n)


def scales(form: Format, spread: float) -> dict[int, float]:
    """Values for the fp16 fields of a block, so that random codes decode to a spread and mean 0.

    Args: spread – root mean square of the decoded weights.
    Returns: byte offset -> value. Raises: FormatError for formats without fp16 scales.
    """
    if not form.halves:
        raise FormatError(
            f"{form.name}: random blocks cannot be drawn, it has no fp16 scale. Use another format."
        )
    offsets = [offset for offset, _ in form.halves]

    def decode(*values: float) -> np.ndarray:
        draw = np.random.default_rng(0)
        fields = dict(zip(offsets, values, strict=True))
        blocks = random_blocks(form, 512, draw, fields)
        for offset in offsets:
            blocks[:, offset + 1] &= 0x7F
        return form.decode_blocks(blocks).astype(np.float64)

    if len(offsets) == 1:
        return {offsets[0]: spread / float(np.sqrt((decode(1.0) ** 2).mean()))}
    # scale and minimum: the minimum cancels the mean of what the scale makes
    minimum = -float(decode(1.0, 0.0).mean() / decode(0.0, 1.0).mean())
    unit = spread / float(decode(1.0, minimum).std())
    return {offsets[0]: unit, offsets[1]: unit * minimum}
