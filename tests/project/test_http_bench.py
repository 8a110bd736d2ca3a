"""The client of the benchmarks, against a server whose pace and faults are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from loadtest.bench_work import Ask, Work, few
from loadtest.http_bench import measure, read, request_bytes, run, send
from loadtest.stream import StreamError
from tests.support.fake_sse import EVENTS, PACE, TOKENS_PER_EVENT, fake_sse

TOKENS = EVENTS * TOKENS_PER_EVENT
TEXT = "".join(f"t{number} " for number in range(EVENTS))
BODY = b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"choices": [{"index": 0, "text": ""}]},
        {"choices": [{"index": 0, "text": "a"}]},
        {"choices": [{"index": 0, "text": "bc", "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    )
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_sse() as base:
        yield base


def chunked(body: bytes, sizes: int) -> bytes:
    parts = [body[i : i + sizes] for i in range(0, len(body), sizes)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


ANSWERS = [
    HEAD + b"\r\n" + BODY + b"data: [DONE]\n\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY + b"data: [DONE]\n\n", 17),
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(BODY + b"data: [DONE]\n\n", 1000),
]


@pytest.mark.parametrize("content", ANSWERS)
def test_an_answer_is_the_same_wherever_the_network_cuts_it(content: bytes) -> None:
    for cut in range(1, len(content)):
        answer = read(0.5, [(1.0, content[:cut]), (2.0, content[cut:])])
        assert (answer.text, answer.tokens) == ("abc", 3)
        assert len(answer.arrivals) == 2 and set(answer.arrivals) <= {1.0, 2.0}
    by_byte = read(0.0, [(float(i), content[i : i + 1]) for i in range(len(content))])
    assert by_byte.text == "abc" and 0 < by_byte.arrivals[0] <= by_byte.arrivals[1] < len(content)


@pytest.mark.parametrize(
    "content", [b"", b"HTTP/1.1 429 Too Many\r\n\r\n{}", HEAD + b"\r\n" + BODY, ANSWERS[1][:-60]]
)
def test_what_is_no_answer_is_not_measured(content: bytes) -> None:
    with pytest.raises(StreamError):
        read(0.0, [(1.0, content)])


def test_a_stream_is_timed(url: str) -> None:
    async def one() -> None:
        started, pieces = await send(url, "steady", Ask((1, 2, 3), TOKENS))
        answer = read(started, pieces)
        assert (answer.tokens, answer.text) == (TOKENS, TEXT)
        assert len(answer.arrivals) == EVENTS
        assert PACE <= answer.arrivals[0] - started < 10 * PACE
        assert answer.arrivals[-1] - answer.arrivals[0] >= (EVENTS - 1) * PACE * 0.9

    asyncio.run(one())


@pytest.mark.parametrize("mode", ["error", "cut", "no-finish", "bad-finish", "no-usage", "busy"])
def test_a_stream_that_breaks_is_not_measured(url: str, mode: str) -> None:
    work = Work("w", 1, 1, 3, TOKENS)
    with pytest.raises(StreamError):
        asyncio.run(measure(url, mode, work, [Ask((1, 2, 3), TOKENS)]))


def test_so_many_are_in_flight_and_no_more(url: str) -> None:
    work = Work("w", 4, 2, 3, TOKENS)
    found, answers = asyncio.run(measure(url, "steady", work, [Ask((1, 2, 3), TOKENS)] * 4))
    starts = sorted(answer.started for answer in answers)
    assert starts[1] - starts[0] < EVENTS * PACE / 2 <= starts[2] - starts[1]
    assert found.wall_s >= 2 * EVENTS * PACE and found.out_tok_s == pytest.approx(4 * TOKENS / found.wall_s)


def test_a_run_warms_up_and_keeps_what_was_said(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtest.http_bench.WARM_UP", Work("warm-up", 1, 1, 4, TOKENS))
    rows, texts = run(url, "steady", [Work("w", 2, 2, 5, TOKENS)], 3)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("workload=w requests=2 ") and rows["w"]["requests"] == 2
    assert [(said["text"], said["tokens"], len(said["prompt"])) for said in texts["w"]] == [
        (TEXT, TOKENS, 5)
    ] * 2


def test_a_request_asks_for_the_whole_answer() -> None:
    head, body = request_bytes("host:1", "m", Ask((5, 6), 7)).split(b"\r\n\r\n")
    asked = json.loads(body)
    assert asked["prompt"] == [5, 6] and asked["max_tokens"] == asked["min_tokens"] == 7
    assert asked["ignore_eos"] and asked["stream"] and asked["temperature"] == 0
    assert f"Content-Length: {len(body)}".encode() in head and b"Connection: close" in head


def test_a_quick_look_cuts_requests_and_nothing_else() -> None:
    works = [Work("w", 9, 2, 3, 4)]
    assert few(works, None) == works
    assert few(works, 2) == [Work("w", 2, 2, 3, 4)] and few(works, 20) == works
