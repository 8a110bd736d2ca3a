"""The cache in numbers, as the API shows it. Bytes and blocks are exact; terms are as docs/cache.md has them.

live = held by an open sequence; cached = held by nobody, known to the prefix index, reclaimable; free =
neither. live + cached + free = total, in physical blocks, each counted once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cache.accounts import Peak
from cache.audit import Audit
from cache.layout import KVLayout


def mha_equivalent(nbytes: int, kv_heads: int, q_heads: int) -> int:
    """Bytes the same blocks would take with a KV head for every query head: bytes * Hq / Hkv."""
    return nbytes * q_heads // kv_heads


def saved_ratio(nbytes: int, mha_bytes: int) -> float:
    """1 - bytes / mha_equivalent; 0 when empty."""
    return 1.0 - nbytes / mha_bytes if mha_bytes else 0.0


@dataclass(frozen=True, slots=True)
class KVUsage:
    """A request's share of the cache at its peak (`usage.kv_cache`): blocks are physical."""

    bytes_per_token: int
    blocks: int
    bytes_peak: int
    bytes_exclusive: int
    tail_waste_bytes: int
    cached_tokens: int
    mha_equivalent_bytes: int
    saved_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def usage(peak: Peak, layout: KVLayout, kv_heads: int, q_heads: int) -> KVUsage:
    """A peak in bytes; `kv_heads` are the variant's, `q_heads` the checkpoint's query heads."""
    bytes_peak = peak.blocks * layout.block_bytes
    bytes_per_token = layout.bytes_per_token(kv_heads)
    mha_bytes = mha_equivalent(bytes_peak, kv_heads, q_heads)
    return KVUsage(
        bytes_per_token=bytes_per_token,
        blocks=peak.blocks,
        bytes_peak=bytes_peak,
        bytes_exclusive=peak.exclusive * layout.block_bytes,
        tail_waste_bytes=bytes_peak - peak.tokens * bytes_per_token,
        cached_tokens=peak.cached_tokens,
        mha_equivalent_bytes=mha_bytes,
        saved_ratio=saved_ratio(bytes_peak, mha_bytes),
    )


@dataclass(frozen=True, slots=True)
class PoolReport:
    """`bytes` = blocks * block_bytes: what sequences can use, the scratch block not counted."""

    bytes: int
    blocks: int
    block_bytes: int
    block_size: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Physical blocks, and their bytes."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class States:
    """Every block is in exactly one state."""

    live: Amount
    cached: Amount
    free: Amount


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One attention mode's live cache; a block shared by several sequences is counted once."""

    name: str
    kv_heads: int
    bytes_per_token: int
    live_tokens: int
    live_blocks: int
    live_bytes: int
    tail_waste_bytes: int
    mha_equivalent_bytes: int
    saved_ratio: float


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request, all its choices: what it holds now (`bytes_held`, of which nobody else holds
    `bytes_exclusive`), and `blocks`, `bytes_peak` and the MHA equivalent at its peak."""

    id: str
    variant: str
    sequences: int
    tokens: int
    bytes_held: int
    bytes_exclusive: int
    tail_waste_bytes: int
    cached_tokens: int
    blocks: int
    bytes_peak: int
    mha_equivalent_bytes: int
    saved_ratio: float


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The whole cache at one moment (`GET /v1/kv`). `requests` are those that hold something or have: who
    still waits for a first step is not among them, so a long queue costs nothing here."""

    pool: PoolReport
    states: States
    tail_waste_bytes: int
    variants: tuple[VariantReport, ...]
    requests: tuple[RequestReport, ...]
    audit: Audit

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Physical blocks `offset`, `offset + 1`, ..., one tuple a column (`GET /v1/kv/blocks`).

    `state` is live, cached or free; `owners` are the ids of the requests that hold the block;
    `variant` and `kv_head` are None for a free block; `tokens` are token slots that hold a token.
    """

    offset: int
    total: int
    state: tuple[str, ...]
    owners: tuple[tuple[str, ...], ...]
    variant: tuple[str | None, ...]
    kv_head: tuple[int | None, ...]
    refcount: tuple[int, ...]
    tokens: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)
