"""K5, K7 over HTTP: what can never fit is refused and holds nobody up; what is over gives everything back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import checkpoints
from tests.support.command import InProcess, check_one_line
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.server import RunningServer, Served, running
from tests.support.standing import Known, assert_stands

C = "/v1/completions"
BLOCK_BYTES = 2 * 2 * 16 * 16 * 4  # RAND: 2 layers, K and V, 16 tokens, head_dim 16, fp32; of one KV head
POOL = ("--dtype", "float32", "--kv-memory", f"{8 * 2 * BLOCK_BYTES}B")  # 8 logical blocks of 16: 128 tokens
SHORT = [5, *range(800, 809)]


def body(prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Path:
    """RAND with 512 positions."""
    made = checkpoints.make_rand(tmp_path_factory.mktemp("rand512"), max_position_embeddings=512)
    return checkpoints.add_tokenizer(made, smol)


@pytest.fixture(scope="module")
def right(folder: Path) -> Callable[[list[int], int], str]:
    """What transformers says, as text."""

    def text(prompt: list[int], tokens: int) -> str:
        ids = load_reference(folder).greedy(prompt, tokens)
        return str(load_reference_tokenizer(folder).decode(ids, skip_special_tokens=True))

    return text


@pytest.fixture(scope="module")
def tight_running(folder: Path) -> Iterator[RunningServer]:
    with running(folder, *POOL) as server:
        yield server


@pytest.fixture
def tight(tight_running: RunningServer, right: Callable[[list[int], int], str]) -> Iterator[RunningServer]:
    """8 logical blocks for a model of 512 positions."""
    yield tight_running
    assert_stands(tight_running, Known(SHORT, right(SHORT, 5), 5))


def test_k5_a_pool_smaller_than_the_context_is_told(tight: RunningServer) -> None:
    """512 from config.json is clamped to the 128 that fit: told at the start, and to who asks."""
    assert "128 tokens (the model's own 512 do not fit" in tight.log()
    (model,) = tight.http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 128


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(200, 1), (200, None), (100, 200), (100, 29), (128, 1), (127, 2), (129, 1), (511, 1)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_k5_what_can_never_fit_is_refused_at_once(
    tight: RunningServer, prompt: int, tokens: int | None, stream: bool
) -> None:
    asked = body([3] * prompt, 1, stream=stream) | {"max_tokens": tokens}
    reply = tight.http.post(C, json=asked, timeout=2)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "128" in error["message"] and str(prompt) in error["message"]


@pytest.mark.parametrize(("prompt", "tokens"), [(100, 28), (127, 1), (1, 127)])
def test_k5_what_fits_exactly_is_answered(
    tight: RunningServer, right: Callable[[list[int], int], str], prompt: int, tokens: int
) -> None:
    ids = [9, *range(600, 599 + prompt)]
    reply = tight.http.post(C, json=body(ids, tokens))
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (right(ids, tokens), "length")


def test_k5_without_max_tokens_an_answer_grows_to_the_pool(tight: RunningServer) -> None:
    """The chat's limit is the room that there is, and it says `length`."""
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "ignore_eos": True}
    reply = tight.http.post("/v1/chat/completions", json=asked).json()
    assert reply["usage"]["total_tokens"] == 128
    assert reply["choices"][0]["finish_reason"] == "length"


def test_k5_the_queue_behind_it_moves(tight: RunningServer, right: Callable[[list[int], int], str]) -> None:
    """Small requests sent behind the impossible ones, behind one that fills the pool, and eight copies."""
    small = [[5, 40 + i, 7] for i in range(6)]
    filling = [8, *range(900, 999)]
    bodies = [
        body([3] * 200, 1), body(filling, 28), body([3] * 100, 200), *[body(ids, 10) for ids in small],
        body([4, *range(500, 519)], 40, n=8),
    ]  # fmt: skip

    async def everybody() -> list[httpx.Response]:
        async with tight.async_http() as http, asyncio.timeout(60):
            return list(await asyncio.gather(*(http.post(C, json=one) for one in bodies)))

    replies = asyncio.run(everybody())
    assert [reply.status_code for reply in replies] == [400, 200, 400] + [200] * 7
    texts = [[choice["text"] for choice in reply.json()["choices"]] for reply in replies if reply.is_success]
    expected = [
        [right(filling, 28)],
        *[[right(ids, 10)] for ids in small],
        [right(bodies[-1]["prompt"], 40)] * 8,
    ]
    assert texts == expected


