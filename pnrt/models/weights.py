"""Which tensors an architecture is made of, and whether a file has them in the right shape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pnrt.errors import ModelError
from pnrt.models.config import Config

if TYPE_CHECKING:
    from pnrt.container.gguf import GGUFFile, TensorInfo

FLOATS = ("f32", "f16", "bf16")
_BLOCK = re.compile(r"blk\.(\d+)\.")


class Need(NamedTuple):
    """One tensor of an architecture: row-major shape; may be absent; floats only (exact)."""

    shape: tuple[int, ...]
    optional: bool = False
    exact: bool = False


def expected_tensors(config: Config) -> dict[str, Need]:
    """List every tensor the trunk of this model reads, in the order of the forward pass.

    Args:
        config: Config.
    Returns:
        GGUF tensor name -> Need. Blocks of multi-token prediction are not part of it.
    """
    D, V = config.d_model, config.vocab_size
    needs = {"token_embd.weight": Need((V, D))}
    if config.architecture == "llama":
        needs["rope_freqs.weight"] = Need((config.rope_dim // 2,), optional=True, exact=True)
    for il in range(config.n_layers):
        layer = {"attn_norm.weight": _vector(D)}
        layer |= _recurrent_block(config) if config.recurrent[il] else _attention_block(config, il)
        layer |= _feed_forward(config, il)
        needs |= {f"blk.{il}.{name}": need for name, need in _scaled(layer).items()}
    needs["output_norm.weight"] = _vector(D)
    needs["output.weight"] = Need((V, D), optional=True)
    if config.architecture == "qwen2":
        needs["output.bias"] = _vector(V, optional=True)
    return needs


def _scaled(layer: dict[str, Need]) -> dict[str, Need]:
    """The tensors of a block, each product's matrix followed by its optional scale."""
    out = {}
    for name, need in layer.items():
        out[name] = need
        if len(need.shape) == 2 and not need.exact:
            out[f"{name.removesuffix('.weight')}.scale"] = _vector(1, optional=True)
    return out


def _vector(n: int, optional: bool = False) -> Need:
    return Need((n,), optional, exact=True)


def _attention_block(config: Config, il: int) -> dict[str, Need]:
    D, E = config.d_model, config.head_dim
    q, kv = config.n_heads[il] * E, config.n_kv_heads[il] * E
    # qwen35: each head's query rows are followed by the rows of its gate
    rows = 2 * q if config.architecture == "qwen35" else q
    needs = {}
    for part, n in (("q", rows), ("k", kv), ("v", kv)):
        needs[f"attn_{part}.weight"] = Need((n, D))
        needs[f"attn_{part}.bias"] = _vector(n, optional=True)
    if config.architecture in ("qwen3", "qwen35"):
        needs["attn_q_norm.weight"] = _vector(E)
        needs["attn_k_norm.weight"] = _vector(E)
    needs["attn_output.weight"] = Need((D, q))
    if config.architecture == "llama":
        needs["attn_output.bias"] = _vector(D, optional=True)
    return needs


def _recurrent_block(config: Config) -> dict[str, Need]:
    D, delta = config.d_model, config.delta
    return {
        "attn_qkv.weight": Need((delta.channels, D)),
        "attn_gate.weight": Need((delta.inner, D)),
        "ssm_conv1d.weight": Need((delta.channels, delta.conv_kernel), exact=True),
        "ssm_alpha.weight": Need((delta.value_heads, D)),
        "ssm_beta.weight": Need((delta.value_heads, D)),
        "ssm_dt.bias": _vector(delta.value_heads),
        "ssm_a": _vector(delta.value_heads),
        "ssm_norm.weight": _vector(delta.state_size),
        "ssm_out.weight": Need((D, delta.inner)),
    }


def _feed_forward(config: Config, il: int) -> dict[str, Need]:
    D, F = config.d_model, config.d_ff[il]
    norm = "post_attention_norm" if config.architecture == "qwen35" else "ffn_norm"
    needs = {f"{norm}.weight": _vector(D)}
    for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        needs[f"ffn_{part}.weight"] = Need(shape)
        if config.architecture == "llama":
            needs[f"ffn_{part}.bias"] = _vector(shape[0], optional=True)
    return needs


def check_weights(file: GGUFFile, config: Config) -> dict[str, TensorInfo]:
    """Find every tensor of the model and check its shape and format.

    Args:
        file: GGUFFile.
        config: Config – of the same file.
    Returns:
        GGUF tensor name -> TensorInfo. Optional tensors that the file lacks have no entry,
        except "output.weight": with tied embeddings that is the entry of "token_embd.weight"
        (compare .name).
    Raises:
        ModelError: a tensor is missing, has another shape or an unusable format, or the trunk
            holds one this architecture has no use for (leaving it out would change the result).
    """
    found = {}
    needs = expected_tensors(config)
    for name, need in needs.items():
        info = file.tensors.get(name)
        if info is not None:
            _check(file, info, need)
            found[name] = info
        elif not need.optional:
            raise ModelError(
                f"{file.path}: tensor {name}: found nothing; needed one of shape "
                f"{list(need.shape)} (architecture {config.architecture}). The file is incomplete "
                "or its keys are wrong: convert or download it again."
            )
    found.setdefault("output.weight", found["token_embd.weight"])
    for name in extra_tensors(file, config):
        block = _BLOCK.match(name)
        if name.startswith("rope_") or (block and int(block[1]) < config.n_layers):
            raise ModelError(
                f"{file.path}: tensor {name}: found in the file; {config.architecture} has no such "
                "tensor, and leaving it out would change the result. Use a model pnrt knows fully."
            )
    return found


def extra_tensors(file: GGUFFile, config: Config) -> list[str]:
    """Names of the file's tensors that the trunk does not read (skipped blocks included)."""
    needs = expected_tensors(config)
    return [name for name in file.tensors if name not in needs]


def mtp_tensors(file: GGUFFile, config: Config) -> list[str]:
    """Names of the tensors that belong to skipped blocks of multi-token prediction."""
    blocks = ((name, _BLOCK.match(name)) for name in file.tensors)
    end = config.n_layers + config.mtp_layers
    return [name for name, block in blocks if block and config.n_layers <= int(block[1]) < end]


def _check(file: GGUFFile, info: TensorInfo, need: Need) -> None:
    where = f"{file.path}: tensor {info.name}"
    if _squeeze(info.shape) != _squeeze(need.shape):
        raise ModelError(
            f"{where}: found shape {list(info.shape)}; needed {list(need.shape)}, rows first, by "
            "the file's keys. Keys and tensors contradict each other: convert or download it again."
        )
    if info.format is None:
        raise ModelError(
            f"{where}: found type {info.type_name}; pnrt has no format of this id. "
            f"{file.advice(info)}"
        )
    if need.exact and info.format.name not in FLOATS:
        raise ModelError(
            f"{where}: found format {info.format.name}; needed one of {', '.join(FLOATS)}. "
            "Norms, biases and small tensors are not quantized: convert the file again."
        )


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop leading ones: a file may store a vector as a matrix of one row."""
    shape = tuple(shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
