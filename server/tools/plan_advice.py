"""What to change when the users of a plan do not fit in its memory: each change alone makes them fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from model.modes import Heads, parse_mode, valid_modes
from server.engine.device import DTYPES
from server.engine.units import exact_size, format_bytes
from server.tools.plan import Plan, Row, layout_of


@dataclass(frozen=True, slots=True)
class Change:
    """A flag of `plan` with a value that fits, and what it means."""

    flag: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A mode and dtype whose users need `bytes_needed`, which is more than there is."""

    mode: str
    kv_dtype: str
    users: int
    bytes_needed: int
    changes: tuple[Change, ...]


def advise(config: ModelConfig, plan: Plan, attention: Sequence[str]) -> tuple[Advice, ...]:
    """One for each mode of `attention` (native if empty) that does not fit in the plan's first dtype."""
    heads = Heads(config.num_heads, config.num_kv_heads)
    wanted = {parse_mode(text, heads).name for text in attention or ("native",)}
    first = plan.rows[0].kv_dtype
    rows = [row for row in plan.rows if row.kv_dtype == first and row.mode in wanted]
    return tuple(_advice(config, plan, row) for row in rows if row.pool is not None and not row.pool.fits)


def _advice(config: ModelConfig, plan: Plan, row: Row) -> Advice:
    need = _need(config, plan, row.kv_heads, row.kv_dtype)
    changes = [*_less(plan, row), *_other_mode(config, plan, row), *_other_dtype(config, plan, row)]
    changes.append(
        Change("--kv-memory", exact_size(need), f"{format_bytes(need)}, the least that holds them")
    )
    return Advice(row.mode, row.kv_dtype, plan.asked_users, need, tuple(changes))


def _less(plan: Plan, row: Row) -> list[Change]:
    """A shorter context, or fewer users."""
    assert row.pool is not None
    found = []
    if row.pool.longest_context > 0:
        who = "one user" if plan.asked_users == 1 else f"each of {plan.asked_users:,} users"
        found.append(
            Change("--context", str(row.pool.longest_context), f"the most tokens that {who} can have")
        )
    if row.pool.users > 0:
        found.append(Change("--users", str(row.pool.users), f"as many as fit with {plan.context:,} tokens"))
    return found


def _other_mode(config: ModelConfig, plan: Plan, row: Row) -> list[Change]:
    """The mode with the most KV heads that fits; it has fewer than this one, which does not."""
    modes = valid_modes(Heads(config.num_heads, config.num_kv_heads))
    fits = [mode for mode in modes if _fits(config, plan, mode.kv_heads, row.kv_dtype)]
    if not fits:
        return []
    mode = fits[-1]
    need = format_bytes(_need(config, plan, mode.kv_heads, row.kv_dtype))
    answers = "lossy" if mode.lossy else "the same answers"
    return [Change("--attention", mode.name, f"{need}, {answers}")]


def _other_dtype(config: ModelConfig, plan: Plan, row: Row) -> list[Change]:
    """A dtype with fewer bytes that fits."""
    size = DTYPES[row.kv_dtype].itemsize
    for name, dtype in DTYPES.items():
        if dtype.itemsize < size and _fits(config, plan, row.kv_heads, name):
            need = _need(config, plan, row.kv_heads, name)
            return [Change("--dtype", name, f"{format_bytes(need)}, of weights and cache")]
    return []


def _need(config: ModelConfig, plan: Plan, kv_heads: int, dtype: str) -> int:
    """Bytes of the asked users' blocks."""
    return plan.asked_users * layout_of(config, dtype, plan.block_size).sequence_bytes(plan.context, kv_heads)


def _fits(config: ModelConfig, plan: Plan, kv_heads: int, dtype: str) -> bool:
    layout, memory = layout_of(config, dtype, plan.block_size), plan.kv_memory
    assert memory is not None
    return layout.sequences_that_fit(layout.total_blocks(memory), plan.context, kv_heads) >= plan.asked_users
