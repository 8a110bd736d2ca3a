"""A plan as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from server.commands.start_table import attention_kind
from server.engine.device import DTYPES
from server.engine.units import format_bytes, plural
from server.tools.plan import DEFAULT_USERS, Plan, Row
from server.tools.plan_advice import Advice

_SHOWN_TAILS = 3  # modes beside each other in the table of tails


def print_plan(plan: Plan, advice: Sequence[Advice]) -> None:
    """The model, a table of costs for each size of number, the tails, and what else there is to know."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.print(f"Headroom plan for {plan.model}", style="bold cyan")
    grid = Table.grid(padding=(0, 2), pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _facts(plan):
        grid.add_row(label, text)
    console.print(grid)
    console.print()
    for rows, dtypes in _by_size(plan):
        console.print(_costs(plan, rows, dtypes))
    console.print(_tails(plan))
    for note in _notes(plan):
        console.print(note)
    for each in advice:
        console.print(_trouble(plan, each), style="yellow")
        console.print(_changes(each))


def _facts(plan: Plan) -> list[tuple[str, str]]:
    dtype = plan.rows[0].kv_dtype
    weights = format_bytes(plan.parameters * DTYPES[dtype].itemsize)
    own = " (the model's own)" if plan.context == plan.max_context else f" (of {plan.max_context:,})"
    blocks = [f"{format_bytes(rows[0].block_bytes)} in {dtypes}" for rows, dtypes in _by_size(plan)]
    facts = [
        ("model", f"{plan.family}, {plural(plan.layers, 'layer')}, head_dim {plan.head_dim}"),
        ("attention", attention_kind(plan.q_heads, plan.kv_heads)),
        ("weights", f"{_millions(plan.parameters)} parameters, {weights} in {dtype}, beside the cache"),
        ("context", f"{plan.context:,} tokens, prompt and answer together{own}"),
        (
            "a block",
            f"{plural(plan.block_size, 'token')} of one KV head: {', '.join(blocks)}",
        ),
    ]
    pool = plan.rows[0].pool
    if pool is not None and plan.kv_memory is not None:
        each = format_bytes(plan.rows[0].block_bytes)
        facts.append(("pool", f"{format_bytes(plan.kv_memory)}: {pool.blocks:,} blocks of {each} ({dtype})"))
    return facts


def _millions(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.1f} million"


def _by_size(plan: Plan) -> list[tuple[list[Row], str]]:
    """The rows of each size of number, and the dtypes of that size: bfloat16 and float16 cost the same."""
    found: dict[int, dict[str, list[Row]]] = {}
    for row in plan.rows:
        found.setdefault(row.block_bytes, {}).setdefault(row.kv_dtype, []).append(row)
    return [(next(iter(each.values())), " or ".join(each)) for each in found.values()]


def _costs(plan: Plan, rows: Sequence[Row], dtypes: str) -> Table:
    table = _table(f"KV cache in {dtypes}, for users with {plan.context:,} tokens each")
    heads = ["KV\nheads", "bytes\na token", *(_users(memory.users, "\n") for memory in rows[0].memory)]
    if plan.kv_memory is not None:
        heads.append(f"users in\n{format_bytes(plan.kv_memory)}")
    table.add_column("\nmode", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        cells = [row.mode, str(row.kv_heads), f"{row.bytes_per_token:,}"]
        cells += [format_bytes(memory.bytes) for memory in row.memory]
        if row.pool is not None:
            cells.append(f"{row.pool.users:,}")
        short = row.pool is not None and not row.pool.fits
        table.add_row(*cells, _answers(plan, row), style="yellow" if short else None)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _answers(plan: Plan, row: Row) -> str:
    if row.lossy:
        return "lossy"
    return "" if row.kv_heads == plan.kv_heads else "exact"


def _tails(plan: Plan) -> Table:
    dtype = plan.rows[0].kv_dtype
    rows = _extremes([row for row in plan.rows if row.kv_dtype == dtype], plan.kv_heads)
    table = _table(f"Empty slots at the end of a user's cache, on average ({dtype})")
    table.add_column("block size", no_wrap=True)
    for head in ("tokens", f"of {plan.context:,}", *(row.mode for row in rows)):
        table.add_column(head, justify="right", no_wrap=True)
    for index, tail in enumerate(rows[0].tail_waste):
        size = f"{tail.block_size} (planned)" if tail.block_size == plan.block_size else str(tail.block_size)
        share = f"{tail.tokens / plan.context:.2%}"
        sizes = [format_bytes(row.tail_waste[index].bytes) for row in rows]
        table.add_row(size, f"{tail.tokens:g}", share, *sizes)
    return table


def _extremes(rows: Sequence[Row], own: int) -> Sequence[Row]:
    """At most three: the fewest KV heads, the checkpoint's own, the most."""
    if len(rows) <= _SHOWN_TAILS:
        return rows
    ordered = sorted(rows, key=lambda row: row.kv_heads)
    wanted = [ordered[0], *(row for row in ordered[1:-1] if row.kv_heads == own), ordered[-1]]
    return [row for row in rows if row in wanted]


def _notes(plan: Plan) -> list[str]:
    notes = []
    if any(row.lossy for row in plan.rows):
        notes.append(
            "lossy: fewer KV heads than the checkpoint has, so the answers change; "
            "`headroom compare` measures by how much."
        )
    if any(not row.lossy and row.kv_heads != plan.kv_heads for row in plan.rows):
        notes.append("exact: more KV heads by repetition; the answers are the checkpoint's.")
    for window in plan.sliding_window:
        notes.append(
            f"sliding window: {window.layers} of {plan.layers} layers read only the last {window.tokens:,} "
            "tokens. It saves no bytes yet: a sequence keeps all its blocks until it ends."
        )
    most = max((row.pool.users for row in plan.rows if row.pool is not None), default=0)
    at_once = DEFAULT_USERS[-1]
    if max(most, plan.asked_users) > at_once:
        notes.append(f"serve runs {at_once} sequences at once unless --max-num-seqs says more.")
    return notes


def _trouble(plan: Plan, advice: Advice) -> str:
    assert plan.kv_memory is not None
    needs = "needs" if advice.users == 1 else "need"
    return (
        f"\n{advice.mode} in {advice.kv_dtype} does not fit: {_users(advice.users)} with {plan.context:,} "
        f"tokens {needs} {format_bytes(advice.bytes_needed)}, and there are {format_bytes(plan.kv_memory)}. "
        "Any one of these makes it fit:"
    )


def _changes(advice: Advice) -> Table:
    grid = Table.grid(padding=(0, 2), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for change in advice.changes:
        grid.add_row(f"  {change.flag} {change.value}", change.effect)
    return grid


def _users(count: int, between: str = " ") -> str:
    return f"{count:,}{between}user{'' if count == 1 else 's'}"
