"""Answers in one piece and as streams: shapes, ends, order, usage. The fake model says the alphabet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.engine.request import Request
from tests.support.api import Api, serving
from tests.support.fake_service import FakeService

C, CC = "/v1/completions", "/v1/chat/completions"
EOS = 2


def asked(path: str, **fields: Any) -> dict[str, Any]:
    what = {"prompt": "x"} if path == C else {"messages": [{"role": "user", "content": "x"}]}
    return {"max_tokens": 5, **what, **fields}


async def events(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that must end with [DONE]."""
    reply = await api.http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    parts = reply.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def spelled(script: dict[int, int], default: int = 67) -> Any:
    """A script by position."""

    def token(request: Request, index: int, position: int) -> int:
        return script.get(position, default + position)

    return token


async def test_completion_shape(words: Path) -> None:
    async with serving(words) as api:
        reply = await api.http.post(C, json=asked(C))
    body = reply.json()
    assert reply.headers["x-request-id"] == body["id"]
    assert body["id"].startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    usage = body.pop("usage")
    assert body == {
        "id": body["id"],
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [{"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length"}],
    }
    # 1 prompt token and 4 written output tokens in one logical block of 16: 2 heads, 64 bytes a token each.
    assert usage == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "kv_cache": {
            "bytes_per_token": 128,
            "blocks": 2,
            "bytes_peak": 2048,
            "bytes_exclusive": 2048,
            "tail_waste_bytes": 11 * 128,
            "cached_tokens": 0,
            "mha_equivalent_bytes": 4096,
            "saved_ratio": 0.5,
        },
    }


async def test_chat_shape(words: Path) -> None:
    async with serving(words) as api:
        body = (await api.http.post(CC, json=asked(CC))).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abcde", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5


@pytest.mark.parametrize("path", [C, CC])
async def test_every_end(words: Path, path: str) -> None:
    """The finish and the text agree between the two forms, and come once, in a last chunk of their own."""
    cases: list[tuple[dict[int, int], dict[str, Any], str, str]] = [
        ({2: EOS}, {}, "ab", "stop"),
        ({4: EOS}, {}, "abcd", "stop"),  # exactly at max_tokens
        ({}, {"stop": "e"}, "abcd", "stop"),  # completed by the last allowed token
        ({}, {"stop": ["cd"]}, "ab", "stop"),
        ({}, {"stop_token_ids": [69]}, "ab", "stop"),
        ({}, {}, "abcde", "length"),
        ({}, {"max_tokens": 1}, "a", "length"),
        ({0: EOS}, {}, "", "stop"),
        ({0: EOS}, {"ignore_eos": True}, "bcde", "length"),
    ]
    service = FakeService()
    async with serving(words, service) as api:
        for script, fields, text, finish in cases:
            service.script = spelled(script)
            whole = (await api.http.post(path, json=asked(path, **fields))).json()["choices"][0]
            assert (whole["finish_reason"], text_of(whole)) == (finish, text), (script, fields)
            chunks = await events(api, path, asked(path, **fields))
            choices = [chunk["choices"][0] for chunk in chunks]
            assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [finish]
            assert "".join(text_of(c) for c in choices) == text
            assert text_of(choices[-1]) == ""


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta")).get("content", ""))


async def test_chat_chunks(words: Path) -> None:
    async with serving(words) as api:
        chunks = await events(api, CC, asked(CC, max_tokens=2))
        heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks]
        assert heads == [heads[0]] * 4
        assert heads[0].keys() == {"id", "object", "created", "model", "system_fingerprint"}
        assert heads[0]["object"] == "chat.completion.chunk"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]


async def test_completion_chunks(words: Path) -> None:
    async with serving(words) as api:
        chunks = await events(api, C, asked(C, max_tokens=2))
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_prompts_of_every_shape(words: Path) -> None:
    async with serving(words) as api:
        for prompt, count in [("ab", 1), (["ab", "c"], 2), ([67, 68], 1), ([[67], [68, 69]], 2)]:
            reply = (await api.http.post(C, json=asked(C, prompt=prompt))).json()
            assert len(reply["choices"]) == count
        assert api.service.requests[-1].prompts == ((67,), (68, 69))


async def test_content_parts(words: Path) -> None:
    async with serving(words) as api:
        contents: list[Any] = ["Hello", [{"type": "text", "text": "Hello"}]]
        for content in contents:
            await api.http.post(CC, json=asked(CC, messages=[{"role": "user", "content": content}]))
        first, second = api.service.requests
        assert first.prompts == second.prompts


async def test_echo_without_output(words: Path) -> None:
    async with serving(words) as api:
        body = asked(C, prompt="ab", echo=True, max_tokens=0)
        reply = (await api.http.post(C, json=body)).json()
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("ab", "length")
        assert reply["usage"]["completion_tokens"] == 0
        assert "".join(text_of(chunk["choices"][0]) for chunk in await events(api, C, body)) == "ab"


async def test_characters_in_pieces(words: Path) -> None:
    """Three tokens make one character; what a stream says is ASCII on the wire and whole when read."""
    from server.text.tokenizer import Tokenizer

    ids = Tokenizer.from_folder(words).encode("\N{LLAMA}\u2028")
    service = FakeService(script=spelled(dict(enumerate(ids))))
    async with serving(words, service) as api:
        body = asked(C, max_tokens=len(ids))
        raw = await api.http.post(C, json={**body, "stream": True})
        assert raw.content.isascii()
        text = "".join(text_of(chunk["choices"][0]) for chunk in await events(api, C, body))
        assert text == (await api.http.post(C, json=body)).json()["choices"][0]["text"] == "\N{LLAMA}\u2028"


async def test_keys_and_salts_reach_the_cache_root(words: Path) -> None:
    def bearer(key: str) -> httpx.Headers:
        return httpx.Headers({"authorization": f"Bearer {key}"})

    async with serving(words, api_keys=("one", "two")) as api:
        for key, salt in [("one", None), ("one", None), ("two", None), ("one", "s")]:
            reply = await api.http.post(C, json=asked(C, cache_salt=salt), headers=bearer(key))
            assert reply.status_code == 200
        roots = [request.cache_root for request in api.service.requests]
        assert roots[0] == roots[1]
        assert len(set(roots)) == 3
