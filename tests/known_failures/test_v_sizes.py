"""V4: absurd sizes are refused at once, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.refusals import (
    CHATS,
    COMPLETIONS,
    GOOD,
    MESSAGES,
    check_error,
    raw,
    requests_run,
)
from tests.support.scripted import EOS, HELLO, NEWLINE, WORLD
from tests.support.server import Served
from tests.support.standing import Known

Serves = Callable[..., Served]


@pytest.fixture
def server(served: Serves, chain: Callable[..., Path]) -> Served:
    return served(chain((NEWLINE, HELLO, WORLD, EOS)), Known([HELLO], " world", 4), kv_memory=16 << 20)


# ---- V4: absurd sizes -------------------------------------------------------------------------------------

ABSURD: dict[str, dict[str, Any]] = {
    "n 0": {"n": 0},
    "n -1": {"n": -1},
    "n 129": {"n": 129},
    "n a million": {"n": 10**6},
    "n 2^64": {"n": 2**64},
    "best_of a million": {"best_of": 10**6},
    "max_tokens": {"max_tokens": 10**18},
    "max_tokens 2^64": {"max_tokens": 2**64},
    "min_tokens": {"min_tokens": 10**18},
    "17 stops": {"stop": [f"stop {i}" for i in range(17)]},
    "many stops": {"stop": [f"stop {i}" for i in range(10**5)]},
    "a large stop": {"stop": "x" * 10**6},
    "a large stop of 16": {"stop": ["a", "x" * 10**6]},
    "many stop ids": {"stop_token_ids": list(range(10**5))},
    "a large user name for a model": {"model": "m" * 10**6},
    "a large salt": {"cache_salt": "s" * 10**6},
}
ABSURD_COMPLETIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 10**9},
    "logprobs -1": {"logprobs": -1},
    "many prompts": {"prompt": ["a"] * 10**5},
    "many lists": {"prompt": [[HELLO]] * 10**5},
    "n and prompts": {"prompt": [[HELLO]] * 3, "n": 43},
    "a million ids": {"prompt": [HELLO] * 10**6},
}
ABSURD_CHATS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 10**9},
    "many messages": {"messages": MESSAGES * 20_000},
    "max_completion_tokens": {"max_completion_tokens": 10**18},
}


def absurd() -> list[tuple[str, str, dict[str, Any]]]:
    both = [(path, name, fields) for path in GOOD for name, fields in ABSURD.items()]
    own = [(COMPLETIONS, ABSURD_COMPLETIONS), (CHATS, ABSURD_CHATS)]
    return both + [(path, name, fields) for path, cases in own for name, fields in cases.items()]


def test_v4_absurd_sizes_are_refused_at_once(server: Served) -> None:
    before = requests_run(server)
    for path, name, fields in absurd():
        status = 404 if "model" in fields else (400, 413)
        for stream in (False, True):
            body = json.dumps({**GOOD[path], **fields, "stream": stream}).encode()
            took = []
            while not took or (min(took) >= 1 and len(took) < 3):  # a busy machine may stop us for a while
                started = time.perf_counter()
                reply = raw(server, path, body)
                took.append(time.perf_counter() - started)
            check_error(reply, status)
            assert min(took) < 1, f"{name} took {min(took):.1f} s"
    assert requests_run(server) == before


def test_v4_the_limits_are_the_last_that_is_allowed(server: Served) -> None:
    for fields in ({"n": 128}, {"stop": [f"stop {i}" for i in range(16)]}, {"stop": "x" * 1024}):
        reply = server.http.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "max_tokens": 1, **fields})
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == fields.get("n", 1)


def resident() -> int:
    """Bytes of this process in memory; the server is a thread of it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def send_large(server: Served, content: Any) -> None:
    """A body that is refused: with 413, or by a connection that closes before all of it was sent.

    Nothing of the call is left when it returns, so that what stays in memory is the server's.
    """
    headers = {"content-type": "application/json"}
    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):
        check_error(server.http.post(COMPLETIONS, content=content, headers=headers), 413)


def test_v4_fifty_megabytes_are_refused_and_not_kept(server: Served) -> None:
    body = b'{"prompt":"' + b"x" * (50 << 20) + b'"}'
    parts = [body[i : i + (1 << 20)] for i in range(0, len(body), 1 << 20)]
    grown = []
    for _ in range(4):  # the first time warms up, and memory comes back when it likes
        gc.collect()
        before = resident()
        for content in (body, iter(parts)):  # with its length told, and in chunks
            started = time.perf_counter()
            send_large(server, content)
            assert time.perf_counter() - started < 5
        gc.collect()
        grown.append(resident() - before)
    assert min(grown) < 10 << 20, f"bytes kept: {grown}"
