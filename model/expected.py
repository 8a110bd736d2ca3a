"""Which tensors a config calls for, and whether a checkpoint holds exactly those."""

from __future__ import annotations

import math
from collections.abc import Iterator

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import ModelError

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names (after the layer's prefix) and shapes of one layer's tensors; matrices are `[out, in]`."""
    return dict(_layer_tensors(config))


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if config.attention_bias:
            yield f"self_attn.{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, q)
    if config.o_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    for name, rows, columns in (
        ("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner),
    ):  # fmt: skip
        yield f"mlp.{name}.weight", (rows, columns)
        if config.mlp_bias:
            yield f"mlp.{name}.bias", (rows,)


def parameter_count(config: ModelConfig) -> int:
    """Numbers in all tensors together; a tied lm_head is the embedding and counted once."""
    of_layer = sum(math.prod(shape) for shape in layer_tensors(config).values())
    tables = 1 if config.tie_embeddings else 2
    return of_layer * config.num_layers + tables * config.vocab_size * config.hidden_size + config.hidden_size


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelError for a tensor that is missing, left over, or of another shape than the config says.

    A tied model may hold the embedding, the lm_head or both: as in transformers, one stands for the other.
    """
    table = (config.vocab_size, config.hidden_size)
    expected: dict[str, Shape] = {EMBED: table, NORM: (config.hidden_size,), LM_HEAD: table}
    of_layer = layer_tensors(config)
    for layer in range(config.num_layers):
        expected |= {layer_prefix(layer) + name: shape for name, shape in of_layer.items()}

    held = checkpoint.entries
    missing = [name for name in expected if name not in held]
    if config.tie_embeddings and missing in ([EMBED], [LM_HEAD]):
        missing = []
    if missing:
        raise ModelError(
            f"{_place(checkpoint)}: tensor {missing[0]} is missing{_more(missing)}{_hint(missing, config)}"
        )
    extra = [name for name in held if name not in expected]
    if extra:
        raise ModelError(
            f"{held[extra[0]].file}: tensor {extra[0]} has no place in a {config.family} model of "
            f"{config.num_layers} layers as config.json describes it{_more(extra)}"
        )
    for name, entry in held.items():
        if entry.shape != expected[name]:
            raise ModelError(f"{entry.file}: {_shape_message(name, entry.shape, expected[name], config)}")


def _place(checkpoint: Checkpoint) -> str:
    """The file of a missing tensor if there is only one, else the folder."""
    files = {entry.file for entry in checkpoint.entries.values()}
    return str(files.pop() if len(files) == 1 else checkpoint.folder)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if names[1:] else ""


def _hint(missing: list[str], config: ModelConfig) -> str:
    if missing[0] != LM_HEAD or config.tie_embeddings:
        return ""
    return "; config.json does not say that it is the embedding (tie_word_embeddings is not true)"


def _shape_message(name: str, found: Shape, expected: Shape, config: ModelConfig) -> str:
    message = f"tensor {name} has shape {list(found)}, and config.json asks for {list(expected)}"
    if ".k_proj." not in name and ".v_proj." not in name:
        return message
    heads, rest = divmod(found[0] if found else 0, config.head_dim)
    rows = f"{heads} KV heads" if heads and not rest else "no whole number of KV heads"
    return (
        f"{message}: its rows are {rows} of head_dim {config.head_dim}, "
        f"but num_key_value_heads is {config.num_kv_heads}"
    )
