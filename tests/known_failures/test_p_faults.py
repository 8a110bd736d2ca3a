"""P4: a failure in mid-stream is told, ends its own stream at once, and costs nobody else a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.text.detokenizer import ByteLevelDetokenizer
from tests.support.clients import Told, read_all
from tests.support.engines import on_batches
from tests.support.scripted import BETA, HELLO, NEWLINE, WORLD, known_of
from tests.support.server import Served, inside
from tests.support.standing import assert_stands

C, CC = "/v1/completions", "/v1/chat/completions"
LOOP, OTHER = (
    (NEWLINE, HELLO, WORLD, NEWLINE),
    (BETA, 16439, BETA),
)  # "Hello world\n" and " gammabeta" for ever
LONG = 150  # prompt tokens of the one that fails; the others have fewer with their whole answers
TOKENS = 60


@pytest.fixture(scope="module")
def running(chain: Callable[..., Path]) -> Iterator[Served]:
    with inside(chain(LOOP, OTHER), max_model_len=512) as server:
        yield server


@pytest.fixture
def server(running: Served, smol: Path) -> Iterator[Served]:
    forward = running.engine._runner.run
    yield running
    running.engine._runner.run = forward
    assert_stands(running, known_of(LOOP, tokenizer=smol))


def fail_at_third_decode(server: Served, path: str, body: dict[str, Any]) -> None:
    """Every step with this prompt fails once three tokens are drawn; no other sequence gets as long."""
    asked = server.http.post(path, json=body | {"max_tokens": 1}).json()
    length = asked["usage"]["prompt_tokens"]
    assert length >= LONG

    def hook(batch: Any) -> None:
        if bool((batch.meta.host_seq_len >= length + 3).any()):
            raise RuntimeError("secret of ours")

    on_batches(server.engine, hook)


def others() -> list[tuple[str, dict[str, Any]]]:
    fields = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "x"}], **fields}
    return [(C, {"prompt": [NEWLINE], **fields}), (CC, chat), (C, {"prompt": [NEWLINE] * 20, **fields})]


def assert_unharmed(told: list[Told]) -> None:
    for one in told:
        assert (one.stream.text, one.stream.finish) == ("Hello world\n" * (TOKENS // 3), "length")
        assert one.stream.done and one.error is None


def long_one(path: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    fields = {"temperature": 0, "max_tokens": 200, "ignore_eos": True, **fields}
    if path == C:
        return path, {"prompt": [NEWLINE] * LONG, **fields}
    return path, {"messages": [{"role": "user", "content": "a " * LONG}], **fields}


@pytest.mark.parametrize("path", [C, CC])
@pytest.mark.parametrize("n", [1, 2])
def test_p4_a_model_step_that_fails(server: Served, path: str, n: int) -> None:
    _, body = long_one(path, n=n)
    fail_at_third_decode(server, path, body)
    bad, *rest = read_all(server, [(path, body), *others()], seconds=30)
    assert bad.error is not None and bad.error["code"] == "generation_failed"
    assert "secret" not in str(bad.error)
    assert bad.stream.done and bad.stream.finish is None
    assert bad.stream.text.replace("Hello", "").replace(" world", "").replace("\n", "") == ""
    assert bad.stream.text.count("Hello") >= 1, "what came before the failure was sent"
    assert bad.at < min(one.at for one in rest), "it ended at once, not with the others"
    assert_unharmed(rest)
    status, error = refused(server, path, body)
    assert (status, error["code"]) == (500, "generation_failed")


def refused(server: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer in one piece."""
    reply = server.http.post(path, json=body)
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return reply.status_code, error


@pytest.mark.parametrize("path", [C, CC])
def test_p4_a_detokenizer_that_fails(server: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a fault behind the engine: what was drawn for nobody goes back, others go on."""
    push = ByteLevelDetokenizer.push
    chosen: list[ByteLevelDetokenizer] = []

    def failing(self: ByteLevelDetokenizer, token: int) -> str:
        text = push(self, token)
        if token == WORLD and not chosen:
            chosen.append(self)
        if chosen and chosen[0] is self:
            raise RuntimeError("secret of ours")
        return text

    monkeypatch.setattr(ByteLevelDetokenizer, "push", failing)
    first, second = others()[path == CC], others()[2]
    more = [(C, second[1] | {"prompt": [NEWLINE] * length}) for length in (5, 7)]
    told = read_all(server, [first, second, *more], seconds=30)
    (bad,) = [one for one in told if one.error is not None]
    assert bad.error is not None and bad.error["code"] == "internal_error" and "secret" not in str(bad.error)
    assert bad.stream.done and bad.stream.finish is None
    assert bad.stream.text == "Hello"
    assert_unharmed([one for one in told if one is not bad])
    chosen.clear()
    status, error = refused(server, *others()[path == CC])
    assert (status, error["code"]) == (500, "internal_error")


def test_p4_failing_choices_do_not_leave_siblings_running(server: Served) -> None:
    """Two prompts in one call: the long one fails, the whole call is over, and nothing runs on for it."""
    body = {"prompt": [[NEWLINE] * LONG, [BETA]], "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    fail_at_third_decode(server, C, body | {"prompt": [NEWLINE] * LONG})
    (bad,) = read_all(server, [(C, body)])
    assert bad.error is not None and bad.stream.done
    assert server.wait_idle(2.0) < 2.0
