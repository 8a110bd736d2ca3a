"""Log-probabilities in every shape: the fake model always finds `a` the likeliest, then `b`, and so on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from server.api.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, scored
from server.engine.request import Request, SamplingParams, TokenScore
from server.text.echo import echo_of_ids
from server.text.generate import ChoiceDelta
from server.text.prepare import Prepared
from server.text.scores import Scores
from server.text.tokenizer import Tokenizer
from tests.api.test_answers import CC, EOS, C, asked, events, spelled
from tests.api.test_bodies import check_error
from tests.support.api import serving
from tests.support.fake_service import FakeService, logprob_of

A = 67  # ids 67 to 92 are the letters


def chat_entry(token: int, name: str, raw: list[int] | None = None) -> dict[str, Any]:
    return {
        "token": name,
        "logprob": logprob_of(token),
        "bytes": list(name.encode()) if raw is None else raw,
    }


def letters(count: int) -> list[dict[str, Any]]:
    return [chat_entry(A + i, chr(97 + i)) for i in range(count)]


async def test_chat_shape(words: Path) -> None:
    """An entry for each token of the usage, the chosen one first of all, the likeliest from high to low."""
    async with serving(words) as api:
        for top in (None, 0, 3, 20):
            body = asked(CC, max_tokens=3, logprobs=True, top_logprobs=top)
            choice = (await api.http.post(CC, json=body)).json()["choices"][0]
            likeliest = letters(top or 0)
            assert choice["message"]["content"] == "abc"
            assert choice["logprobs"] == {
                "content": [{**entry, "top_logprobs": likeliest} for entry in letters(3)],
                "refusal": None,
            }
        for fields in ({"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
            choice = (await api.http.post(CC, json=asked(CC, **fields))).json()["choices"][0]
            assert choice["logprobs"] is None and "prompt_logprobs" not in choice


async def test_completion_shape(words: Path) -> None:
    """Lists in step; the token itself always belongs to the likeliest, which are so k or k + 1."""
    async with serving(words) as api:
        for best in (0, 1, 5):
            choice = (await api.http.post(C, json=asked(C, max_tokens=3, logprobs=best))).json()["choices"][0]
            likeliest = {chr(97 + i): logprob_of(A + i) for i in range(best)}
            values = [logprob_of(A + i) for i in range(3)]
            assert choice["logprobs"] == {
                "tokens": ["a", "b", "c"],
                "token_logprobs": values,
                "top_logprobs": [likeliest | {chr(97 + i): values[i]} for i in range(3)],
                "text_offset": [0, 1, 2],
            }


async def test_a_stream_brings_the_same_in_pieces(words: Path) -> None:
    """Also where the text is held back, or cut off at a stop string; the last chunk of a choice has none."""
    cases: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"stop": "cd"},
        {"stop": "dx"},
        {"stop": "cd", "include_stop_str_in_output": True},
        {"stop_token_ids": [A + 3]},
    ]
    async with serving(words, FakeService(pace=0.002)) as api:  # each token in a hand-over of its own
        for fields, (path, wish) in itertools.product(
            cases, ((C, {"logprobs": 2}), (CC, {"logprobs": True, "top_logprobs": 2}))
        ):
            body = asked(path, **fields, **wish)
            whole = (await api.http.post(path, json=body)).json()
            chunks = await events(api, path, body)
            for choice in whole["choices"]:
                own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
                assert own[-1]["logprobs"] is None and own[-1]["finish_reason"]
                told = [chunk["logprobs"] for chunk in own if chunk["logprobs"] is not None]
                joined: dict[str, Any] = {}
                for part in told:
                    for name, values in part.items():
                        joined[name] = values if values is None else [*joined.get(name, []), *values]
                assert joined == choice["logprobs"]
            lengths = [len(next(iter(c["logprobs"].values()))) for c in whole["choices"]]
            assert sum(lengths) == whole["usage"]["completion_tokens"]


async def test_parts_of_characters_and_marks(words: Path) -> None:
    """Bytes join to the text; a part of a character, and a mark that adds no text, are named."""
    tokenizer = Tokenizer.from_folder(words)
    llama = tokenizer.encode("🦙")
    assert len(llama) > 1
    script = dict(enumerate([A, *llama, 1, A + 1, EOS]))
    names = ["a", *("\ufffd" * len(llama)), "<|im_start|>", "b", "<|im_end|>"]
    async with serving(words, FakeService(script=spelled(script))) as api:
        body = asked(CC, max_tokens=20, logprobs=True)
        choice = (await api.http.post(CC, json=body)).json()["choices"][0]
        assert choice["message"]["content"] == "a🦙b"
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == names
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "a🦙b".encode()
        assert [entry["bytes"] for entry in content[1:-3]] == [[byte] for byte in "🦙".encode()]
        choice = (await api.http.post(C, json=asked(C, max_tokens=20, logprobs=0))).json()["choices"][0]
        told = choice["logprobs"]
        spelt = [f"bytes:\\x{byte:02x}" for byte in "🦙".encode()]
        assert told["tokens"] == ["a", *spelt, "<|im_start|>", "b", "<|im_end|>"]
        assert told["text_offset"] == [0, *([1] * len(llama)), 2, 2, 3]


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["abc", [A, A + 1, A + 2], ["abc", "xy"]])
async def test_echo(words: Path, prompt: Any, tokens: int) -> None:
    """The prompt's tokens come first, the first of them without a score, and each choice has its own list."""
    prompts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt[0], str) else ["abc"]
    ids = [Tokenizer.from_folder(words).encode(text) for text in prompts]
    async with serving(words) as api:
        body = {"prompt": prompt, "echo": True, "max_tokens": tokens, "logprobs": 1, "n": 2}
        reply = (await api.http.post(C, json=body)).json()
        assert reply["usage"]["completion_tokens"] == tokens * len(prompts) * 2
        assert len(api.service.requests) == 1
        for choice in reply["choices"]:
            text, own = prompts[choice["index"] // 2], [*ids[choice["index"] // 2], *([A] * tokens)]
            assert (choice["text"], choice["finish_reason"]) == (text + "a" * tokens, "length")
            told = choice["logprobs"]
            assert told["tokens"] == list(text + "a" * tokens)
            assert told["token_logprobs"] == [None, *(logprob_of(token) for token in own[1:])]
            assert told["top_logprobs"][0] is None
            assert all(top["a"] == logprob_of(A) for top in told["top_logprobs"][1:])
            assert told["text_offset"] == list(range(len(own)))
        chunks = [chunk["choices"][0] for chunk in await events(api, C, body)]
        for choice in reply["choices"]:
            own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in own) == choice["text"]
            told = [chunk["logprobs"] for chunk in own if chunk["logprobs"] is not None]
            for name, values in choice["logprobs"].items():
                assert [value for part in told for value in part[name]] == values


