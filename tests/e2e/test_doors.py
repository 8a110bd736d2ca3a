"""The doors of a real server: keys and their caches, names, deadlines, priorities, killed clients."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.engines import on_batches
from tests.support.server import RunningServer, Served, inside, running
from tests.support.sse import read_stream

C = "/v1/completions"
LONG = {"prompt": "abcdefgh " * 4, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 4}
ONE, TWO = {"authorization": "Bearer key-one"}, {"authorization": "Bearer key-two"}
# Streams one answer, says so once it has begun, and sleeps: a client whose process ends without a word.
KILLED = """
import json, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = sys.argv[4].encode()
head = f"POST /v1/completions HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer key-one\\r\\n"
head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
clients = [socket.create_connection((host, port)) for _ in range(count)]
for client in clients:
    client.sendall(head.encode() + body)
for client in clients:
    client.recv(100)
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(tiny_served: Path) -> Iterator[RunningServer]:
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--api-key", "key-one", "--api-key", "key-two")
    with running(tiny_served, *flags) as server:
        server.http.headers.update(ONE)
        yield server


def cached(server: Served, body: dict[str, Any], headers: dict[str, str]) -> int:
    usage = server.http.post(C, json=body, headers=headers).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["kv_cache"]["cached_tokens"]
    return int(usage["kv_cache"]["cached_tokens"])


def test_two_keys_share_no_prefix(server: RunningServer) -> None:
    """What a key or a salt left in the cache answers that key and that salt alone."""
    body = {"prompt": "a long enough prompt, of more than two blocks of the cache", "max_tokens": 1}
    first = [cached(server, body, ONE), cached(server, body, ONE)]
    assert first[0] == 0 and first[1] >= 16
    assert [cached(server, body, TWO), cached(server, body, TWO)] == first
    salted = {**body, "cache_salt": "s"}
    assert [cached(server, salted, ONE), cached(server, salted, ONE)] == first
    assert cached(server, {**body, "cache_salt": "t"}, ONE) == 0
    assert cached(server, salted, TWO) == 0
    assert [cached(server, body, ONE), cached(server, body, TWO)] == [first[1]] * 2


def test_keys_cover_everything_but_health(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in ("/", "/v1/models", "/v1/kv", "/v1/kv/blocks", "/metrics", "/version", "/openapi.json"):
            assert stranger.get(path).status_code == 401, path
        assert stranger.post(C, json=SHORT).status_code == 401
        assert stranger.options(C, headers={"origin": "https://a.example"}).status_code == 401


def test_no_origin_is_let_in_unless_named(server: RunningServer) -> None:
    page = {"origin": "https://a.example", "access-control-request-method": "POST"}
    for reply in (server.http.options(C, headers=page), server.http.post(C, json=SHORT, headers=page)):
        assert not [name for name in reply.headers if name.startswith("access-control")]
    assert server.http.options(C, headers=page).status_code == 405


def test_names_through_the_openai_client(server: RunningServer) -> None:
    client = server.openai(api_key="key-two", default_headers={"X-Request-Id": "trace-7"})
    raw = client.completions.with_raw_response.create(model=None, **SHORT_OPENAI)
    assert raw.headers["x-request-id"] == "trace-7"
    assert raw.parse().id.startswith("cmpl-")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=None, **{**SHORT_OPENAI, "temperature": 9})
    assert refused.value.request_id == "trace-7"


SHORT_OPENAI: dict[str, Any] = {"prompt": "abc", "max_tokens": 3, "temperature": 0}


