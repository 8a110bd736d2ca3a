"""The short form of `make fuzz`, and that it would notice: each kind of bad answer is one to it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from loadtest.fuzz_bodies import FRAGMENTS, POSTS, body_calls
from loadtest.fuzz_checks import attack_fault, fault
from loadtest.fuzz_sockets import ATTACKS, socket_attacks
from loadtest.fuzz_wire import Answer, Call

needs_schemathesis = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed (extra `fuzz`)"
)
JSON = {"content-type": "application/json"}
CALL = Call("bodies", "", "POST", "/v1/completions")
ERROR = {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
CHOICE = {"index": 0, "text": "", "finish_reason": "length"}
RIGHT = {"id": "cmpl-1", "object": "text_completion", "choices": [CHOICE], "usage": USAGE}


def answer(status: int, value: Any, kind: str = "application/json") -> Answer:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Answer(status, {"content-type": kind}, body)


def wrong(code: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"error": ERROR | {"code": code} | fields}


@needs_schemathesis
def test_a_few_hundred_requests(tmp_path: Path) -> None:
    from loadtest import fuzz

    found = fuzz.run("", requests=400, start=20, folder=tmp_path)
    assert found["broke"] is None
    assert found["examples"] == []
    assert found["passed"] and found["requests"] == 400
    assert found["after"]["live_blocks"] == 0
    for source in ("schemathesis", "bodies", "sockets"):
        assert found["by_source"][source]["4xx"] > 10, source
    assert found["by_source"]["bodies"]["2xx"] > 10  # a server that refuses everything would prove nothing


@needs_schemathesis
def test_a_seed_gives_the_same_requests() -> None:
    from loadtest import fuzz
    from server.api.describe import accepts, describe
    from server.api.wire import ChatBody

    app = FastAPI()
    app.add_api_route("/v1/chat/completions", lambda: None, methods=["POST"], openapi_extra=accepts(ChatBody))
    document = describe(app)
    first, again, other = (list(fuzz.shots(document, start, 300)) for start in (1, 1, 2))
    assert len(first) == 300 and len({call.source for call in first if isinstance(call, Call)}) == 2
    assert first == again != other


def test_every_documented_field_is_tried_with_every_value() -> None:
    schemas = {name: {"properties": {"x": {}}} for name, _ in POSTS.values()}
    calls = list(body_calls({"components": {"schemas": schemas}}, 1, 2 * len(POSTS) * len(FRAGMENTS)))
    tried = [call for call in calls if call.note == "a field's value"]
    assert len({(call.path, call.body) for call in tried}) == len(POSTS) * len(FRAGMENTS)


def test_every_attack_is_made_before_any_is_spoilt() -> None:
    assert list(socket_attacks(1, len(ATTACKS))) == list(ATTACKS)
    assert len(list(socket_attacks(1, 200))) == 200


@pytest.mark.parametrize(
    "good",
    [
        answer(200, RIGHT),
        answer(400, wrong()),
        answer(404, wrong("model_not_found", param="model")),
        answer(503, wrong("shutting_down")),
        answer(200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', "text/event-stream; charset=utf-8"),
        Answer(405, {}, b"", headless=True),
    ],
)
def test_what_a_server_may_answer(good: Answer) -> None:
    assert fault(CALL, good) is None


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Answer(0), "without an answer"),
        (answer(500, wrong("internal_error")), "status 500"),
        (answer(503, wrong("engine_dead")), "status 503"),
        (Answer(500, {}, b"", headless=True), "status 500"),
        (answer(400, {"detail": "no"}), "another shape"),
        (answer(400, b"Bad Request", "text/plain"), "another shape"),
        (answer(400, wrong(), "text/plain"), "as text/plain"),
        (answer(400, wrong(message="")), "without words"),
        (answer(400, wrong(code=7)), "strings or null"),
        (answer(400, wrong(extra=1)), "has the fields"),
        (answer(302, b""), "none that the document has"),
        (answer(200, [1]), "no object"),
        (answer(200, b'{"a": NaN}'), "no JSON"),
        (answer(200, RIGHT | {"usage": USAGE | {"total_tokens": 6}}), "add up"),
        (answer(200, RIGHT | {"choices": []}), "0 choices"),
        (answer(200, RIGHT | {"choices": [CHOICE, CHOICE]}), "indices"),
        (answer(200, RIGHT | {"choices": [CHOICE | {"finish_reason": None}]}), "a choice that is none"),
        (answer(200, b'data: {"choices": []}\n\n', "text/event-stream"), "without [DONE]"),
        (answer(200, b"data: {oops\n\ndata: [DONE]\n\n", "text/event-stream"), "no JSON"),
        (answer(200, b'data: {"error": {}}\n\ndata: [DONE]\n\n', "text/event-stream"), "mid-stream"),
    ],
)
def test_what_a_server_may_not_answer(bad: Answer, says: str) -> None:
    found = fault(CALL, bad)
    assert found is not None and says in found


def test_broken_http_may_be_met_with_silence_but_not_with_a_fault() -> None:
    assert attack_fault(Answer(0)) is None
    assert attack_fault(answer(400, wrong("invalid_http"))) is None
    assert attack_fault(answer(500, wrong())) is not None
    assert attack_fault(answer(400, b"Invalid HTTP request received.", "text/plain")) is not None
