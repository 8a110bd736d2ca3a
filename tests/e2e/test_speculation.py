"""--speculate over HTTP: the same texts in fewer steps, and its numbers in /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints
from tests.support.engines import rows_are_free
from tests.support.server import Served, inside
from tests.support.sse import read_stream

LOOP = list(range(300, 316))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Iterator[tuple[Served, Served]]:
    """A model that says the same 16 ids again and again, served without drafts and with them."""
    folder = checkpoints.make_chain(tmp_path_factory.mktemp("loop"), [*LOOP, LOOP[0]])
    checkpoints.add_tokenizer(folder, smol)
    with inside(folder, speculate="off") as plain, inside(folder, speculate="ngram", debug=True) as drafting:
        rows_are_free(drafting.engine)
        yield plain, drafting


def texts(server: Served, **fields: Any) -> list[str]:
    body = {"prompt": LOOP[:3], "max_tokens": 200, "ignore_eos": True} | fields
    whole = server.http.post("/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    assert whole.json()["usage"]["completion_tokens"] == 200 * fields.get("n", 1)
    streamed = []
    if fields.get("n", 1) == 1:
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            streamed.append(read_stream(response.iter_lines()).text)
    return [choice["text"] for choice in whole.json()["choices"]] + streamed


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "seed": 6, "n": 3},
        {"logprobs": 2},
    ],
)
def test_the_same_texts(pair: tuple[Served, Served], fields: dict[str, Any]) -> None:
    plain, drafting = pair
    before = drafting.metric("spec_decode_num_accepted_tokens_total")
    assert texts(plain, **{"temperature": 0} | fields) == texts(drafting, **{"temperature": 0} | fields)
    assert drafting.metric("spec_decode_num_accepted_tokens_total") - before > 100


def test_the_numbers(pair: tuple[Served, Served]) -> None:
    plain, drafting = pair
    texts(drafting, temperature=0)
    texts(plain, temperature=0)
    drafts, tokens, accepted = (
        drafting.metric(f"spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens and 0.8 * tokens < accepted <= tokens
    assert plain.metric("spec_decode_num_draft_tokens_total") == 0


def test_usage_and_the_cache_are_those_without_drafts(pair: tuple[Served, Served]) -> None:
    body = {"prompt": LOOP[:3], "max_tokens": 150, "temperature": 0, "cache_salt": "one"}
    usage = [server.http.post("/v1/completions", json=body).json()["usage"] for server in pair]
    assert usage[0] == usage[1]
    states = pair[1].http.get("/v1/kv", params={"check": "true"}).json()["states"]
    assert states["live"]["blocks"] == 0


def test_a_stop_string_in_the_middle_of_a_step(pair: tuple[Served, Served]) -> None:
    """Tokens that came in the same step, after the stop, are neither told nor counted."""
    body: dict[str, Any] = {"prompt": LOOP[:3], "max_tokens": 200, "temperature": 0}
    whole = pair[0].http.post("/v1/completions", json=body)
    text = whole.json()["choices"][0]["text"]
    for at in (90, 97, 140):
        stopping = body | {"prompt": LOOP[: 3 + at % 5], "stop": text[at : at + 9]}
        told = [server.http.post("/v1/completions", json=stopping).json() for server in pair]
        assert told[0]["choices"] == told[1]["choices"] and told[0]["choices"][0]["finish_reason"] == "stop"
        counted = [reply["usage"]["completion_tokens"] for reply in told]
        assert counted[0] == counted[1] < 200
