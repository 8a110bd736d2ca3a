"""What was built, in numbers and reasons: for the start table, the model list and the checks of requests."""

from __future__ import annotations

from dataclasses import dataclass

from cache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class VariantFacts:
    """One attention mode: canonical name, heads, cache bytes of a token, and what the pool holds of it.

    `tokens_that_fit` counts tokens of one sequence in the whole pool; `max_len` is the longest prompt +
    output of one choice: the smaller of the context and the pool. `head_map` is what makes the KV heads
    (native, repeat, or a lossy mode's kind), `weight_bytes` what it owns beside the checkpoint's weights, and
    `identity` names its numbers: caches of different ones never mix.
    """

    name: str
    kv_heads: int
    group: int  # query heads that read one KV head
    bytes_per_token: int
    tokens_that_fit: int
    full_length_users: float  # tokens_that_fit / max_len, 0 if not even one block fits
    max_len: int
    lossy: bool
    head_map: str
    identity: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Everything about an engine that never changes while it runs. Sizes in bytes, lengths in tokens."""

    family: str
    fingerprint: str
    num_layers: int
    q_heads: int
    kv_heads: int
    group: int
    head_dim: int
    vocab_rows: int
    eos_ids: frozenset[int]  # of config.json; the tokenizer and generation_config may add more
    weight_bytes: int  # of the checkpoint and of what head maps own, each held once
    weight_kind: str  # none (in `dtype`), int8 or int4
    parameters: int  # numbers in the checkpoint's weights
    device: str
    dtype: str
    dtype_reason: str
    layout: KVLayout
    kv_dtype: str
    pool_bytes: int  # of the blocks; the arena holds one more, for padding writes
    pool_reason: str
    pool_audit: str  # who confirms its size
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
    speculate: str = "off"  # where drafts come from

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoint's own weights, without what head maps own."""
        return self.weight_bytes - sum(variant.weight_bytes for variant in self.variants)

    @property
    def bits_per_weight(self) -> float:
        """Of the checkpoint's own, scales and norms included."""
        return 8 * self.checkpoint_bytes / self.parameters
