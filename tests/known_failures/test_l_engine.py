"""L4: an engine that fails: who pays for it, who is told, and what `/health` says from then on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients import Told, read_all
from tests.support.engines import on_batches
from tests.support.processes import within
from tests.support.scripted import HELLO, NEWLINE, WORLD, known_of
from tests.support.server import Served, inside
from tests.support.standing import assert_stands

C = "/v1/completions"
LOOP = (HELLO, WORLD, HELLO)
TOKENS = 60


@pytest.fixture
def server(chain: Callable[..., Path]) -> Iterator[Served]:
    """A server of its own for each test: most do not survive."""
    with inside(chain(LOOP, (NEWLINE, HELLO)), max_model_len=512) as server:
        yield server


def five(tokens: int = TOKENS) -> list[tuple[str, dict[str, Any]]]:
    return [
        (C, {"prompt": [HELLO] * (1 + i), "temperature": 0, "max_tokens": tokens, "ignore_eos": True})
        for i in range(5)
    ]


def assert_whole(told: list[Told], tokens: int = TOKENS) -> None:
    for one in told:
        assert (one.stream.text, one.stream.finish) == (" worldHello" * (tokens // 2), "length")
        assert one.error is None and one.stream.done


@pytest.mark.parametrize("at", [0, 1, 7])
def test_l4_a_forward_pass_that_raises_once(server: Served, smol: Path, at: int) -> None:
    """Whoever was in that step goes on; nobody is told, and nothing is lost."""
    calls = [0]

    def once(batch: Any) -> None:
        calls[0] += 1
        if calls[0] == at + 1:
            raise RuntimeError("secret of ours")

    on_batches(server.engine, once)
    assert_whole(read_all(server, five()))
    assert calls[0] > at + 1
    assert_stands(server, known_of(LOOP, tokenizer=smol))


def test_l4_an_admission_that_raises(server: Served, smol: Path) -> None:
    """The third request's admission fails: it gets a 500 at once, the five others their whole answers."""
    manager = server.engine._manager
    open_ = manager.open

    def failing(account: int, chain: Any, *args: Any, **kwargs: Any) -> Any:
        if len(chain) == 100:
            raise RuntimeError("secret of ours")
        return open_(account, chain, *args, **kwargs)

    manager.open = failing
    bad = (C, five()[0][1] | {"prompt": [HELLO] * 100})
    told = read_all(server, [*five()[:2], bad, *five()[2:]])
    refused = told.pop(2)
    assert (refused.status, refused.stream.done) == (500, False)
    assert refused.error is not None and "secret" not in str(refused.error)
    assert refused.at < min(one.at for one in told)
    assert_whole(told)
    assert_stands(server, known_of(LOOP, tokenizer=smol))


def killed(batch: Any) -> None:
    raise SystemExit("no handler of the thread catches this")


def fails(batch: Any) -> None:
    raise RuntimeError("secret of ours")


@pytest.mark.parametrize("kind", [killed, fails], ids=["its thread is killed", "every pass fails"])
def test_l4_a_dead_engine_is_told_to_all_at_once(server: Served, kind: Callable[[Any], None]) -> None:
    """Five streams in flight and one that waits for a whole answer: errors within moments, /health 503 and
    says why, new work is refused with no queue building up, and what needs no engine still answers."""

    def hook(batch: Any) -> None:
        if server.engine.stats().running == 6:  # everybody is in flight
            kind(batch)

    on_batches(server.engine, hook)
    whole: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: whole.append(server.http.post(C, json=five(400)[0][1])))
    waiter.start()
    begin = time.monotonic()
    told = read_all(server, five(400), seconds=20)
    waiter.join(10)
    assert time.monotonic() - begin < 10
    for one in told:
        assert one.error is not None and "secret" not in str(one.error)
        assert one.stream.finish is None and one.stream.done is (one.status == 200)
    assert max(one.at for one in told) - min(one.at for one in told) < 1.0
    assert whole[0].status_code in (500, 503) and "error" in whole[0].json()

    health = server.http.get("/health")
    assert health.status_code == 503 and "secret" not in health.text
    for stream in (False, True):
        for _ in range(20):
            reply = server.http.post(C, json=five()[0][1] | {"stream": stream}, timeout=2)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "engine_dead"
    assert server.http.get("/v1/kv", timeout=2).status_code == 503
    assert server.http.get("/v1/models", timeout=2).status_code == 200
    metrics = server.http.get("/metrics", timeout=2)
    assert metrics.status_code == 200
    assert "headroom:num_requests_waiting 0.0" in metrics.text
    assert "headroom:num_requests_running 0.0" in metrics.text


def test_l4_who_waits_in_the_queue_of_a_dying_engine(chain: Callable[..., Path]) -> None:
    """A sibling: one place, four that wait for it; they are told as soon as the one that runs."""
    with inside(chain(LOOP), max_model_len=512, max_num_seqs=1) as server:
        running = server.engine._runner.run
        steps = [0]

        def dying(batch: Any) -> Any:
            steps[0] += 1
            if steps[0] > 30 and within(5, lambda: server.engine.stats().waiting == 4):
                raise SystemExit("no handler of the thread catches this")
            return running(batch)

        server.engine._runner.run = dying
        told = read_all(server, five(400), seconds=20)
        assert all(one.error is not None for one in told)
        assert max(one.at for one in told) - min(one.at for one in told) < 1.0
        assert server.http.get("/health").status_code == 503
