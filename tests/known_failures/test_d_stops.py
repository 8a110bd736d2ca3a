"""D6, D7: markers and stop strings. What the client is not to see, it does not see, not even in part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.text.tokenizer import Tokenizer
from tests.support import checkpoints
from tests.support.reference import load_reference_tokenizer
from tests.support.scripted import (
    BETA,
    EOS,
    HELLO,
    IM_START,
    NEWLINE,
    WORLD,
    chat,
    complete,
)
from tests.support.server import Served
from tests.support.standing import Known
from tests.support.tokenizer_folders import byte_level

Serves = Callable[..., Served]
Chain = Callable[..., Path]

# ---- D6: special tokens in the output --------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, ["<|im_end|>"], ["<|im_start|>"]])
def test_d6_special_tokens_inside_the_text(served: Serves, chain: Chain, stop: list[str] | None) -> None:
    """Markers never show, still count, and naming one as a stop string does no harm.

    A stop string is looked for in the text, and a marker is no part of it.
    """
    server = served(
        chain((NEWLINE, HELLO, WORLD, IM_START, BETA, EOS)), Known([NEWLINE], "Hello worldbeta", 9)
    )
    for whole, streamed in (complete(server, [HELLO], stop=stop), chat(server, stop=stop)):
        start = "Hello" if whole["object"].startswith("chat") else ""
        assert whole["text"] == f"{start} worldbeta"
        assert whole["finish"] == "stop"
        assert whole["usage"]["completion_tokens"] == (5 if start else 4)
        assert not any("<|" in delta for delta in streamed.deltas)


def test_d6_scores_count_the_special_ids(served: Serves, chain: Chain) -> None:
    """Logprobs have an entry for each id of usage, the marker and the end mark among them."""
    server = served(
        chain((NEWLINE, HELLO, WORLD, IM_START, BETA, EOS)), Known([NEWLINE], "Hello worldbeta", 9)
    )
    body: dict[str, Any] = {"prompt": [HELLO], "temperature": 0, "max_tokens": 9, "logprobs": 1}
    answer = server.http.post("/v1/completions", json=body).json()
    scores = answer["choices"][0]["logprobs"]
    assert answer["usage"]["completion_tokens"] == len(scores["token_logprobs"]) == 4
    assert all(-1e-3 < score <= 0 for score in scores["token_logprobs"])
    messages = [{"role": "user", "content": "Say it."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 9, "logprobs": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello worldbeta"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["content"]) == 5


def test_d6_a_marker_as_a_stop_id_or_as_the_first_token(served: Serves, chain: Chain) -> None:
    """`stop_token_ids` is how a marker ends an answer; one that comes first leaves an empty text."""
    server = served(
        chain((NEWLINE, HELLO, WORLD, IM_START, BETA, EOS)), Known([NEWLINE], "Hello worldbeta", 9)
    )
    whole, _ = complete(server, [HELLO], stop_token_ids=[IM_START])
    assert (whole["text"], whole["finish"]) == (" world", "stop")
    assert whole["usage"]["completion_tokens"] == 2
    whole, _ = complete(server, [WORLD], max_tokens=1)
    assert (whole["text"], whole["finish"], whole["usage"]["completion_tokens"]) == ("", "length", 1)


def test_d6_added_tokens_that_are_not_special_are_text(served: Serves, tmp_path: Path) -> None:
    """`<tool>` is a word that the checkpoint added, `<hidden>` a marker: only the second is left out."""
    added = ({"content": "<tool>"}, {"content": "<hidden>", "special": True})
    byte_level(added=added)(tmp_path)
    newline, b, w = Tokenizer.from_folder(tmp_path).encode("\nbw")
    tool, hidden = checkpoints.BPE_VOCAB, checkpoints.BPE_VOCAB + 1
    script = [newline, b, tool, w, hidden, EOS]
    checkpoints.make_chain(tmp_path, script, vocab=checkpoints.BPE_VOCAB + 2, max_position=256)
    text = load_reference_tokenizer(tmp_path).decode(script[1:], skip_special_tokens=True)
    assert text == "b<tool>w"
    server = served(tmp_path, Known([newline], text, 9))
    whole, _ = complete(server, [newline])
    assert (whole["text"], whole["usage"]["completion_tokens"]) == (text, 5)
    whole, _ = complete(server, [newline], stop=["ool"])
    assert whole["text"] == "b<t"
    assert complete(server, [newline], stop=["<hidden>"])[0]["text"] == text


# ---- D7: stop strings ------------------------------------------------------------------------------------

D7 = (IM_START, HELLO, WORLD, 33203, 23960, 57, 58, EOS)  # Hello, " world", DEF, GH, I, J
D7_TEXT = "Hello worldDEFGHIJ"


@pytest.fixture
def alphabet(served: Serves, chain: Chain) -> Served:
    return served(chain(D7), Known([IM_START], D7_TEXT, 9))


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (["EFGHI"], "Hello worldD", 5),
        (["lo wo"], "Hel", 2),
        (["world", "lo"], "Hel", 1),
        (["lo", "world"], "Hel", 1),
        (["nowhere"], D7_TEXT, 7),
        (["Hello world!"], D7_TEXT, 7),  # held back to the last character, and then given after all
        (["J"], "Hello worldDEFGHI", 6),
        (["H"], "", 1),
        ([D7_TEXT], "", 6),
        ([" "], "Hello", 2),
        (["GHI", "FG"], "Hello worldDE", 4),  # the one that is complete first
        (["DEF", "worldDEF"], "Hello ", 3),  # of two complete at once the longer
        ("EFGHI", "Hello worldD", 5),
    ],
)
def test_d7_stop_strings(alphabet: Served, stop: Any, text: str, tokens: int) -> None:
    """The earliest match wins, no delta shows any of it, and usage ends at the token that completed it."""
    whole, streamed = complete(alphabet, [IM_START], stop=stop)
    assert whole["text"] == text
    assert whole["finish"] == "stop"
    assert whole["usage"]["completion_tokens"] == tokens
    shown = ""
    for delta in streamed.deltas:
        shown += delta
        assert text.startswith(shown)


def test_d7_stop_is_looked_for_in_generated_text_only(alphabet: Served) -> None:
    """A stop string inside an echoed prompt, or half in it, does not count."""
    whole, _ = complete(alphabet, [IM_START, HELLO], stop=["Hello"], echo=True, max_tokens=2)
    assert whole["text"].endswith("Hello worldDEF")
    assert whole["finish"] == "length"
    for echo in (True, False):
        whole, _ = complete(alphabet, [IM_START, HELLO], stop=["lo wor"], max_tokens=2, echo=echo)
        assert whole["text"] == ("Hello" if echo else "") + " worldDEF"


def test_d7_a_stop_in_one_choice_leaves_the_others(alphabet: Served) -> None:
    """Prompts at different places of the script: the stop ends only where it comes."""
    body = {"prompt": [[IM_START], [57], [33203]], "temperature": 0, "max_tokens": 9, "stop": ["GH"]}
    choices = alphabet.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hello worldDEF", "J", ""]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
