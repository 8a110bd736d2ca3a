"""V1, V2: prompts that the model cannot read, or not as a whole. Nothing of them is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import (
    CHATS,
    COMPLETIONS,
    CONTEXT,
    MESSAGES,
    VOCAB,
    check_error,
    refused,
    requests_run,
)
from tests.support.scripted import EOS, HELLO, NEWLINE, WORLD
from tests.support.server import Served
from tests.support.standing import Known

Serves = Callable[..., Served]


@pytest.fixture
def server(served: Serves, chain: Callable[..., Path]) -> Served:
    return served(chain((NEWLINE, HELLO, WORLD, EOS)), Known([HELLO], " world", 4), kv_memory=16 << 20)


# ---- V1: prompt ids out of range, empty prompts -----------------------------------------------------------

NO_IDS: list[Any] = [
    [VOCAB],
    [-1],
    [1.5],
    [True],
    [2**40],
    [HELLO, "a"],
    ["a", HELLO],
    [[HELLO], [VOCAB]],
    [[VOCAB]],
    [None],
    [[None]],
    [-(2**63)],
    [2**63],
    [2**64],
    [1e3],
    [False],
    [[HELLO, True]],
    [{}],
    [[[1]]],
    [[HELLO], "a"],
]
NO_TOKENS: list[Any] = ["", [""], [], [[]], ["a", ""], [[1], []], ["", "a"], [[], [1]], ["a", "", "b"]]
NO_PROMPT: list[Any] = [None, 5, True, {}, {"text": "a"}]


def test_v1_ids_that_the_model_has_not_and_prompts_without_tokens(server: Served) -> None:
    before = requests_run(server)
    for prompt in (*NO_IDS, *NO_TOKENS, *NO_PROMPT):
        error = refused(server, COMPLETIONS, {"prompt": prompt})
        assert str(error["param"]).startswith("prompt"), (prompt, error)
    error = refused(server, CHATS, {"messages": []})
    assert error["param"] == "messages"
    assert requests_run(server) == before
    body = {"prompt": [VOCAB], "max_tokens": 1}
    message = check_error(server.http.post(COMPLETIONS, json=body))["message"]
    assert str(VOCAB) in message and str(VOCAB - 1) in message


def test_v1_the_last_row_is_a_token(server: Served) -> None:
    for prompt in ([VOCAB - 1], [[VOCAB - 1], [0]], [0]):
        reply = server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
        assert reply.status_code == 200, reply.text


def test_v1_rows_beyond_the_tokenizer_are_rows(served: Serves, chain: Callable[..., Path]) -> None:
    """Checkpoints pad their tables: every row may be read, the first beyond them may not."""
    rows = 49280
    folder = chain((HELLO, WORLD, EOS), vocab=rows)
    server = served(folder, Known([HELLO], " world", 4))
    for token, status in ((VOCAB, 200), (rows - 1, 200), (rows, 400)):
        reply = server.http.post(COMPLETIONS, json={"prompt": [token], "max_tokens": 1})
        assert reply.status_code == status, reply.text


def test_v1_with_a_tokenizer_that_adds_a_bos_an_empty_text_is_one_token(
    served: Serves, sp_served: Path
) -> None:
    from tests.support.standing import known_from_reference

    server = served(sp_served, known_from_reference(sp_served, "the rain", 6))
    for prompt, tokens in (("", 1), ([""], 1), (["", ""], 2)):
        reply = server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == tokens
    for prompt in ([], [[]]):
        check_error(server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1}))


def test_v1_ids_to_decode(server: Served) -> None:
    """/detokenize takes ids too: what is no id is refused, what has no text has none."""
    for tokens in ([1.5], [True], ["a"], 5, None, [[1]]):
        check_error(server.http.post("/detokenize", json={"tokens": tokens}))
    for tokens in ([-1], [VOCAB], [2**40], [HELLO, 2**63]):
        reply = server.http.post("/detokenize", json={"tokens": tokens})
        assert reply.status_code in (200, 400), reply.text


# ---- V2: over-long prompts --------------------------------------------------------------------------------

LONG = 9000
WORDS = "Hello" + " world" * (LONG - 1)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [HELLO] * LONG}, "prompt"),
        (COMPLETIONS, {"prompt": WORDS}, "prompt"),
        (COMPLETIONS, {"prompt": [[HELLO], [HELLO] * LONG, [WORLD]]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", WORDS]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [HELLO] * LONG, "echo": True, "max_tokens": 0}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": WORDS}]}, "messages"),
        (CHATS, {"messages": [*MESSAGES, {"role": "user", "content": WORDS}]}, "messages"),
        (
            CHATS,
            {"messages": [{"role": "system", "content": WORDS}, *MESSAGES], "max_tokens": None},
            "messages",
        ),
    ],
)
def test_v2_a_prompt_that_is_too_long_is_refused_whole(
    server: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    before = requests_run(server)
    error = refused(server, path, fields)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    numbers = [int(word) for word in error["message"].replace(".", " ").split() if word.isdigit()]
    assert CONTEXT in numbers and LONG <= max(numbers) < LONG + 100
    assert requests_run(server) == before, "a part of it was run"


def test_v2_the_edge_is_exact(server: Served) -> None:
    """All that fits is taken to the last token, one more is not, and nothing is cut to make it fit."""
    for length, tokens, status in (
        (CONTEXT - 1, 1, 200),
        (CONTEXT, 1, 400),
        (CONTEXT, None, 400),
        (CONTEXT - 1, 2, 400),
        (CONTEXT - 1, None, 200),
        (1, CONTEXT, 400),
        (CONTEXT, 0, 200),
        (CONTEXT + 1, 0, 400),
    ):
        body = {"prompt": [WORLD] * length, "max_tokens": tokens, "temperature": 0}
        reply = server.http.post(COMPLETIONS, json=body)
        assert reply.status_code == status, (length, tokens, reply.text)
        if status == 400:
            assert check_error(reply)["code"] == "context_length_exceeded"
        else:
            assert reply.json()["usage"]["prompt_tokens"] == length
    error = refused(server, CHATS, {"max_tokens": CONTEXT})
    assert error["code"] == "context_length_exceeded"
    error = refused(server, COMPLETIONS, {"truncate_prompt_tokens": 10})
    assert error["code"] == "unsupported_parameter"
