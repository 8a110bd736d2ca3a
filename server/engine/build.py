"""From a folder and a few options to an engine that can run, with the facts a user is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model.heads import Variant
from server.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may turn; `auto` and None are resolved by `build_engine`, once.

    `device`: auto, cpu or cuda. `dtype`: auto, bfloat16, float16 or float32 (weights and cache).
    `kv_memory` in bytes, or `kv_fraction` (0, 1] of what is free (CUDA); at most one of them.
    `variants` are the attention modes to serve, the checkpoint's own if empty.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_memory: int | None = None
    kv_fraction: float | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    prefix_cache: bool = True
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True, slots=True)
class VariantFacts:
    """One attention mode: canonical name, heads, cache bytes of a token, and what the pool holds of it (tokens).

    `max_len` is the longest prompt + output of one choice: the smaller of the context and the pool.
    """

    name: str
    kv_heads: int
    group: int  # query heads that read one KV head
    bytes_per_token: int
    tokens_that_fit: int
    full_length_users: float  # tokens_that_fit / max_len
    max_len: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was built, for the start table, `/v1/models` and the checks of requests."""

    family: str
    fingerprint: str
    num_layers: int
    q_heads: int
    kv_heads: int
    group: int
    head_dim: int
    vocab_rows: int
    eos_ids: frozenset[int]  # of config.json; the tokenizer and generation_config may add more
    bos_id: int | None
    weight_bytes: int
    device: str
    dtype: str
    dtype_reason: str
    kv_dtype: str
    pool_bytes: int
    pool_reason: str
    total_blocks: int
    block_size: int
    block_bytes: int
    max_position_embeddings: int
    max_model_len: int
    clamped_from: int | None  # the context before the pool clamped it
    max_num_seqs: int
    max_batch_tokens: int
    attention_backend: str
    attention_reason: str
    linear_backend: str
    linear_reason: str
    variants: tuple[VariantFacts, ...]  # the first is the default
    warnings: tuple[str, ...] = ()


def build_engine(options: EngineOptions, model_folder: Path) -> tuple[Engine, EngineFacts]:
    """Load the checkpoint in `model_folder`, size the pool, and join the rooms.

    Raises ModelError (checkpoint) or ConfigError (options); both carry one line for the user.
    """
    raise NotImplementedError
