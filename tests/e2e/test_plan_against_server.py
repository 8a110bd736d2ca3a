"""A plan's numbers, held to a server that runs with them: the same bytes, and its users fit, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.fetch import resolve_config
from server.tools.plan import PlanOptions, Row, make_plan
from tests.support.server import Served, inside

USERS = 5
PROMPT = 6


def planned(
    folder: Path, mode: str, dtype: str, context: int, block: int, kv_memory: int | None = None
) -> Row:
    options = PlanOptions((mode,), context, USERS, kv_memory, (dtype,), block)
    (row,) = make_plan("tiny", resolve_config(str(folder)), options).rows
    return row


def ask(server: Served, users: int, context: int) -> dict[str, Any]:
    """So many users at once, in one request: prompts of their own, and answers that fill the context."""
    prompts = [[20 + user, *range(100, 99 + PROMPT)] for user in range(users)]
    body = {"prompt": prompts, "max_tokens": context - PROMPT, "temperature": 0, "ignore_eos": True}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["usage"]["completion_tokens"] == users * (context - PROMPT)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    ("mode", "dtype", "context", "block"),
    [
        ("native", "float32", 48, 16),
        ("native", "bfloat16", 60, 16),
        ("mha", "float32", 40, 8),
        ("mqa", "float32", 48, 16),
        ("mqa", "bfloat16", 50, 8),
    ],
)
def test_users_that_fit_fit_and_one_more_does_not(
    tiny_served: Path, mode: str, dtype: str, context: int, block: int
) -> None:
    memory = planned(tiny_served, mode, dtype, context, block).memory[-1]
    assert memory.users == USERS
    row = planned(tiny_served, mode, dtype, context, block, memory.bytes)
    assert row.pool is not None
    assert (row.pool.users, row.pool.fits, row.pool.bytes) == (USERS, True, memory.bytes)
    with inside(
        tiny_served, attention=(mode,), head_map="mean", dtype=dtype, kv_memory=memory.bytes, block_size=block
    ) as server:
        kv = server.kv()
        (variant,) = kv["variants"]
        pool, audit = kv["pool"], kv["audit"]
        assert (pool["bytes"], pool["blocks"]) == (row.pool.bytes, row.pool.blocks)
        assert (pool["block_bytes"], pool["block_size"], pool["dtype"]) == (row.block_bytes, block, dtype)
        assert (variant["kv_heads"], variant["bytes_per_token"]) == (row.kv_heads, row.bytes_per_token)
        assert audit["predicted_bytes"] == audit["arena_bytes"] == row.pool.arena_bytes

        usage = ask(server, USERS, context)["usage"]["kv_cache"]
        assert server.preemptions() == 0
        assert usage["bytes_peak"] == memory.bytes == kv["pool"]["bytes"], (
            "all at once, every block of the pool"
        )
        assert usage["blocks"] == USERS * row.blocks_per_user
        ask(server, USERS + 1, context)
        assert server.preemptions() > 0


def test_a_pool_s_longest_context_is_the_server_s(tiny_served: Path) -> None:
    """One user, and memory for less than the model's 512 tokens: the server clamps to what the plan says."""
    memory = 100_000
    options = PlanOptions(("native", "mha"), users=1, kv_memory=memory, dtypes=("float32",))
    plan = make_plan("tiny", resolve_config(str(tiny_served)), options)
    with inside(tiny_served, attention=("native", "mha"), kv_memory=memory) as server:
        models = server.http.get("/v1/models").json()["data"]
    longest = {model["id"].partition("@")[2] or "native": model["max_model_len"] for model in models}
    assert longest == {row.mode: row.pool.longest_context for row in plan.rows if row.pool is not None}
    assert 0 < longest["mha"] < longest["native"] < plan.max_context
