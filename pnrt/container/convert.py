"""From cyb's `.model` to GGUF.

Weights are decoded and written in a format GGUF has (k-quants keep their bytes). For qwen2 and
qwen3, whose rows mean the same in both containers, names, configuration and vocabulary are
translated too. Other architectures keep their own names: how their rows would have to be permuted
is not written in the file, and a guess would give fluent nonsense.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from pnrt.container.cyb_model import CybModel
from pnrt.container.gguf import TensorInfo, TensorPlan, write_gguf
from pnrt.container.layout import FORK_ONLY, why_not_gguf
from pnrt.container.writer import check_target
from pnrt.errors import FileError, FormatError
from pnrt.formats import FORMATS, Format

TRANSLATED = ("qwen2", "qwen3")
# key of the `.model`'s [architecture] -> key behind "ARCH." and its type
KEYS = {
    "num_hidden_layers": ("block_count", "uint32"),
    "max_position_embeddings": ("context_length", "uint32"),
    "hidden_size": ("embedding_length", "uint32"),
    "intermediate_size": ("feed_forward_length", "uint32"),
    "num_attention_heads": ("attention.head_count", "uint32"),
    "num_key_value_heads": ("attention.head_count_kv", "uint32"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", "float32"),
    "rope_theta": ("rope.freq_base", "float32"),
    "vocab_size": ("vocab_size", "uint32"),
}
STEP = 1 << 22
NORMAL, CONTROL = 1, 3


def convert_model(
    file: CybModel,
    path: str | Path,
    target: str = "f32",
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Write a `.model` file as GGUF.

    Args:
        target: format of the matrices that are no k-quants; one that does not divide K, and every
            vector, becomes f32.
    Returns: per tensor {"name", "to", "source", "target"}.
    Raises: FileError, FormatError (a ternary scale nobody has decided, weights out of range).
    """
    if target not in FORMATS or FORMATS[target].type_id is None or not FORMATS[target].weight:
        names = [n for n, f in FORMATS.items() if f.type_id is not None and f.weight]
        raise FormatError(
            f"{path}: --to {target}: GGUF holds {', '.join(names)}. Choose one of these."
            + why_not_gguf(target)
        )
    check_target(Path(path), Path(file.path))
    architecture = file.metadata.get("config.model_type")
    known = architecture in TRANSLATED
    names = _names(file, architecture) if known else {name: name for name in file.tensors}
    metadata = [("general.architecture", "string", architecture if known else "cyb")]
    metadata.append(("general.name", "string", str(file.metadata.get("cyb.name", ""))))
    metadata += [(f"cyb.{name}", "string", body) for name, body in _texts(file, known)]
    if known:
        metadata += _config(file, architecture) + _vocabulary(file, architecture)
    if target in FORK_ONLY:
        # a reader of PN weights wants to know
        metadata.append(("pnrt.rotation.version", "uint32", 1))
        metadata.append(("pnrt.rotation.type", "string", "none"))
    # a scale is folded into the tensor it belongs to
    kept = [i for i in file.tensors.values() if i.name not in file.scales.values()]
    plans, rows = [], []
    for info in kept:
        form = _target(file, info, FORMATS[target])
        plans.append(
            TensorPlan(
                names[info.name], info.shape, form.type_id,
                info.rows * form.row_bytes(info.columns),
                lambda info=info, form=form: _pieces(file, info, form),
            )
        )  # fmt: skip
        rows.append(
            {
                "name": info.name,
                "to": names[info.name],
                "source": info.type_name,
                "target": form.name,
            }
        )
    write_gguf(path, metadata, plans, progress=progress)
    return rows


def _target(file: CybModel, info: TensorInfo, wanted: Format) -> Format:
    if info.format is None:
        # raises with what is known
        file.rows(info.name)
    if info.format.type_id is not None:
        return info.format
    fits = len(info.shape) > 1 and info.columns % wanted.block == 0
    return wanted if fits else FORMATS["f32"]


def _pieces(file: CybModel, info: TensorInfo, form: Format) -> Iterator:
    if form is info.format:
        yield file.rows(info.name)
        return
    step = max(1, STEP // info.columns)
    for start in range(0, info.rows, step):
        values = file.values(info.name, start, start + step)
        try:
            yield form.quantize(values)
        except FormatError as error:
            raise FormatError(f"{file.path}: {info.name} from row {start}: {error}") from None


def _names(file: CybModel, architecture: str) -> dict[str, str]:
    """The GGUF names of all tensors; FileError for one that has none."""
    import gguf

    layers = file.metadata.get("config.architecture.num_hidden_layers")
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(kind, layers if type(layers) is int else 0)
    names = {}
    for name in file.tensors:
        if name in file.scales.values():
            continue
        names[name] = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if names[name] is None:
            raise FileError(
                f"{file.path}: tensor {name}: {architecture} has no such tensor in GGUF; known "
                "are the usual Hugging Face names. Report the file, or rename the tensor."
            )
    return names


def _config(file: CybModel, architecture: str) -> list[tuple]:
    entries = []
    for key, (name, kind) in KEYS.items():
        value = file.metadata.get(f"config.architecture.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            entries.append((f"{architecture}.{name}", kind, value))
    head = file.metadata.get("config.architecture.head_dim")
    if type(head) is int:
        for name in ("key_length", "value_length"):
            entries.append((f"{architecture}.attention.{name}", "uint32", head))
    return entries


def _vocabulary(file: CybModel, architecture: str) -> list[tuple]:
    """Tokens, their kinds, merges and ends, if the file has a vocabulary."""
    if "vocab" not in file.sections:
        return []
    table = file.toml("vocab")
    tokens = _ordered(file, table, "tokens")
    merges = [" ".join(pair) for pair in _ordered(file, table, "merges", pairs=True)]
    kinds = [CONTROL if t.startswith("<|") and t.endswith("|>") else NORMAL for t in tokens]
    ends = file.metadata.get("config.tokenizer.eos_token_ids")
    first = [("tokenizer.ggml.eos_token_id", "uint32", ends[0])] if ends else []
    return [
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", "qwen2"),
        ("tokenizer.ggml.tokens", "array[string]", tokens),
        ("tokenizer.ggml.token_type", "array[int32]", kinds),
        ("tokenizer.ggml.merges", "array[string]", merges),
        *first,
    ]


def _ordered(file: CybModel, table: dict, name: str, pairs: bool = False) -> list:
    """The values of a table whose keys are 0, 1, 2, ...; FileError if it is not like that."""
    entries = table.get(name, {})
    numbers = range(len(entries)) if isinstance(entries, dict) else range(1)
    for i in numbers:
        value = entries.get(str(i)) if isinstance(entries, dict) else None
        texts = value if pairs and isinstance(value, list) and len(value) == 2 else [value]
        if len(texts) != 1 + pairs or not all(isinstance(text, str) for text in texts):
            raise FileError(
                f"{file.path}: section vocab: entry {i} of {name} is {value!r}; numbers run from 0 "
                f"without a gap to {'pairs of texts' if pairs else 'texts'}. "
                "Import the source model again."
            )
    return [entries[str(i)] for i in numbers]


def _texts(file: CybModel, translated: bool) -> list[tuple[str, str]]:
    """Sections to carry along: all, or without those that were translated."""
    done = ("tensors", "vocab", "config") if translated else ("tensors",)
    return [(name, body) for name, body in file.sections.items() if name not in done]