async def test_echo_of_nothing_else_needs_no_engine(words: Path) -> None:
    async with serving(words) as api:
        body = {"prompt": "abc", "echo": True, "max_tokens": 0}
        choice = (await api.http.post(C, json=body)).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("abc", None)
        body = {"prompt": "abc", "max_tokens": 0, "logprobs": 1}
        choice = (await api.http.post(C, json=body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert choice["logprobs"] == {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        assert api.service.requests == []


async def test_prompt_logprobs(words: Path) -> None:
    """vLLM's field, on each choice: null, then an object by id for each token of the prompt."""

    def entry(token: int, name: str, rank: int | None) -> dict[str, Any]:
        return {str(token): {"logprob": logprob_of(token), "rank": rank, "decoded_token": name}}

    async with serving(words) as api:
        for tokens, fields in ((0, {}), (2, {}), (2, {"logprobs": 5, "echo": True}), (2, {"n": 2})):
            body = {"prompt": "acb", "max_tokens": tokens, "prompt_logprobs": 2, **fields}
            for choice in (await api.http.post(C, json=body)).json()["choices"]:
                a, b = entry(A, "a", 1), entry(A + 1, "b", 2)
                assert choice["prompt_logprobs"] == [None, entry(A + 2, "c", None) | a | b, a | b]
        body = {"prompt": "acb", "max_tokens": 0, "prompt_logprobs": 3, "logprobs": 1, "echo": True}
        (choice,) = (await api.http.post(C, json=body)).json()["choices"]
        assert len(choice["prompt_logprobs"][1]) == 3  # each list is as long as its own field says
        assert [list(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [[], ["a", "c"], ["a", "b"]]
        body = asked(CC, prompt_logprobs=0)
        choice = (await api.http.post(CC, json=body)).json()["choices"][0]
        first, *others = choice["prompt_logprobs"]
        assert first is None and all(len(entry) == 1 for entry in others)
        (ids,) = api.service.requests[-1].prompts
        assert [list(entry) for entry in others] == [[str(token)] for token in ids[1:]]
        assert choice["logprobs"] is None
        for path in (C, CC):
            error = check_error(
                await api.http.post(path, json=asked(path, prompt_logprobs=1, stream=True)), 400
            )
            assert error["param"] == "prompt_logprobs"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CC, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CC, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CC, {"logprobs": True, "top_logprobs": 1.0}, "top_logprobs"),
    (CC, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    (CC, {"top_logprobs": 3}, "top_logprobs"),
    (CC, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    (CC, {"logprobs": 1}, "logprobs"),
    (CC, {"logprobs": "true"}, "logprobs"),
    (C, {"logprobs": 6}, "logprobs"),
    (C, {"logprobs": 10**9}, "logprobs"),
    (C, {"logprobs": -1}, "logprobs"),
    (C, {"logprobs": True}, "logprobs"),
    (C, {"logprobs": 1.5}, "logprobs"),
    (C, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (C, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (CC, {"prompt_logprobs": True}, "prompt_logprobs"),
    (CC, {"logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 2000}, "top_logprobs"),
    (C, {"logprobs": 5, "n": 128, "max_tokens": 1400}, "logprobs"),
    (C, {"prompt": [[A] * 4000] * 100, "prompt_logprobs": 20}, "prompt_logprobs"),
    (C, {"prompt": [[A] * 4000] * 100, "n": 1, "echo": True, "logprobs": 5}, "logprobs"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(words: Path, stream: bool) -> None:
    async with serving(words) as api:
        for path, fields, param in REFUSED:
            body = asked(path, **fields, stream=stream)
            error = check_error(await api.http.post(path, json=body), 400)
            assert (error["param"], param in error["message"]) == (param, True), fields
        assert api.service.requests == []


def shown(tokenizer: Tokenizer, *scores: tuple[int, TokenScore]) -> tuple[Any, Any]:
    """Both shapes of these tokens."""
    request = Request("r", "native", ((5,),), 1, 9, SamplingParams(), bytes(32))
    prepared = Prepared("r", "m", "native", ((5,),), 1, 1, request, scores=Scores(5))
    news = ChoiceDelta(
        0, "", tuple(t for t, _ in scores), None, tuple(s for _, s in scores), tuple(range(len(scores)))
    )
    chat = chat_logprobs(scored(prepared, tokenizer, news) or ())
    completion = completion_logprobs(scored(prepared, tokenizer, news) or ())
    return json.loads(json.dumps(chat, allow_nan=False, default=list)), completion


def test_minus_infinity_is_floored_and_so_is_what_is_no_number(words: Path) -> None:
    tokenizer = Tokenizer.from_folder(words)
    minus, nan = float("-inf"), float("nan")
    score = TokenScore(minus, ((A, -0.5), (A + 1, minus), (A + 2, nan), (A + 3, -1e9)))
    chat, completion = shown(tokenizer, (A, score), (A + 5, score))
    json.dumps(completion, allow_nan=False)
    assert [entry["logprob"] for entry in chat["content"]] == [-9999.0, -9999.0]
    likeliest = [entry["logprob"] for entry in chat["content"][0]["top_logprobs"]]
    assert likeliest == [-0.5, -9999.0, -9999.0, -9999.0]
    assert completion["token_logprobs"] == [-9999.0, -9999.0]
    assert completion["top_logprobs"][1] == {
        "a": -0.5, "b": -9999.0, "c": -9999.0, "d": -9999.0, "f": -9999.0
    }  # fmt: skip
    (none, told) = prompt_logprobs([A, A + 1], (None, score), 1, tokenizer)
    assert none is None and told is not None
    assert told[str(A + 1)] == {"logprob": -9999.0, "rank": None, "decoded_token": "b"}


def test_ids_beyond_the_tokenizer_have_no_name(words: Path) -> None:
    """A checkpoint may have more embedding rows than its tokenizer has tokens."""
    chat, completion = shown(
        Tokenizer.from_folder(words), (5000, TokenScore(-1.0, ((5001, -0.5), (A, -2.0))))
    )
    assert chat["content"] == [
        {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": [
            {"token": "", "logprob": -0.5, "bytes": []}, {"token": "a", "logprob": -2.0, "bytes": [97]}]}
    ]  # fmt: skip
    assert completion["tokens"] == [""]
    assert completion["top_logprobs"] == [{"": -1.0, "a": -2.0}]  # its own value, not the other's


def test_of_two_that_are_spelled_the_same_the_likelier_is_shown(words: Path) -> None:
    score = TokenScore(-1.0, ((5001, -0.5), (5002, -0.75)))
    _, completion = shown(Tokenizer.from_folder(words), (A, score))
    assert completion["top_logprobs"] == [{"": -0.5, "a": -1.0}]


def test_offsets_of_an_echo_that_ends_in_half_a_character(words: Path) -> None:
    tokenizer = Tokenizer.from_folder(words)
    ids = tokenizer.encode("ab🦙")
    echo = echo_of_ids(ids[:-1], tokenizer, located=True)
    assert echo.text == "ab"
    assert echo.offsets == (0, 1, *([2] * (len(ids) - 3)))
