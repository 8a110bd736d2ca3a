"""How large the pool is, and how long a sequence it can hold: the rules, and the words for a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.layout import KVLayout
from model.modes import Mode, counted
from server.engine.errors import ConfigError
from server.engine.units import exact_size, format_bytes, plural

DEFAULT_POOL = 2 << 30  # bytes, at most, on a CPU
DEFAULT_FRACTION = 0.9  # of what a GPU has left


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Bytes for blocks, and why that many."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Context:
    """The longest prompt + output in tokens: of the first mode, of each mode, and what was wanted."""

    length: int
    clamped_from: int | None
    by_mode: dict[str, int]
    warnings: tuple[str, ...]


def size_pool(kv_memory: int | None, kv_fraction: float | None, free: int, on_gpu: bool) -> PoolSize:
    """The pool's bytes. `free`: what the device has left for it. Raises ConfigError."""
    if kv_memory is not None and kv_fraction is not None:
        raise ConfigError("--kv-memory and --kv-fraction exclude each other; give one of them")
    if kv_memory is not None:
        if kv_memory <= 0:
            raise ConfigError(f"--kv-memory {kv_memory}: must be more than 0 bytes")
        return PoolSize(kv_memory, "as asked")
    if kv_fraction is not None or on_gpu:
        fraction = DEFAULT_FRACTION if kv_fraction is None else kv_fraction
        if not 0 < fraction <= 1:
            raise ConfigError(f"--kv-fraction {fraction}: must be above 0 and at most 1")
        left = "free after the weights and the largest step" if on_gpu else "free memory"
        return PoolSize(int(free * fraction), f"{fraction:g} of the {format_bytes(free)} {left}")
    if free // 4 < DEFAULT_POOL:
        return PoolSize(free // 4, f"a quarter of the {format_bytes(free)} of free memory")
    return PoolSize(DEFAULT_POOL, "the default on a CPU")


def fit_context(
    layout: KVLayout, pool: PoolSize, modes: Sequence[Mode], asked: int | None, model_limit: int
) -> Context:
    """How long a sequence may be: `asked` (--max-model-len) or the model's own limit, if the pool holds it.

    What was asked must fit the first mode; what was not is cut down to what fits. Each other mode has its
    own limit, and a warning where that is less than the first one's. Raises ConfigError.
    """
    total = layout.total_blocks(pool.nbytes)
    first = modes[0]
    fits = layout.tokens_that_fit(total, first.kv_heads)
    if fits == 0:
        need = first.kv_heads * layout.block_bytes
        raise ConfigError(
            f"the KV pool of {format_bytes(pool.nbytes)} ({pool.reason}) cannot hold a single block of "
            f"{layout.block_size} tokens, which takes {format_bytes(need)}; "
            f"give at least --kv-memory {exact_size(need)}, or a smaller --block-size"
        )
    if asked is not None:
        _check_asked(asked, model_limit, fits, layout, pool, first)
    wanted = model_limit if asked is None else asked
    length = min(wanted, fits)
    by_mode = {mode.name: min(wanted, layout.tokens_that_fit(total, mode.kv_heads)) for mode in modes}
    warnings = [
        _narrower(mode, by_mode[mode.name], length, layout) for mode in modes if by_mode[mode.name] < length
    ]
    return Context(length, wanted if length < wanted else None, by_mode, tuple(warnings))


def _narrower(mode: Mode, fits: int, length: int, layout: KVLayout) -> str:
    """What a user is told of a mode whose KV heads leave it a shorter context than the first mode's."""
    need = layout.physical_blocks(length, mode.kv_heads) * layout.block_bytes
    holds = (
        f"the pool holds {plural(fits, 'token')} of one sequence, not {length}"
        if fits
        else f"the pool cannot hold a single block of {plural(layout.block_size, 'token')}, and "
        "requests are refused"
    )
    enough = exact_size(need)
    return f"{mode.name} takes {counted(mode.kv_heads)}: {holds}; raise --kv-memory to {enough} for all"


def _check_asked(
    asked: int, model_limit: int, fits: int, layout: KVLayout, pool: PoolSize, mode: Mode
) -> None:
    if asked < 2:
        raise ConfigError(f"--max-model-len {asked}: must be at least 2 (one token in, one out)")
    if asked > model_limit:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the {model_limit} positions the model was made for "
            f"(max_position_embeddings); give at most {model_limit}"
        )
    if asked > fits:
        need = layout.physical_blocks(asked, mode.kv_heads) * layout.block_bytes
        raise ConfigError(
            f"--max-model-len {asked} needs a KV pool of {format_bytes(need)} and there are "
            f"{format_bytes(pool.nbytes)} ({pool.reason}); the largest that fits is {fits}: lower "
            f"--max-model-len, or raise --kv-memory to {exact_size(need)}"
        )
