"""V5, V6: bodies that are no JSON, or hold numbers that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.test_bodies import BROKEN, nested
from tests.support.refusals import (
    CHATS,
    COMPLETIONS,
    GOOD,
    check_error,
    raw,
)
from tests.support.scripted import EOS, HELLO, NEWLINE, WORLD, complete
from tests.support.server import Served
from tests.support.standing import Known

Serves = Callable[..., Served]


@pytest.fixture
def server(served: Serves, chain: Callable[..., Path]) -> Served:
    return served(chain((NEWLINE, HELLO, WORLD, EOS)), Known([HELLO], " world", 4), kv_memory=16 << 20)


# ---- V5: numbers that are none ----------------------------------------------------------------------------

NOT_NUMBERS = (
    '"temperature":NaN',
    '"temperature":1e999',
    '"temperature":"NaN"',
    '"logit_bias":{"5":NaN}',
    '"top_p":-Infinity',
    '"temperature":-Infinity',
    '"temperature":-1e999',
    '"top_p":NaN',
    '"min_p":Infinity',
    '"presence_penalty":NaN',
    '"frequency_penalty":1e999',
    '"repetition_penalty":NaN',
    '"max_tokens":NaN',
    '"max_tokens":1e999',
    '"n":NaN',
    '"seed":Infinity',
    '"seed":1e999',
    '"top_k":NaN',
    '"logprobs":NaN',
    '"stop":NaN',
    '"foo":NaN',
    '"metadata":{"a":[1,{"b":-Infinity}]}',
    '"temperature":"Infinity"',
    '"logit_bias":{"5":1e999}',
    '"stream_options":{"include_usage":NaN}',
    '"temperature":nan',
    '"temperature":+1',
    '"temperature":.5',
    '"temperature":1.',
    '"temperature":0x1',
    '"temperature":1e400',
)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_v5_numbers_that_are_none_are_a_400(server: Served, path: str) -> None:
    begin = '{"prompt":"a",' if path == COMPLETIONS else '{"messages":[{"role":"user","content":"a"}],'
    for field in NOT_NUMBERS:
        for stream in ("", ',"stream":true'):
            check_error(raw(server, path, f"{begin}{field}{stream}}}".encode()))
    for prompt in ("[NaN]", "[1e999]", "[[-Infinity]]", "NaN"):
        check_error(raw(server, COMPLETIONS, f'{{"prompt":{prompt}}}'.encode()))


# ---- V6: broken bodies ------------------------------------------------------------------------------------

ALSO_BROKEN: dict[str, bytes] = {
    "nul bytes": b"\0" * 20,
    "a string": b'"prompt"',
    "true": b"true",
    "single quotes": b"{'prompt':'a'}",
    "a trailing comma": b'{"prompt":"a",}',
    "a comment": b'{"prompt":"a" /* no */}',
    "an open string": b'{"prompt":"a',
    "an open object": b'{"prompt":"a"',
    "a raw newline in a string": b'{"prompt":"a\nb"}',
    "a raw nul in a string": b'{"prompt":"a\0b"}',
    "utf-16 without a mark": json.dumps({"prompt": "a"}).encode("utf-16-le"),
    "utf-32": json.dumps({"prompt": "a"}).encode("utf-32"),
    "latin-1": '{"prompt":"é"}'.encode("latin-1"),
    "an overlong form": b'{"prompt":"\xc0\xaf"}',
    "a surrogate in utf-8": b'{"prompt":"\xed\xa0\x80"}',
    "stream as a string": b'{"prompt":"a","stream":"true"}',
    "stream as a number": b'{"prompt":"a","stream":1}',
    "nested arrays as a prompt": b'{"prompt":' + nested(900).encode() + b"}",
    "20k arrays, never closed": b'{"prompt":' + b"[" * 20_000,
    "20k objects": b'{"a":' * 20_000,
    "5000 digits as a token": b'{"prompt":[' + b"9" * 5000 + b"]}",
    "5000 digits of temperature": b'{"prompt":"a","temperature":0.' + b"9" * 5000 + b"e-99999999}",
    "digits": b'{"prompt":"a","max_tokens":' + b"9" * 4000 + b"}",
    "two bodies": b"{}\n{}",
    "event stream": b'data: {"prompt":"a"}\n\n',
}
FINE = ("5000 digits of temperature",)  # a long way to write a number that is in range
OF_GENERATION = ("stream as a string", "stream as a number", "digits", *FINE)  # names that others ignore


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_v6_broken_bodies_are_a_400_that_does_not_repeat_them(server: Served, path: str) -> None:
    """Not FastAPI's 422 with `detail`."""
    for name, body in {**BROKEN, **ALSO_BROKEN}.items():
        reply = raw(server, path, body)
        if name in OF_GENERATION and (name in FINE or path == "/tokenize"):
            assert reply.status_code == (200 if path in (COMPLETIONS, "/tokenize") else 400), (
                name,
                reply.text,
            )
            continue
        error = check_error(reply)
        assert "[[[" not in error["message"] and "99999" not in error["message"], (name, error)


def test_v6_media_types(server: Served) -> None:
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"):
        check_error(raw(server, COMPLETIONS, body, kind), 415)
    for kind in ("application/json", "Application/JSON; charset=UTF-8"):
        assert raw(server, COMPLETIONS, body, kind).status_code == 200


def test_v6_nul_and_every_other_character_are_legal_text(server: Served) -> None:
    for text in (
        "a\0b",
        "\0",
        "\x7f\x1b[2J",
        "\ufeffa",
        "\uffff\ufffe",
        "\U0010ffff",
        "\u2028\u2029\x85",
        "\ud7ff\ue000",
    ):
        whole, _ = complete(server, text, echo=True, max_tokens=1)
        assert whole["text"].startswith(text)
        reply = server.http.post(CHATS, json={**GOOD[CHATS], "messages": [{"role": "user", "content": text}]})
        assert reply.status_code == 200, reply.text


def test_v6_names_that_come_twice(server: Served) -> None:
    """The last one counts, as in most readers of JSON; it is never an error of ours."""
    body = b'{"prompt":"a","prompt":[19556],"temperature":0,"max_tokens":4}'
    assert raw(server, COMPLETIONS, body).json()["choices"][0]["text"] == " world"
