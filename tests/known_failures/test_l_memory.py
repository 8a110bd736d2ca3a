"""L6, L7: what requests leave behind, and what a client costs that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import memory, open_files
from tests.support.server import RunningServer, running
from tests.support.sockets import connected, exchange, port_of, post
from tests.support.standing import Known, assert_stands

C = "/v1/completions"


@pytest.fixture(scope="module")
def started(rand: Path) -> Iterator[RunningServer]:
    """A pool of 2 MiB: all of it is touched during the warm-up, so that its pages do not look like a leak."""
    with running(rand, "--dtype", "float32", "--kv-memory", "2MiB") as server:
        yield server


@pytest.fixture
def server(started: RunningServer, rand_known: Known) -> Iterator[RunningServer]:
    yield started
    assert_stands(started, rand_known)


def one_of_a_thousand(number: int) -> dict[str, Any]:
    """Unique prompts; a fifth want log-probabilities, a fifth are refused, a fifth (long) will be left."""
    prompt = [number % 49000, number // 49000, *range(number % 40)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    match number % 5:
        case 1:
            return body | {"logprobs": 5}
        case 2:
            return body | {"temperature": -1} if number % 2 else body | {"prompt": [7] * 300}
        case 3:
            return body | {"max_tokens": 200, "ignore_eos": True, "stream": bool(number % 2)}
        case _:
            return body


async def ask(http: httpx.AsyncClient, number: int) -> None:
    body = one_of_a_thousand(number)
    if number % 5 == 3:
        with contextlib.suppress(httpx.TimeoutException):
            await http.post(C, json=body, timeout=0.03)
        return
    reply = await http.post(C, json=body)
    assert reply.status_code == (400 if number % 5 == 2 else 200), reply.text


def grown(server: RunningServer, warm_up: int, samples: int, apart: int) -> list[int]:
    """Bytes of the server's memory after the warm-up and after each `apart` requests more."""

    async def load(first: int, count: int) -> None:
        async with server.async_http() as http:
            for at in range(first, first + count, 10):
                await asyncio.gather(
                    *(ask(http, number) for number in range(at, min(at + 10, first + count)))
                )

    asyncio.run(load(0, warm_up))
    server.wait_idle(5.0)
    found = [memory(server.process.pid)]
    for i in range(samples):
        asyncio.run(load(warm_up + i * apart, apart))
        server.wait_idle(5.0)
        found.append(memory(server.process.pid))
    return found


def series(server: RunningServer) -> set[str]:
    """The names and labels of all metrics."""
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(
    ("warm_up", "samples", "apart"),
    [(300, 2, 100), pytest.param(400, 5, 200, marks=pytest.mark.slow)],
    ids=["200 after 300", "1000 after 400"],
)
def test_l6_memory_does_not_grow_with_requests(
    server: RunningServer, warm_up: int, samples: int, apart: int
) -> None:
    """Less than 20 KB a request after warm-up, in RAM or swapped out; no label names a request."""
    names = series(server)
    found = grown(server, warm_up, samples, apart)
    each = (found[-1] - found[0]) / (samples * apart)
    print(f"{[round(size / 2**20, 1) for size in found]} MiB: {each / 1024:.1f} KiB a request")
    assert each < 20_000
    assert series(server) == names
    kv = server.kv(check=True)
    assert kv["requests"] == [] and kv["states"]["live"]["blocks"] == 0
    # Files are those of the server and of this test's client: connections are not kept.
    assert open_files(server.process.pid) < 60


# ---- L7: slow readers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looped(chain: Any) -> Iterator[RunningServer]:
    """Hello world for ever, with room for 4,000 tokens of eleven streams and more."""
    flags = ("--dtype", "float32", "--kv-memory", "128MiB", "--max-num-seqs", "32")
    with running(chain((19556, 905, 19556)), *flags) as server:
        yield server


LONG = {"prompt": [19556], "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
MEASURED = LONG | {"max_tokens": 150}


async def read_slowly(server: RunningServer, leave: asyncio.Event) -> None:
    """Fifty bytes a second, as `curl --limit-rate 50` does."""
    async with connected(server, post(C, LONG), limit=4096) as (reader, _):
        while not leave.is_set():
            if not await reader.read(50):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leave.wait(), 1.0)


async def read_fast(server: RunningServer, leave: asyncio.Event) -> None:
    async with connected(server, post(C, LONG)) as (reader, _):
        while not leave.is_set() and await reader.read(2**16):
            pass


async def pace_beside(server: RunningServer, others: list[Any]) -> float:
    """Tokens a second of a client that reads, beside others that are told to leave when it is done."""
    leave = asyncio.Event()
    tasks = [asyncio.create_task(other(server, leave)) for other in others]
    await asyncio.sleep(0.3)
    answer = await exchange(server, post(C, MEASURED))
    leave.set()
    await asyncio.gather(*tasks)
    assert b"[DONE]" in answer.body[-40:]
    return 149 / (answer.arrivals[-1] - answer.arrivals[0])


def deaf(server: RunningServer, **fields: Any) -> socket.socket:
    """A client that asks and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port_of(server)))
    client.sendall(post(C, LONG | fields))
    return client


def test_l7_slow_readers_slow_nobody_else(looped: RunningServer) -> None:
    """Ten that read fifty bytes a second and one that never does, against eleven that read all: a client that
    reads gets its tokens as fast. Then they are gone, and so are their blocks."""
    before, files = memory(looped.process.pid), open_files(looped.process.pid)
    fast, slow = [], []
    for _ in range(2):  # in turn, as other work on the machine comes and goes
        fast.append(asyncio.run(pace_beside(looped, [read_fast] * 11)))
        looped.wait_idle(5.0)
        with deaf(looped):
            slow.append(asyncio.run(pace_beside(looped, [read_slowly] * 10)))
        looped.wait_idle(2.0)
    print(f"tokens/s beside fast readers {fast}, beside slow ones {slow}")
    assert max(slow) > 0.25 * max(fast), "fifty bytes a second are a quarter of a token"
    assert memory(looped.process.pid) - before < 100 * 2**20
    assert open_files(looped.process.pid) <= files + 2
    assert_stands(looped, Known([19556], " worldHello", 2))


def test_l7_what_waits_for_a_deaf_client_is_bounded(looped: RunningServer) -> None:
    """Two that never read eight answers each with log-probabilities, more than the sockets between hold:
    others are served meanwhile, and what the server keeps for them has an end."""
    before = memory(looped.process.pid)
    peak = 0
    with deaf(looped, n=8, logprobs=5), deaf(looped, n=8, logprobs=5):
        end = time.monotonic() + 4
        while time.monotonic() < end:
            peak = max(peak, memory(looped.process.pid) - before)
            reply = looped.http.post(C, json=MEASURED | {"max_tokens": 1, "stream": False}, timeout=5)
            assert reply.status_code == 200
    print(f"{peak / 2**20:.0f} MiB for two deaf clients")
    assert peak < 2 * 60 * 2**20
    looped.wait_idle(2.0)
    assert_stands(looped, Known([19556], " worldHello", 2))
    assert "Traceback" not in looped.log()
