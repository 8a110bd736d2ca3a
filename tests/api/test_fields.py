"""Fields of the wrong type, fields we lack, fields nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.api.unsupported import CHAT as CHAT_UNSUPPORTED
from server.api.unsupported import COMPLETION as COMPLETION_UNSUPPORTED
from tests.api.test_bodies import CHAT, GOOD, check_error
from tests.support.api import MAX_LEN, serving

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

WRONG_TYPES: list[tuple[str, Any]] = [
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", []),
    ("temperature", 10**400),
    ("top_p", {}),
    ("max_tokens", "3"),
    ("max_tokens", 3.0),
    ("max_tokens", True),
    ("n", 1.5),
    ("seed", "7"),
    ("seed", 1.5),
    ("seed", True),
    ("top_k", "5"),
    ("min_p", "0"),
    ("min_tokens", False),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("stream", "true"),
    ("stream", 1),
    ("stop", 1),
    ("stop", [1]),
    ("stop", ["a", None]),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [True]),
    ("repetition_penalty", "1"),
    ("presence_penalty", True),
    ("frequency_penalty", []),
    ("logit_bias", []),
    ("logit_bias", "5"),
    ("include_stop_str_in_output", 1),
    ("include_stop_str_in_output", "true"),
    ("prompt_logprobs", True),
    ("prompt_logprobs", 1.0),
    ("model", 1),
    ("user", 1),
    ("cache_salt", 1),
    ("stream_options", True),
]


@pytest.mark.parametrize(("path", "good"), [(COMPLETIONS, GOOD), (CHATS, CHAT)])
async def test_types_are_strict(words: Path, path: str, good: dict[str, Any]) -> None:
    async with serving(words) as api:
        for name, value in WRONG_TYPES:
            error = check_error(await api.http.post(path, json={**good, name: value}), 400)
            assert error["param"] == name, (name, value, error)
        assert api.service.requests == []


NO_PROMPT: list[Any] = [
    None,
    5,
    True,
    {},
    [None],
    [1, "a"],
    [1.5],
    [True],
    [[1], "a"],
    [[1], [True]],
    [["a"]],
    [[[1]]],
]
NO_PROMPT += [["a", 1], "", [], [[]], [""], ["a", ""], [[1], []]]
NO_MESSAGES: list[Any] = [
    None,
    "hi",
    {},
    ["hi"],
    [None],
    [],
    [{}],
    [{"role": "user"}],
    [{"role": 1, "content": "a"}],
]


async def test_inputs_of_no_shape(words: Path) -> None:
    async with serving(words) as api:
        for prompt in NO_PROMPT:
            error = check_error(await api.http.post(COMPLETIONS, json={"prompt": prompt}), 400)
            assert error["param"].startswith("prompt"), prompt
        for messages in NO_MESSAGES:
            error = check_error(await api.http.post(CHATS, json={"messages": messages}), 400)
            assert error["param"].startswith("messages"), messages


async def test_needed_fields(words: Path) -> None:
    async with serving(words) as api:
        assert check_error(await api.http.post(COMPLETIONS, json={}), 400)["param"] == "prompt"
        assert check_error(await api.http.post(CHATS, json={}), 400)["param"] == "messages"
        assert check_error(await api.http.post("/detokenize", json={}), 400)["param"] == "tokens"


@pytest.mark.parametrize(("path", "good"), [(COMPLETIONS, GOOD), (CHATS, CHAT)])
async def test_priority(words: Path, path: str, good: dict[str, Any]) -> None:
    async with serving(words) as api:
        for value in (None, 0, -3, 2**31 - 1):
            assert (await api.http.post(path, json={**good, "priority": value})).status_code == 200
        assert (await api.http.post(path, json=good)).status_code == 200
        assert [request.priority for request in api.service.requests] == [0, 0, -3, 2**31 - 1, 0]
        for value, code in [
            (2**31, None),
            (-(2**31) - 1, None),
            (1.5, "invalid_type"),
            ("1", "invalid_type"),
        ]:
            error = check_error(await api.http.post(path, json={**good, "priority": value}), 400)
            assert (error["param"], error["code"]) == ("priority", code)


async def test_values_out_of_range(words: Path) -> None:
    """The text room's own tests have every limit; here, that its refusals arrive as they should."""
    async with serving(words) as api:
        for name, value in [
            ("n", 0),
            ("temperature", -1),
            ("top_p", 1.5),
            ("max_tokens", -1),
            ("stop", ""),
            ("n", 10**6),
        ]:
            error = check_error(await api.http.post(COMPLETIONS, json={**GOOD, name: value}), 400)
            assert name in error["message"]
            assert error["param"] == name
        error = check_error(await api.http.post(COMPLETIONS, json={"prompt": [70] * (MAX_LEN + 1)}), 400)
        assert error["code"] == "context_length_exceeded"
        error = check_error(await api.http.post(COMPLETIONS, json={"prompt": [384]}), 400)
        assert error["param"] == "prompt[0]"


