"""A closed-loop client that measures any server with OpenAI's `/v1/completions`, streamed.

    python -m loadtest.http_bench URL MODEL [--workloads decode1,...] [--seed N] [--json FILE] [--texts FILE]

Prompts are lists of token ids, decoding is greedy, and no answer ends before its last token. A fresh seed for
every round, or the second finds its prompts in the server's prefix cache. The client shares the machine with
the server, so it only notes when bytes came, and reads them once the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from loadtest.bench_rows import Answer, BenchError, Row, row, said, told
from loadtest.bench_work import VOCAB, WARM_UP, Ask, Work, add_flags, asks, works_of
from loadtest.command import parser_of, write_both
from loadtest.stream import StreamError, read_stream

PATH = "/v1/completions"
ANSWER_SECONDS = 1200.0
_END = b"[DONE]"

Pieces = Sequence[tuple[float, bytes]]  # what came, and when it was all there (seconds)


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own; keeps what comes back until it ends."""

    def __init__(self, request: bytes) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Notes the time; the end is known by its mark, wherever the network cut it."""
        self.pieces.append((time.perf_counter(), data))
        if _END in self._tail + data:
            self._finish()
        self._tail = data[-len(_END) :]

    def connection_lost(self, exc: Exception | None) -> None:
        """Whether that was early shows when the pieces are read."""
        self._finish()

    def _finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


def request_bytes(host: str, model: str, ask: Ask) -> bytes:
    """The whole HTTP request."""
    body = {
        "model": model, "prompt": list(ask.prompt), "max_tokens": ask.output, "min_tokens": ask.output,
        "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def send(url: str, model: str, ask: Ask) -> tuple[float, Pieces]:
    """The seconds at which it was sent, and what came. Raises OSError, TimeoutError."""
    place = urlsplit(url)
    request = request_bytes(place.netloc, model, ask)
    started = time.perf_counter()
    transport, exchange = await asyncio.get_running_loop().create_connection(
        lambda: _Exchange(request), place.hostname or "127.0.0.1", place.port or 80
    )
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await exchange.over
    finally:
        transport.abort()
    return started, exchange.pieces


def read(started: float, pieces: Pieces) -> Answer:
    """The answer in what came. Raises StreamError if it is none, or has no end."""
    content = b"".join(data for _, data in pieces)
    head, found, _ = content.partition(b"\r\n\r\n")
    if not found or head.split(b" ", 2)[1] != b"200":
        raise StreamError(f"no answer but {content[:500]!r}")
    chunked = b"transfer-encoding: chunked" in head.lower()
    now = 0.0

    def lines() -> Iterator[bytes]:
        nonlocal now
        for when, line in _lines(pieces, len(head) + 4, chunked):
            now = when
            yield line

    stream = read_stream(lines(), lambda: now, started)
    arrivals = [started + chunk / 1e3 for chunk in stream.chunks]
    return Answer(started, arrivals, stream.output_tokens, text="".join(stream.text))


def _lines(pieces: Pieces, skip: int, chunked: bool) -> Iterator[tuple[float, bytes]]:
    """The lines of a body after `skip` bytes of head, and when each was there; chunks' frames are taken off
    (RFC 9112, 7.1)."""
    raw, line = b"", b""
    for when, data in pieces:
        raw += data
        raw, skip = raw[skip:], max(0, skip - len(raw))
        body, raw = _unframe(raw) if chunked else (raw, b"")
        *whole, line = (line + body).split(b"\n")
        for text in whole:
            yield when, text


def _unframe(raw: bytes) -> tuple[bytes, bytes]:
    """What whole chunks at the start of `raw` hold, and what is left."""
    parts, place = [], 0
    while (end := raw.find(b"\r\n", place)) >= 0:
        size = int(raw[place:end].split(b";")[0], 16)
        if end + size + 4 > len(raw):
            break
        parts.append(raw[end + 2 : end + 2 + size])
        place = end + size + 4
    return b"".join(parts), raw[place:]


async def measure(url: str, model: str, work: Work, given: Sequence[Ask]) -> tuple[Row, list[Answer]]:
    """The workload's figures and answers. Raises BenchError, StreamError, OSError, TimeoutError."""
    free = asyncio.Semaphore(work.concurrency)

    async def one(ask: Ask) -> tuple[float, Pieces]:
        async with free:
            return await send(url, model, ask)

    if work.shared:  # its prefix was read before
        read(*await send(url, model, given[0]))
    begin = time.perf_counter()
    came = await asyncio.gather(*(one(ask) for ask in given))
    wall = time.perf_counter() - begin
    answers = [read(*each) for each in came]
    return row(work, answers, wall), answers


def run(
    url: str, model: str, works: Sequence[Work], seed: int, vocab: int = VOCAB
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Warm the server up, then each workload: figures and answers by its name."""
    rows: dict[str, Any] = {}
    texts: dict[str, Any] = {}

    async def all_works() -> None:
        await measure(url, model, WARM_UP, asks(WARM_UP, seed, vocab))
        for work in works:
            given = asks(work, seed, vocab)
            found, answers = await measure(url, model, work, given)
            rows[work.name], texts[work.name] = told(found), said(given, answers)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(all_works())
    return rows, texts


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which leaves more of the machine to the server, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def main() -> int:
    """Measure one server; the exit code."""
    parser = parser_of("http_bench", __doc__)
    parser.add_argument("url", help="as http://127.0.0.1:8000")
    parser.add_argument("model", help="what the server calls it")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="of the model (default: %(default)s)")
    add_flags(parser)
    options = parser.parse_args()
    works = works_of(options.workloads.split(","), options.requests)
    try:
        rows, texts = run(options.url, options.model, works, options.seed, options.vocab)
    except (BenchError, StreamError, OSError, TimeoutError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    write_both(options, rows, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
