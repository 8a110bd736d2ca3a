"""K10, and one also seen: log-probabilities of a prompt, with and without a cache, and in how much memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from model.decoder import Decoder
from tests.support.reference import load_reference
from tests.support.scripted import HELLO, WORLD
from tests.support.server import Served, inside
from tests.support.standing import Known, assert_stands

C = "/v1/completions"
IDS = [21, *range(1400, 1439)]  # 40
LONGER = [*IDS, *range(30, 60)]


def body(ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, **fields}


def listed(server: Served, asked: dict[str, Any]) -> list[float | None]:
    """The log-probability of each token, prompt and answer, as the reply has them."""
    reply = server.http.post(C, json=asked)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["logprobs"]["token_logprobs"])


@pytest.fixture(scope="module")
def right(rand: Path) -> Callable[[list[int]], list[float]]:
    """transformers' log-probability of each token but the first of a prompt, and of the answer's first."""

    def of(ids: list[int]) -> list[float]:
        model = load_reference(rand).model
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].to(torch.float64), -1)
        answer = int(rows[-1].argmax())
        return [float(rows[i, token]) for i, token in enumerate([*ids[1:], answer])]

    return of


def assert_right(found: list[float | None], expected: list[float]) -> None:
    assert found[0] is None
    assert found[1:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("before", ["nothing", "plain", "plain and longer"])
def test_k10_the_same_list_every_time(
    rand_served: Served, right: Callable[[list[int]], list[float]], before: str
) -> None:
    """Twice, then with a longer prompt of the same prefix, and all of it after a plain request has filled the
    cache with the prefix: no list is shorter, or other, for what is cached."""
    salt = {"cache_salt": before}
    if before != "nothing":
        plain = {"prompt": IDS if before == "plain" else LONGER, "max_tokens": 1, "temperature": 0, **salt}
        assert rand_served.http.post(C, json=plain).status_code == 200
    lists = [listed(rand_served, body(IDS, **salt)) for _ in range(3)]
    assert lists[0] == lists[1] == lists[2]
    assert_right(lists[0], right(IDS))
    assert_right(listed(rand_served, body(LONGER, **salt)), right(LONGER))
    assert_right(listed(rand_served, body(IDS, **salt)), right(IDS))
    # They leave the cache as good as they found it: a plain request after them has its hit, and its answer.
    plain = {"prompt": IDS, "max_tokens": 1, "temperature": 0, "logprobs": 1, **salt}
    reply = rand_served.http.post(C, json=plain).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(right(IDS)[-1:], abs=1e-4)


def test_k10_streamed_with_choices_without_output_and_at_once(
    rand_served: Served, right: Callable[[list[int]], list[float]]
) -> None:
    """Siblings: n = 2 (each echoes, each has the list), max_tokens 0, prompt_logprobs, a stream, a crowd."""
    expected = right(IDS)
    reply = rand_served.http.post(C, json=body(IDS, n=2)).json()
    for choice in reply["choices"]:
        assert_right(choice["logprobs"]["token_logprobs"], expected)
    assert_right(listed(rand_served, body(IDS, max_tokens=0)), expected[:-1])

    async def crowd() -> list[httpx.Response]:
        async with rand_served.async_http() as http:
            bodies = [body(IDS), body(LONGER), body(IDS, echo=False), body(IDS), body(LONGER)]
            return list(await asyncio.gather(*(http.post(C, json=one) for one in bodies)))

    one, longer, alone, again, longer_again = (
        reply.json()["choices"][0]["logprobs"]["token_logprobs"] for reply in asyncio.run(crowd())
    )
    assert_right(one, expected)
    assert_right(again, expected)
    assert_right(longer, right(LONGER))
    assert_right(longer_again, right(LONGER))
    assert alone == pytest.approx(expected[-1:], abs=1e-4)


# ---- also seen: logits of the whole prompt at once ---------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every tensor of logits that is made."""
    sizes: list[int] = []
    logits = Decoder.logits

    def noted(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        made = logits(self, hidden)
        sizes.append(made.numel() * made.element_size())
        return made

    monkeypatch.setattr(Decoder, "logits", noted)
    yield sizes


@pytest.mark.parametrize("length", [1000, pytest.param(8000, marks=pytest.mark.slow)])
def test_also_seen_prompt_logits_are_made_in_pieces(
    chain: Callable[..., Path], made: list[int], length: int
) -> None:
    """Prompt x vocabulary would be 197 MB for 1,000 tokens (1.6 GB for 8,000), all of one step here; there
    are never more than 32 MiB, and the scores are right: what follows in CHAIN is certain."""
    options = {"max_model_len": 8192, "max_batch_tokens": 8192, "kv_memory": 64 << 20}
    with inside(chain((HELLO, WORLD, HELLO)), **options) as server:
        ids = [HELLO, WORLD] * (length // 2)
        found = listed(server, body(ids))
        assert len(found) == length + 1 and found[0] is None
        assert max(value for value in found[1:] if value is not None) <= 0
        assert found[1:] == pytest.approx([0.0] * length, abs=1e-4)
        assert length * 49152 * 4 > 4 * 32 * 2**20
        assert max(made) <= 32 * 2**20
        assert sum(made) >= length * 49152 * 4
        assert_stands(server, Known([HELLO], " worldHello", 2))
