"""V8: empty stops; unknown, unsupported and mistyped fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.api.unsupported import CHAT as LACKING_CHAT
from server.api.unsupported import COMPLETION as LACKING_COMPLETION
from server.api.wire import ChatBody, CompletionBody
from tests.support.refusals import (
    CHATS,
    COMPLETIONS,
    GOOD,
    MESSAGES,
    check_error,
    refused,
)
from tests.support.scripted import EOS, HELLO, NEWLINE, WORLD
from tests.support.server import Served
from tests.support.standing import Known

Serves = Callable[..., Served]


@pytest.fixture
def server(served: Serves, chain: Callable[..., Path]) -> Served:
    return served(chain((NEWLINE, HELLO, WORLD, EOS)), Known([HELLO], " world", 4), kv_memory=16 << 20)


# ---- V8: empty stops; unknown, unsupported and mistyped fields --------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_v8_stops(server: Served, path: str) -> None:
    text = " world" if path == COMPLETIONS else "Hello world"
    for stop in ("", [""], ["x", ""], ["", "x"], [1], 1, True, {}, [None], [["x"]], ["x", 1], {"a": "b"}):
        error = refused(server, path, {"stop": stop})
        assert str(error["param"]).startswith("stop"), (stop, error)
    for stop in ([], None, "x", ["x"], ["x"] * 16):
        reply = server.http.post(path, json={**GOOD[path], "stop": stop})
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text
        assert choice["finish_reason"] == "stop"


UNSUPPORTED: dict[str, Any] = {  # a value that asks for something
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "prompt_embeds": "AAAA",
    "suffix": "the end",
    "truncate_prompt_tokens": 5,
    "logits_processors": ["x"],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}
UNSUPPORTED_CHAT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "add_generation_prompt": False,
    "documents": [{"text": "x"}],
    "mm_processor_kwargs": {"a": 1},
}
OWN = {  # what one route has and the other lacks
    COMPLETIONS: {"max_completion_tokens": 3, "top_logprobs": 2},
    CHATS: {"echo": True},
}


def test_v8_what_would_change_the_answer_and_is_not_there_is_refused(server: Served) -> None:
    for path in (COMPLETIONS, CHATS):
        for name, value in {**UNSUPPORTED, **UNSUPPORTED_CHAT, **OWN[path]}.items():
            error = refused(server, path, {name: value})
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for message in (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {}}],
        },
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": ""}},
    ):
        error = refused(server, CHATS, {"messages": [*MESSAGES, message]})
        assert error["param"].startswith("messages[1].")


def test_v8_what_asks_for_nothing_is_taken(server: Served) -> None:
    nothing = {
        "best_of": 1,
        "suffix": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "response_format": None,
        "user": "me",
        "stream_options": None,
        "n": 1,
        "echo": False,
    }
    chat = {
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "modalities": ["text"],
        "audio": None,
        "logprobs": False,
    }
    for path, fields in ((COMPLETIONS, nothing), (CHATS, {**nothing, **chat})):
        for name, value in [*fields.items(), ("all", None)]:
            asked = fields if name == "all" else {name: value}
            reply = server.http.post(path, json={**GOOD[path], **asked})
            assert reply.status_code == 200, (name, reply.text)


KNOWN_FIELDS = {*CompletionBody.model_fields, *ChatBody.model_fields, *LACKING_COMPLETION, *LACKING_CHAT}
NULLS = sorted(KNOWN_FIELDS - {"prompt", "messages"})


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_v8_null_is_the_default_of_every_field(server: Served, path: str) -> None:
    """Clients of typed languages send all of them."""
    needed = {"prompt": [NEWLINE]} if path == COMPLETIONS else {"messages": MESSAGES}
    assert len(NULLS) > 50
    for nulls in (dict.fromkeys(NULLS), *({name: None} for name in NULLS)):
        reply = server.http.post(path, json=needed | nulls)
        assert reply.status_code == 200, (nulls, reply.text)
        choice = reply.json()["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("Hello world", "stop")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_v8_unknown_names_are_ignored(server: Served, path: str) -> None:
    plain = server.http.post(path, json=GOOD[path]).json()["choices"]
    extra = {
        "foo": 1,
        "": None,
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "🦙": [],
        "__class__": "x",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "self": 1,
        "model_config": {},
    }
    reply = server.http.post(path, json={**GOOD[path], **extra})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == plain


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_v8_types_are_strict(server: Served, path: str) -> None:
    for name, value in (
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", "1"),
        ("top_k", 1.5),
        ("top_k", "1"),
        ("max_tokens", "4"),
        ("max_tokens", 4.0),
        ("max_tokens", True),
        ("n", "1"),
        ("n", True),
        ("n", 1.0),
        ("seed", "7"),
        ("seed", 1.5),
        ("seed", True),
        ("stream", "true"),
        ("stream", 0),
        ("model", 5),
        ("model", ["m"]),
        ("user", 5),
        ("ignore_eos", 1),
        ("min_tokens", "1"),
        ("stop_token_ids", "1"),
        ("stop_token_ids", [1.0]),
        ("min_p", "0.1"),
    ):
        body = {**GOOD[path], name: value}
        error = check_error(server.http.post(path, json=body))
        assert str(error["param"]).startswith(name), (name, value, error)
        assert name in error["message"]


def test_v8_stream_options_need_a_stream(server: Served) -> None:
    for path, good in GOOD.items():
        for options in ({"include_usage": True}, {"include_usage": False}, {}):
            body = {**good, "stream_options": options}
            for more in ({}, {"stream": False}, {"stream": None}):
                assert check_error(server.http.post(path, json=body | more))["param"] == "stream_options"
        for options in (True, "x", [], {"include_usage": "yes"}, {"include_usage": 1}):
            body = {**good, "stream": True, "stream_options": options}
            assert check_error(server.http.post(path, json=body))["param"].startswith("stream_options")


def test_v8_models_paths_and_methods(server: Served) -> None:
    for path in GOOD:
        for model in ("gpt-4", "", "x" * 300, "\u202e", "../..", "native"):
            error = refused(server, path, {"model": model}, 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
    for path in (
        "/v1/completion",
        "/v1",
        "/",
        "/v1/chat",
        "/v1/completions/x",
        "/v2/completions",
        "/v1/embeddings",
    ):
        error = check_error(server.http.post(path, json=GOOD[COMPLETIONS]), (404, 405))
        assert error["code"] in ("not_found", "method_not_allowed")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        for path in GOOD:
            reply = server.http.request(method, path)
            assert check_error(reply, 405)["code"] == "method_not_allowed"
            assert reply.headers["allow"] == "POST"
    assert server.http.get("/v1/models/none").status_code == 404
    check_error(server.http.get("/v1/models/none"), 404)