def answer(server: Served, **fields: Any) -> str:
    reply = server.http.post(C, json={**SHORT, **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_killed_clients_leave_nothing(server: RunningServer) -> None:
    """kill -9 of a process with ten streams and ten whole answers open, twice."""
    right = answer(server)
    port = server.url.rpartition(":")[2]
    for stream in (True, False):
        body = json.dumps({**LONG, "stream": stream, "max_tokens": 5 if not stream else 400})
        command = [sys.executable, "-c", KILLED, "127.0.0.1", port, "10", body]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline() == b"begun\n"
        client.send_signal(signal.SIGKILL)
        client.wait()
        client.stdin.close()
        client.stdout.close()
        server.wait_idle(5.0)
        assert server.http.get("/health").json()["running"] == 0
        assert answer(server) == right
    server.kv(check=True)


def test_half_open_connections(server: RunningServer) -> None:
    """Forty that say nothing, a part of a head, of a body, or close their end: nobody else notices."""
    right = answer(server)
    body = json.dumps(LONG).encode()
    head = f"POST {C} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-one\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    parts = [b"", b"POST /v1", head.encode(), head.encode() + body[:10]]
    port = int(server.url.rpartition(":")[2])
    clients = []
    for part in parts * 10:
        clients.append(socket.create_connection(("127.0.0.1", port)))
        clients[-1].sendall(part)
    assert [answer(server) for _ in range(5)] == [right] * 5
    whole = socket.create_connection(("127.0.0.1", port))
    whole.sendall(head.encode() + body)
    whole.shutdown(socket.SHUT_WR)
    clients.append(whole)
    server.wait_idle(5.0)
    for client in clients:
        client.close()
    assert answer(server) == right


@pytest.fixture(scope="module")
def hurried(tiny_served: Path) -> Iterator[RunningServer]:
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--request-timeout", "0.4", "--max-num-seqs", "4")
    with running(tiny_served, *flags) as server:
        yield server


def test_a_deadline_frees_the_blocks(hurried: RunningServer) -> None:
    """Four that run, begun as streams or not, and many that wait: all end at their time, and the next is
    served. 256 choices of 400 tokens, four at a time, take far more than 0.4 s."""
    much = {**LONG, "n": 64}
    outcomes: list[tuple[int, str | None]] = []

    def ask(stream: bool) -> None:
        with hurried.http.stream("POST", C, json={**much, "stream": stream}) as reply:
            if reply.status_code == 200 and stream:
                lines = reply.iter_lines()
                error = read_events(lines)
                outcomes.append((200, error))
                return
            reply.read()
        outcomes.append((reply.status_code, reply.json()["error"]["code"]))

    begin = time.monotonic()
    threads = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 5
    assert {code for _, code in outcomes} == {"deadline_exceeded"}
    assert {status for status, _ in outcomes} == {200, 504}
    assert hurried.wait_idle(2.0) < 2.0
    assert hurried.http.post(C, json=SHORT).status_code == 200
    hurried.kv(check=True)


def read_events(lines: Iterator[str]) -> str | None:
    """The code of the error that ends a stream of several choices."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    error = json.loads(data[-2])["error"]
    return str(error["code"])


@pytest.fixture(scope="module")
def narrow(tiny_served: Path) -> Iterator[Served]:
    with inside(tiny_served, max_queued=4, max_num_seqs=1) as server:
        yield server


def in_background(ask: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def wait_until_waiting(server: Served, count: int) -> None:
    deadline = time.monotonic() + 30
    while int(server.http.get("/health").json()["waiting"]) < count:
        assert time.monotonic() < deadline, f"{count} requests do not wait"
        time.sleep(0.002)


def test_priority_over_http(narrow: Served) -> None:
    """One runs, four wait; a fifth is refused whatever its number; then they run by theirs, lowest first."""
    everybody = threading.Event()
    steps: list[tuple[int, int]] = []  # tokens that ran, and of the sequence by then

    def hook(batch: Any) -> None:
        steps.append((len(batch.ids), int(batch.meta.host_seq_len[0])))
        if len(steps) > 3:  # the first tokens of the one that runs; the rest when the others are there
            everybody.wait(60)

    on_batches(narrow.engine, hook)
    with narrow.http.stream("POST", C, json={**LONG, "stream": True}) as running_one:
        lines = running_one.iter_lines()
        next(lines)
        threads = []
        for place, priority in enumerate([3, 0, -5, 3]):
            body = {**SHORT, "prompt": [5] * (100 + place), "priority": priority}

            def ask(body: dict[str, Any] = body) -> None:
                assert narrow.http.post(C, json=body).status_code == 200

            threads.append(in_background(ask))
            wait_until_waiting(narrow, place + 1)
        refused = narrow.http.post(C, json={**SHORT, "priority": -(2**31)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        everybody.set()
        rest = read_stream(lines)
    assert rest.done and rest.finish == "length"
    for thread in threads:
        thread.join()
    assert [length - 100 for count, length in steps[1:] if count > 1] == [2, 1, 0, 3]