def test_k5_copies_that_each_need_the_whole_pool(
    tight: RunningServer, right: Callable[[list[int], int], str]
) -> None:
    """n = 8, seven blocks each: no two at a time, and all are served."""
    ids = [6, *range(200, 270)]
    reply = tight.http.post(C, json=body(ids, 40, n=8))
    assert [choice["text"] for choice in reply.json()["choices"]] == [right(ids, 40)] * 8


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--kv-memory", "0"), ("--kv-memory",)),
        (("--kv-memory", f"{2 * BLOCK_BYTES - 1}B"), ("at least --kv-memory 8KiB",)),
        (("--kv-memory", "1KiB"), ("cannot hold a single block", "at least --kv-memory 8KiB")),
        ((*POOL[2:], "--max-model-len", "512"), ("--max-model-len 512", "64.0 KiB", "is 128", "--kv-memory")),
        ((*POOL[2:], "--max-model-len", "129"), ("--max-model-len 129", "is 128")),
        ((*POOL[2:], "--max-model-len", "513"), ("--max-model-len 513", "512 positions")),
        ((*POOL[2:], "--max-model-len", "1"), ("--max-model-len 1", "at least 2")),
        ((*POOL[2:], "--block-size", "512"), ("cannot hold a single block", "--block-size")),
    ],
)
def test_k5_a_start_that_cannot_work(
    here: InProcess, folder: Path, flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """One line that names need, have and what to turn; exit code not 0; before it listens."""
    done = here("serve", str(folder), "--port", "0", "--dtype", "float32", *flags)
    assert done.returncode != 0
    check_one_line(done, *parts, code=done.returncode)
    assert "Listening" not in done.stdout


def assert_adds_up(kv: dict[str, Any], total: int) -> dict[str, int]:
    """The states of a `/v1/kv` report in blocks; each within the pool, and together all of it."""
    blocks = {state: int(amount["blocks"]) for state, amount in kv["states"].items()}
    assert kv["pool"]["blocks"] == total == sum(blocks.values())
    assert all(0 <= count <= total for count in blocks.values())
    return blocks


def gauges(server: Served) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def leaves(http: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    try:
        await http.post(C, json=asked, timeout=0.05)
    except httpx.TimeoutException:
        return


def test_k7_gauges_under_load_and_when_it_is_over(rand_served: Served) -> None:
    """200 distinct short requests, aborts in prefill, refusals, ends by stop strings, and n = 3; the report
    is read all the while."""
    total = rand_served.kv()["pool"]["blocks"]
    seen: list[int] = []

    async def look(reader: httpx.AsyncClient) -> None:
        kv = (await reader.get("/v1/kv")).json()
        seen.append(assert_adds_up(kv, total)["live"])
        usage = gauge_of((await reader.get("/metrics")).text, "headroom:kv_cache_usage_perc")
        assert 0 <= usage <= 1

    async def load() -> None:
        # A reader of its own: a client has so many connections, and the load takes them all.
        async with rand_served.async_http() as http, rand_served.async_http() as reader:
            async with http.stream("POST", C, json=body([19, 3], 200, n=4, stream=True)) as long:
                await anext(long.aiter_bytes())
                await look(reader)
            assert seen[0] > 0, "it runs"
            short = [http.post(C, json=body([20 + i, 3, 4], 4)) for i in range(200)]
            gone = [leaves(http, body([30 + i, *range(1000, 1200)], 40)) for i in range(10)]
            bad = [http.post(C, json=body([7] * 300, 1)) for _ in range(10)]
            stops = [http.post(C, json=body([50 + i, 3], 40, stop=["e", "a", " "])) for i in range(20)]
            copies = [http.post(C, json=body([60 + i, *range(40)], 6, n=3)) for i in range(10)]
            work = asyncio.gather(*short, *gone, *bad, *stops, *copies)
            while not work.done():
                await look(reader)
            replies = [reply for reply in await work if reply is not None]
            assert sorted({reply.status_code for reply in replies}) == [200, 400]
            assert sum(reply.status_code == 400 for reply in replies) == 10

    asyncio.run(load())
    rand_served.wait_idle(2.0)
    blocks = assert_adds_up(rand_served.kv(check=True), total)
    assert blocks["live"] == 0
    assert blocks["cached"] > 0, "what is known and reclaimable is reported as that"
    now = gauges(rand_served)
    assert now["headroom:kv_cache_usage_perc"] == 0
    assert now["headroom:num_requests_running"] == now["headroom:num_requests_waiting"] == 0
    assert rand_served.kv()["requests"] == []


def gauge_of(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.rsplit(" ", 1)[1])


def test_k7_recompute_is_no_hit(tight: RunningServer) -> None:
    """Six that want twice the pool are preempted and computed again: prompt tokens are counted once, hits not
    at all, by the metrics and by each usage."""
    before = gauges(tight)

    async def everybody() -> list[httpx.Response]:
        async with tight.async_http() as http:
            bodies = [body([70 + i, *range(300, 319)], 44) for i in range(6)]
            return list(await asyncio.gather(*(http.post(C, json=one) for one in bodies)))

    replies = asyncio.run(everybody())
    now = gauges(tight)

    def grown(name: str) -> float:
        return now[f"headroom:{name}_total"] - before[f"headroom:{name}_total"]

    assert grown("num_preemptions") > 0
    assert (grown("prompt_tokens"), grown("prefix_cache_queries"), grown("prefix_cache_hits")) == (
        120,
        120,
        0,
    )
    assert grown("generation_tokens") == 6 * 44
    for reply in replies:
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
