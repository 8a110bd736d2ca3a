"""What a checkpoint's KV cache costs in every attention mode, from its config alone: no weights, no device.

Every byte comes from the allocator's own arithmetic (`cache/layout.py`), so that a server started with these
numbers counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.layout import KVLayout
from model.config import ModelConfig
from model.expected import parameter_count
from model.modes import Heads, Mode, parse_modes, valid_modes
from server.engine.device import DTYPES
from server.engine.errors import ConfigError
from server.engine.layout import cache_layout
from server.engine.options import EngineOptions

TAIL_BLOCK_SIZES = (8, 16, 32, 64, 128)
DEFAULT_USERS = (1, 8, EngineOptions().max_num_seqs)  # alone, a few, and as many as `serve` runs at once


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`attention` empty: every valid mode; `dtypes` empty: all. `context` (tokens of prompt and answer
    together) None: the model's own. `users` None: a few numbers of them. `kv_memory` in bytes, or None."""

    attention: tuple[str, ...] = ()
    context: int | None = None
    users: int | None = None
    kv_memory: int | None = None
    dtypes: tuple[str, ...] = ()
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the blocks of that many users, each with the whole context."""

    users: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """What `kv_memory` holds: whole blocks, of which `bytes`; the arena has one block more, for padding.

    `users` fit at the planned context; `longest_context` is what the asked users can have instead, at most
    the model's own (0: not one block each); `fits`: whether they fit at the planned one.
    """

    blocks: int
    bytes: int
    arena_bytes: int
    users: int
    longest_context: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Tail:
    """Empty slots expected in the last block of a sequence, in tokens and in bytes over all KV heads."""

    block_size: int
    tokens: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One attention mode in one KV dtype; `block_bytes` is one physical block, which serves one KV head."""

    mode: str
    kv_heads: int
    group: int
    lossy: bool
    kv_dtype: str
    bytes_per_token: int
    block_bytes: int
    blocks_per_user: int
    memory: tuple[Memory, ...]
    pool: Pool | None
    tail_waste: tuple[Tail, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window of `tokens` in so many layers. It saves no bytes of cache yet."""

    tokens: int
    layers: int
    saves_bytes: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows by dtype, the checkpoint's own first, then by KV heads or in the order asked for.

    `asked_users` is what `Pool.fits` is about; `parameters` counts the weights, which need room beside it.
    """

    model: str
    family: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    max_context: int
    sliding_window: tuple[Window, ...]
    context: int
    block_size: int
    asked_users: int
    kv_memory: int | None
    rows: tuple[Row, ...]


def make_plan(model: str, config: ModelConfig, options: PlanOptions) -> Plan:
    """The plan of a checkpoint. Raises ModelError (a mode) or ConfigError (a size), one line each."""
    heads = Heads(config.num_heads, config.num_kv_heads)
    modes = parse_modes(options.attention, heads) if options.attention else valid_modes(heads)
    context = _context(config, options.context)
    if options.kv_memory is not None and options.kv_memory < 1:
        raise ConfigError(f"--kv-memory {options.kv_memory}: must be more than 0 bytes")
    asked = options.users or DEFAULT_USERS[0]
    return Plan(
        model=model,
        family=config.family,
        layers=config.num_layers,
        q_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        parameters=parameter_count(config),
        max_context=config.max_position_embeddings,
        sliding_window=_windows(config),
        context=context,
        block_size=options.block_size,
        asked_users=asked,
        kv_memory=options.kv_memory,
        rows=tuple(
            _row(config, mode, dtype, context, asked, options)
            for dtype in _dtypes(config, options.dtypes)
            for mode in modes
        ),
    )


def _context(config: ModelConfig, asked: int | None) -> int:
    longest = config.max_position_embeddings
    if asked is not None and asked > longest:
        raise ConfigError(
            f"--context {asked} exceeds the {longest} positions the model was made for "
            f"(max_position_embeddings); give at most {longest}"
        )
    return longest if asked is None else asked


def _dtypes(config: ModelConfig, asked: Sequence[str]) -> list[str]:
    """Those asked for, or all; the checkpoint's own (float32 if it names none) first."""
    names = list(asked or DTYPES)
    own = str(config.torch_dtype).removeprefix("torch.") if config.torch_dtype else "float32"
    return sorted(names, key=lambda name: name != own)


def _windows(config: ModelConfig) -> tuple[Window, ...]:
    sizes = [window for window in config.windows if window is not None]
    return tuple(Window(size, sizes.count(size)) for size in sorted(set(sizes)))


def layout_of(config: ModelConfig, dtype: str, block_size: int) -> KVLayout:
    """The cache's layout as `build_engine` makes it, of a dtype by name."""
    return cache_layout(config, block_size, DTYPES[dtype])


def _row(config: ModelConfig, mode: Mode, dtype: str, context: int, asked: int, options: PlanOptions) -> Row:
    layout, heads = layout_of(config, dtype, options.block_size), mode.kv_heads
    users = DEFAULT_USERS if options.users is None else sorted({1, options.users})
    memory, pool = options.kv_memory, None
    if memory is not None:
        pool = _pool(layout, heads, context, asked, memory, config.max_position_embeddings)
    return Row(
        mode=mode.name,
        kv_heads=heads,
        group=config.num_heads // heads,
        lossy=mode.lossy,
        kv_dtype=dtype,
        bytes_per_token=layout.bytes_per_token(heads),
        block_bytes=layout.block_bytes,
        blocks_per_user=layout.physical_blocks(context, heads),
        memory=tuple(Memory(count, count * layout.sequence_bytes(context, heads)) for count in users),
        pool=pool,
        tail_waste=tuple(
            _tail(layout_of(config, dtype, size), heads)
            for size in sorted({*TAIL_BLOCK_SIZES, options.block_size})
        ),
    )


def _tail(layout: KVLayout, heads: int) -> Tail:
    empty = layout.expected_tail_bytes(heads)
    return Tail(layout.block_size, empty / layout.bytes_per_token(heads), empty)


def _pool(layout: KVLayout, heads: int, context: int, asked: int, memory: int, most: int) -> Pool:
    total = layout.total_blocks(memory)
    users = layout.sequences_that_fit(total, context, heads)
    return Pool(
        blocks=total,
        bytes=total * layout.block_bytes,
        arena_bytes=layout.arena_bytes(total),
        users=users,
        longest_context=min(most, layout.tokens_that_fit(total, heads * asked)),
        fits=users >= asked,
    )
