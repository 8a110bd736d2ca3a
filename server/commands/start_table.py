"""What a server says of itself before it listens."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from server import __version__
from server.engine.facts import EngineFacts
from server.engine.units import format_bytes

_WIDTH = 110  # where standard output is no terminal and so has no width of its own


def print_start_table(name: str, facts: EngineFacts, warnings: tuple[str, ...]) -> None:
    """One short table on standard output: the model, what its cache costs, and what computes it."""
    tty = sys.stdout.isatty()
    console = Console(width=None if tty else _WIDTH, highlight=False, emoji=False, markup=False)
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(name, facts):
        table.add_row(label, text)
    console.print(f"Headroom {__version__}", style="bold cyan")
    console.print(table)
    for warning in (*facts.warnings, *warnings):
        console.print(f"warning: {warning}", style="yellow")


def attention_kind(q_heads: int, kv_heads: int) -> str:
    """MHA, GQA or MQA, with what makes it so."""
    kind = "MHA" if kv_heads == q_heads else "MQA" if kv_heads == 1 else "GQA"
    group = q_heads // kv_heads
    readers = "1 query head reads" if group == 1 else f"{group} query heads read"
    heads = "1 KV head" if kv_heads == 1 else f"{kv_heads} KV heads"
    return f"{kind}, {q_heads} query heads and {heads}: {readers} each"


def _rows(name: str, facts: EngineFacts) -> list[tuple[str, str]]:
    first = facts.variants[0]
    mha = first.bytes_per_token * first.group
    users = f"{first.full_length_users:,.1f}".removesuffix(".0")
    full = f"{users} user{'' if users == '1' else 's'} at the full {first.max_len:,} tokens"
    if facts.clamped_from is not None:
        full += f" (the model's own {facts.clamped_from:,} do not fit; see --kv-memory)"
    return [
        ("model", f"{name} ({facts.family}, {facts.num_layers} layers, head_dim {facts.head_dim})"),
        ("attention", attention_kind(facts.q_heads, first.kv_heads)),
        (
            "weights",
            f"{format_bytes(facts.weight_bytes)} on {facts.device}, {facts.dtype} ({facts.dtype_reason})",
        ),
        (
            "pool",
            f"{format_bytes(facts.pool_bytes)} ({facts.pool_reason}): {facts.total_blocks:,} blocks "
            f"of {format_bytes(facts.block_bytes)}, each {facts.block_size} tokens of one KV head",
        ),
        ("a token", f"{format_bytes(first.bytes_per_token)} of cache; MHA would take {format_bytes(mha)}"),
        ("fits", f"{first.tokens_that_fit:,} tokens = {full}"),
        ("backends", f"attention {facts.attention_backend} ({facts.attention_reason})"),
        ("", f"linear {facts.linear_backend} ({facts.linear_reason})"),
    ]
