"""P5: a client that leaves, in whatever state and manner, frees what ran for it, and disturbs nobody."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import within
from tests.support.scripted import HELLO, NEWLINE, WORLD
from tests.support.server import RunningServer, running
from tests.support.standing import Known, assert_stands

FREED_WITHIN = 2.0  # seconds after the client is gone
LOOP = (HELLO, WORLD, HELLO)  # "Hello world" for ever
C, CC = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [HELLO], "temperature": 0, "max_tokens": 4000, "ignore_eos": True}
KNOWN = Known([HELLO], " worldHello world", 3)


@pytest.fixture(scope="module")
def started(chain: Callable[..., Path]) -> Iterator[RunningServer]:
    with running(chain(LOOP, (NEWLINE, HELLO)), "--dtype", "float32", "--kv-memory", "256MiB") as server:
        yield server


@pytest.fixture
def server(started: RunningServer) -> Iterator[RunningServer]:
    yield started
    assert_stands(started, KNOWN, FREED_WITHIN)
    started.kv(check=True)


def leave_streaming(server: RunningServer, path: str = C, **fields: Any) -> None:
    """Goes after three chunks."""
    body = LONG | {"stream": True, **fields}
    if path == CC:
        body["messages"] = [{"role": "user", "content": "x"}]
        del body["prompt"]
    with server.http.stream("POST", path, json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(6):  # three chunks, with the empty lines between them
            next(lines)


def leave_chatting(server: RunningServer) -> None:
    leave_streaming(server, CC)


def leave_waiting(server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(C, json=LONG, timeout=0.5)


def leave_with_copies(server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(C, json=LONG | {"n": 4, "temperature": 1}, timeout=0.5)


def on_a_socket(server: RunningServer, **fields: Any) -> socket.socket:
    """A long stream asked for, by a client whose reading is its own business."""
    body = json.dumps(LONG | {"stream": True} | fields).encode()
    head = f"POST {C} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def leave_in_prefill(server: RunningServer) -> None:
    """Before the first token of a prompt of thirty steps."""
    client = on_a_socket(server, prompt=[HELLO] * 7900, max_tokens=200)
    assert within(5, lambda: server.live_blocks() > 0)
    client.close()


def leave_by_reset(server: RunningServer) -> None:
    client = on_a_socket(server)
    assert client.recv(1000)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def leave_saying_no_more(server: RunningServer) -> None:
    """The client's side is closed, and he reads what still comes to its end, which is soon."""
    client = on_a_socket(server)
    assert client.recv(1000)
    client.shutdown(socket.SHUT_WR)
    client.settimeout(5)
    while client.recv(65536):
        pass
    client.close()


LEAVE = [leave_streaming, leave_chatting, leave_waiting, leave_with_copies, leave_in_prefill, leave_by_reset,
         leave_saying_no_more]  # fmt: skip


@pytest.mark.parametrize("leave", LEAVE)
def test_p5_who_leaves_frees_his_blocks(
    server: RunningServer, leave: Callable[[RunningServer], None]
) -> None:
    leave(server)
    waited = server.wait_idle(FREED_WITHIN)
    print(f"blocks free {waited:.2f} s after the client left")
    assert server.metric("num_requests_running") == 0


def test_p5_twenty_that_leave_and_the_same_prompt_at_once(server: RunningServer) -> None:
    """One after the other, and then an answer like any other, without a pause."""
    for _ in range(20):
        leave_streaming(server)
    reply = server.http.post(C, json=LONG | {"max_tokens": 40})
    assert reply.json()["choices"][0]["text"] == " worldHello" * 20
    server.wait_idle(FREED_WITHIN)
    assert server.metric("num_requests_running") == 0


def test_p5_one_that_leaves_does_not_disturb_the_others(server: RunningServer) -> None:
    answers: list[str] = []

    def stay() -> None:
        reply = server.http.post(C, json=LONG | {"max_tokens": 200}, timeout=60)
        answers.append(reply.json()["choices"][0]["text"])

    threads = [threading.Thread(target=stay) for _ in range(3)]
    for thread in threads:
        thread.start()
    leave_streaming(server)
    for thread in threads:
        thread.join()
    assert answers == [" worldHello" * 100] * 3
