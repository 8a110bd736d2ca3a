"""What a server says of itself before it listens."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from server import __version__
from server.engine.facts import EngineFacts, VariantFacts
from server.engine.units import format_bytes, plural

_WIDTH = 110  # where standard output is no terminal and so has no width of its own
_MODE_COLUMNS = (
    "mode",
    "KV heads",
    "a token",
    "tokens that fit",
    "full-length users",
    "head map",
    "own weights",
)


def print_start_table(name: str, facts: EngineFacts, warnings: tuple[str, ...]) -> None:
    """On standard output: the model, what its cache costs in each attention mode, and what computes it."""
    tty = sys.stdout.isatty()
    console = Console(width=None if tty else _WIDTH, highlight=False, emoji=False, markup=False)
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(name, facts):
        table.add_row(label, text)
    console.print(f"Headroom {__version__}", style="bold cyan")
    console.print(table)
    if len(facts.variants) > 1:
        console.print()
        console.print(_modes(facts))
    for warning in (*facts.warnings, *warnings):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def attention_kind(q_heads: int, kv_heads: int) -> str:
    """MHA, GQA or MQA, with what makes it so."""
    kind = "MHA" if kv_heads == q_heads else "MQA" if kv_heads == 1 else "GQA"
    group = q_heads // kv_heads
    readers = "1 query head reads" if group == 1 else f"{group} query heads read"
    return f"{kind}, {plural(q_heads, 'query head')} and {plural(kv_heads, 'KV head')}: {readers} each"


def _rows(name: str, facts: EngineFacts) -> list[tuple[str, str]]:
    layers = plural(facts.num_layers, "layer")
    rows = [
        ("model", f"{name} ({facts.family}, {layers}, head_dim {facts.head_dim})"),
        ("attention", _attention(facts)),
        ("weights", _weights(facts)),
        (
            "pool",
            f"{format_bytes(facts.pool_bytes)} ({facts.pool_reason}): {facts.total_blocks:,} blocks "
            f"of {format_bytes(facts.block_bytes)}, each {plural(facts.block_size, 'token')} of one KV head",
        ),
        ("", f"{facts.pool_audit} (padding's block included)"),
    ]
    if len(facts.variants) == 1:
        rows += _only_mode(facts, facts.variants[0])
    elif facts.clamped_from is not None:
        rows.append(("context", f"{facts.variants[0].name}: {facts.max_model_len:,} tokens{_clamped(facts)}"))
    if facts.speculate != "off":
        rows.append(("drafts", f"{facts.speculate}: from each sequence's own text, in steps where they pay"))
    return [
        *rows,
        ("backends", f"attention {facts.attention_backend} ({facts.attention_reason})"),
        ("", f"linear {facts.linear_backend} ({facts.linear_reason})"),
    ]


def _weights(facts: EngineFacts) -> str:
    held = f"{format_bytes(facts.weight_bytes)} on {facts.device}, "
    if facts.weight_kind != "none":
        held += f"{facts.weight_kind} at {facts.bits_per_weight:.2f} bits each with scales; the rest "
    return f"{held}{facts.dtype} ({facts.dtype_reason})"


def _attention(facts: EngineFacts) -> str:
    if len(facts.variants) == 1:
        return attention_kind(facts.q_heads, facts.variants[0].kv_heads)
    return (
        f"{plural(facts.q_heads, 'query head')} and the checkpoint's own "
        f"{plural(facts.kv_heads, 'KV head')}; "
        f"{len(facts.variants)} modes of one copy of the weights, in one pool"
    )


def _only_mode(facts: EngineFacts, mode: VariantFacts) -> list[tuple[str, str]]:
    mha = mode.bytes_per_token * mode.group
    full = f"{_users(mode)} user{'' if _users(mode) == '1' else 's'} at the full {mode.max_len:,} tokens"
    rows = [
        ("a token", f"{format_bytes(mode.bytes_per_token)} of cache; MHA would take {format_bytes(mha)}"),
        ("fits", f"{mode.tokens_that_fit:,} tokens = {full}{_clamped(facts)}"),
    ]
    if mode.head_map != "native":
        rows.insert(0, ("head map", f"{_head_map(mode)}; own weights: {_owns(facts, mode)}"))
    return rows


def _modes(facts: EngineFacts) -> Table:
    """A line for each mode, the default first."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in _MODE_COLUMNS:
        table.add_column(column, justify="left" if column in ("mode", "head map") else "right")
    for mode in facts.variants:
        table.add_row(
            mode.name,
            str(mode.kv_heads),
            format_bytes(mode.bytes_per_token),
            f"{mode.tokens_that_fit:,}",
            f"{_users(mode)} at {mode.max_len:,}",
            _head_map(mode),
            _owns(facts, mode),
        )
    return table


def _users(mode: VariantFacts) -> str:
    return f"{mode.full_length_users:,.1f}".removesuffix(".0")


def _clamped(facts: EngineFacts) -> str:
    if facts.clamped_from is None:
        return ""
    return f" (the model's own {facts.clamped_from:,} do not fit; see --kv-memory)"


def _head_map(mode: VariantFacts) -> str:
    if mode.head_map == "native":
        return "native"
    return f"{mode.head_map}, {'lossy' if mode.lossy else 'exact'}"


def _owns(facts: EngineFacts, mode: VariantFacts) -> str:
    """The weights of a mode beside the checkpoint's."""
    if mode.weight_bytes == 0:
        return "none"
    share = mode.weight_bytes / facts.checkpoint_bytes
    return f"{format_bytes(mode.weight_bytes)} ({share:.1%})"