SETTING: dict[str, Any] = {  # a value that asks for something, for each field we lack
    "add_generation_prompt": False,
    "add_special_tokens": "neither",
    "echo": True,
    "early_stopping": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "best_of": 10**6,
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "modalities": ["audio"],
    "verbosity": "low",
}


@pytest.mark.parametrize(
    ("path", "good", "fields"),
    [(COMPLETIONS, GOOD, COMPLETION_UNSUPPORTED), (CHATS, CHAT, CHAT_UNSUPPORTED)],
)
async def test_fields_we_lack(
    words: Path, path: str, good: dict[str, Any], fields: dict[str, tuple[Any, ...]]
) -> None:
    async with serving(words) as api:
        for name in fields:
            error = check_error(await api.http.post(path, json={**good, name: SETTING.get(name, 1.25)}), 400)
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert api.service.requests == []
        plain = (await api.http.post(path, json=good)).json()["choices"]
        defaults = {name: values[0] if values else None for name, values in fields.items()}
        for extra in (dict.fromkeys(fields), defaults):
            reply = await api.http.post(path, json={**good, **extra})
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"] == plain


async def test_zero_is_not_false(words: Path) -> None:
    async with serving(words) as api:
        for name, value in [("frequency_penalty", False), ("logprobs", 0), ("use_beam_search", 0)]:
            check_error(await api.http.post(CHATS, json={**CHAT, name: value}), 400)
        assert (await api.http.post(CHATS, json={**CHAT, "frequency_penalty": 0.0})).status_code == 200


async def test_unknown_names_are_ignored(words: Path) -> None:
    async with serving(words) as api:
        extra = {
            "foo": 1,
            "metadata": {"a": "b"},
            "store": False,
            "request_id": "same",
            "user": "me",
            "service_tier": "auto",
        }
        reply = await api.http.post(COMPLETIONS, json={**GOOD, **extra})
        assert reply.json()["choices"][0]["text"] == "ab"
        assert reply.json()["id"] != "same"


async def test_stream_options(words: Path) -> None:
    async with serving(words) as api:
        for options in ({"include_usage": True}, {}):
            error = check_error(await api.http.post(CHATS, json={**CHAT, "stream_options": options}), 400)
            assert error["param"] == "stream_options"
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": 1}}
        assert (
            check_error(await api.http.post(CHATS, json=body), 400)["param"] == "stream_options.include_usage"
        )
        body["stream_options"] = {"continuous_usage_stats": True}
        assert (
            check_error(await api.http.post(CHATS, json=body), 400)["param"]
            == "stream_options.continuous_usage_stats"
        )
        assert (await api.http.post(CHATS, json={**CHAT, "stream_options": None})).status_code == 200


async def test_models(words: Path) -> None:
    async with serving(words) as api:
        for asked, echoed in [(None, "tiny"), ("tiny", "tiny"), ("tiny@native", "tiny@native")]:
            reply = await api.http.post(COMPLETIONS, json={**GOOD, "model": asked})
            assert reply.json()["model"] == echoed
        for path, good in ((COMPLETIONS, GOOD), (CHATS, CHAT)):
            error = check_error(await api.http.post(path, json={**good, "model": "gpt-4"}), 404)
            assert error["code"] == "model_not_found"
            assert "tiny" in error["message"]
