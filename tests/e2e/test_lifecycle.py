"""Clients that leave, and a server that is told to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import checkpoints
from tests.support.server import RunningServer, running
from tests.support.sse import Streamed, read_stream

FREED_WITHIN = 2.0  # seconds after the client is gone
LOOP = [19556, 905, 19556]  # "Hello world" for ever
LONG = {"prompt": [19556], "temperature": 0, "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Path:
    folder = checkpoints.make_chain(tmp_path_factory.mktemp("chain-loop"), LOOP)
    return checkpoints.add_tokenizer(folder, smol)


@pytest.fixture(scope="module")
def server(chain: Path) -> Iterator[RunningServer]:
    with running(chain, "--dtype", "float32", "--kv-memory", "256MiB") as server:
        yield server


def leave_streaming(server: RunningServer) -> None:
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
        lines = reply.iter_lines()
        for _ in range(6):  # three chunks, with the empty lines between them
            next(lines)


def leave_waiting(server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=LONG, timeout=0.5)


def leave_with_copies(server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=LONG | {"n": 4, "temperature": 1}, timeout=0.5)


@pytest.mark.parametrize("leave", [leave_streaming, leave_waiting, leave_with_copies])
def test_client_that_leaves_frees_its_blocks(
    server: RunningServer, leave: Callable[[RunningServer], None]
) -> None:
    leave(server)
    waited = server.wait_idle(FREED_WITHIN)
    print(f"blocks free {waited:.2f} s after the client left")
    reply = server.http.post("/v1/completions", json=LONG | {"max_tokens": 3})
    assert reply.json()["choices"][0]["text"] == " world" + "Hello world"
    assert server.wait_idle(FREED_WITHIN) < FREED_WITHIN
    server.kv(check=True)


def test_twenty_that_leave(server: RunningServer) -> None:
    """One after the other, then all is as before."""
    for _ in range(20):
        leave_streaming(server)
    server.wait_idle(FREED_WITHIN)
    server.kv(check=True)


def test_one_that_leaves_does_not_disturb_the_others(server: RunningServer) -> None:
    answers: list[str] = []

    def stay() -> None:
        reply = server.http.post("/v1/completions", json=LONG | {"max_tokens": 200}, timeout=60)
        answers.append(reply.json()["choices"][0]["text"])

    threads = [threading.Thread(target=stay) for _ in range(3)]
    for thread in threads:
        thread.start()
    leave_streaming(server)
    for thread in threads:
        thread.join()
    assert answers == [" world" + "Hello world" * 99 + "Hello"] * 3


def start_stream(
    server: RunningServer, body: dict[str, Any], started: threading.Event, out: list[Streamed]
) -> None:
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}, timeout=60) as reply:

        def lines() -> Iterator[str]:
            for line in reply.iter_lines():
                started.set()
                yield line

        out.append(read_stream(lines()))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_lets_streams_finish(chain: Path, sign: signal.Signals) -> None:
    """New work is refused at once, streams in flight end as they would have, the exit code is 0."""
    with running(chain, "--dtype", "float32", "--kv-memory", "64MiB", "--grace", "30") as server:
        body, answers = LONG | {"max_tokens": 400}, list[Streamed]()
        started = [threading.Event() for _ in range(4)]
        threads = [threading.Thread(target=start_stream, args=(server, body, s, answers)) for s in started]
        for thread in threads:
            thread.start()
        assert all(event.wait(20) for event in started)
        server.process.send_signal(sign)
        time.sleep(0.1)
        assert refused(server)
        for thread in threads:
            thread.join(30)
        assert [(a.finish, a.done, a.text) for a in answers] == [("length", True, " worldHello" * 200)] * 4
        assert server.wait() == 0
        assert "Traceback" not in server.log()


def refused(server: RunningServer) -> bool:
    """Whether a new request gets a 503 or no connection at all."""
    try:
        reply = httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 1}, trust_env=False)
    except httpx.ConnectError:
        return True
    return reply.status_code == 503 and "error" in reply.json()


def test_grace_ends(chain: Path) -> None:
    """What is still running when the grace is over ends with an event that says so; nothing hangs."""
    with running(chain, "--dtype", "float32", "--kv-memory", "256MiB", "--grace", "0.5") as server:
        answers: list[Streamed] = []
        started = threading.Event()
        thread = threading.Thread(target=start_stream, args=(server, LONG, started, answers))
        thread.start()
        assert started.wait(20)
        server.terminate()
        assert server.wait(10) == 0
        thread.join(10)
        (answer,) = answers
        assert answer.error is not None or answer.finish not in (None, "stop", "length")
        assert answer.done
