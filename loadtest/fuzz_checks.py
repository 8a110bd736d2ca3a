"""Whether the server may give an answer: it is never a fault of its own, and has the promised shape."""

from __future__ import annotations

import json
from typing import Any

from loadtest.fuzz_wire import Answer, Call

# It says that it cannot serve now: by design, and named in the summary if it is met at all.
BY_DESIGN = {
    503: {
        *("shutting_down", "engine_unavailable", "aborted"),
        *("too_many_connections", "too_many_bodies", "too_many_grammars"),
    },
    504: {"deadline_exceeded"},
}
REASONS = {"stop", "length"}


def fault(call: Call, answer: Answer) -> str | None:
    """What is wrong with `answer`, None if nothing is."""
    if answer.status == 0:
        return "the connection closed without an answer"
    if answer.status >= 400:
        return error_fault(answer)
    if answer.status == 200:
        return _fault_of_200(call, answer)
    if answer.status in (204, 304):
        return None
    return f"status {answer.status} is none that the document has"


def error_fault(answer: Answer) -> str | None:
    """An error: OpenAI's shape, and no 5xx but those by design."""
    code = None
    if not answer.headless:
        try:
            error = json.loads(answer.body)["error"]
            code = error["code"]
            told = (error["message"], error["type"])
        except (ValueError, KeyError, TypeError):
            return f"status {answer.status} with a body of another shape: {answer.body[:200]!r}"
        if set(error) != {"message", "type", "param", "code"}:
            return f"an error has the fields {sorted(error)}"
        if not all(isinstance(text, str) and text for text in told):
            return f"an error without words: {error}"
        if not all(error[name] is None or isinstance(error[name], str) for name in ("param", "code")):
            return f"param and code must be strings or null: {error}"
        if answer.kind != "application/json":
            return f"an error as {answer.kind or 'nothing'}"
    if answer.status >= 500 and code not in BY_DESIGN.get(answer.status, ()):
        return f"status {answer.status}: {answer.body[:300]!r}"
    return None


def attack_fault(answer: Answer) -> str | None:
    """Broken HTTP may be met with silence; if there are words, they are the promised ones."""
    return error_fault(answer) if answer.status >= 400 else None


def _fault_of_200(call: Call, answer: Answer) -> str | None:
    if answer.headless:
        return None
    path = call.path.partition("?")[0]
    if answer.kind == "text/event-stream":
        return _stream_fault(answer.body)
    if answer.kind != "application/json":
        return None if path in ("/metrics", "/") or not path.startswith("/v1") else f"200 as {answer.kind}"
    try:
        value = json.loads(answer.body, parse_constant=_no_constant)
    except ValueError as error:
        return f"a 200 that is no JSON ({error}): {answer.body[:200]!r}"
    if not isinstance(value, dict):
        return f"a 200 that is no object: {answer.body[:200]!r}"
    if path in ("/v1/completions", "/v1/chat/completions"):
        return _answer_fault(value, "text_completion" if path == "/v1/completions" else "chat.completion")
    return None


def _answer_fault(value: dict[str, Any], kind: str) -> str | None:
    try:
        usage, choices = value["usage"], value["choices"]
        if value["object"] != kind or not value["id"] or not choices:
            return f"an answer of {value['object']!r}, {len(choices)} choices"
        if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
            return f"usage does not add up: {usage}"
        if sorted(choice["index"] for choice in choices) != list(range(len(choices))):
            return "the choices' indices are not 0, 1, ..."
        for choice in choices:
            text = choice["text"] if kind == "text_completion" else choice["message"]["content"]
            if not isinstance(text, str) or choice["finish_reason"] not in REASONS:
                return f"a choice that is none: {choice}"
    except (KeyError, TypeError) as error:
        return f"an answer without {error}: {str(value)[:200]}"
    return None


def _stream_fault(body: bytes) -> str | None:
    """Events are JSON, none is an error, the last is [DONE]."""
    data = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    if not data or data[-1] != b"[DONE]":
        return f"a stream that ends without [DONE]: {body[-200:]!r}"
    for event in data[:-1]:
        try:
            value = json.loads(event, parse_constant=_no_constant)
        except ValueError:
            return f"an event that is no JSON: {event[:200]!r}"
        if "error" in value:
            return f"an error in mid-stream: {event[:300]!r}"
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
