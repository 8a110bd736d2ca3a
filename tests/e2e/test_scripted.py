"""CHAIN: the model says exactly what a test wrote, so every character of every chunk is known.

Four kinds of failure that servers like this one are known for: D1, a character split over tokens; D6, special
tokens inside the text; D7, stop strings over several tokens; P1, the shape of chunks and why an answer ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints
from tests.support.server import Served, inside
from tests.support.sse import Streamed, read_stream

Serve = Callable[..., Served]

HELLO, WORLD, BETA, NEWLINE, IM_START, EOS = 19556, 905, 17565, 198, 1, 2
LLAMA = (10813, 116, 243)  # 🦙, one character in three tokens
NI_HAO = (18645, 250, 48392, 138)  # 你好, two characters in four tokens
D1 = ((HELLO, WORLD, *LLAMA, EOS), (NEWLINE, *NI_HAO, EOS))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Iterator[Serve]:
    """`serve(*scripts)`: a running server that follows them, started once for each set of scripts."""
    with contextlib.ExitStack() as stack:
        servers: dict[Any, Served] = {}

        def get(*scripts: tuple[int, ...]) -> Served:
            if scripts not in servers:
                folder = checkpoints.make_chain(tmp_path_factory.mktemp("chain"), *scripts)
                checkpoints.add_tokenizer(folder, smol)
                servers[scripts] = stack.enter_context(inside(folder, max_model_len=256))
            return servers[scripts]

        yield get


def complete(server: Served, prompt: Any, **fields: Any) -> tuple[dict[str, Any], Streamed]:
    """The same greedy completion twice, whole and streamed; they must agree."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 9} | fields
    return _both(server, "/v1/completions", body, lambda choice: choice["text"])


def chat(server: Served, **fields: Any) -> tuple[dict[str, Any], Streamed]:
    """The same for a chat; its rendered prompt ends with a newline, so scripts start there."""
    body = {"messages": [{"role": "user", "content": "Say it."}], "temperature": 0, "max_tokens": 9} | fields
    return _both(server, "/v1/chat/completions", body, lambda choice: choice["message"]["content"])


def _both(
    server: Served, path: str, body: dict[str, Any], text: Callable[[dict[str, Any]], str]
) -> tuple[dict[str, Any], Streamed]:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", path, json=body | options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        streamed = read_stream(response.iter_lines())
    assert streamed.done and streamed.error is None
    (choice,) = whole["choices"]
    assert isinstance(text(choice), str)
    assert streamed.text == text(choice)
    assert streamed.finish == choice["finish_reason"]
    usage = streamed.chunks[-1]["usage"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == whole["usage"][count]
    whole["text"] = text(choice)
    whole["finish"] = choice["finish_reason"]
    return whole, streamed


@pytest.mark.parametrize(
    ("script", "text"),
    [(D1[0], " world🦙"), (D1[1], "你好")],
    ids=["emoji", "chinese"],
)
def test_d1_characters_split_over_tokens(serve: Serve, script: tuple[int, ...], text: str) -> None:
    whole, streamed = complete(serve(*D1), [script[0]])
    assert whole["text"] == text
    assert not any("\ufffd" in delta for delta in streamed.deltas)
    assert whole["usage"]["completion_tokens"] == len(script) - 1
    assert whole["finish"] == "stop"
    if script[0] == NEWLINE:
        assert chat(serve(*D1))[0]["text"] == text


def test_d1_a_character_cut_off_by_the_limit(serve: Serve) -> None:
    """Half a character at the end is shown as decoding the ids shows it, and only there."""
    whole, streamed = complete(serve(*D1), [HELLO], max_tokens=3)
    assert whole["text"] == " world\ufffd"
    assert whole["finish"] == "length"
    *before, last = [delta for delta in streamed.deltas if delta]
    assert (before, last) == ([" world"], "\ufffd")


@pytest.mark.parametrize("stop", [None, ["<|im_end|>"]])
def test_d6_special_tokens_inside_the_text(serve: Serve, stop: list[str] | None) -> None:
    """Markers never show, still count, and naming one as a stop string does no harm."""
    script = (NEWLINE, HELLO, WORLD, IM_START, BETA, EOS)
    server = serve(script)
    for whole, _ in (complete(server, [HELLO], stop=stop), chat(server, stop=stop)):
        start = "Hello" if whole["object"].startswith("chat") else ""
        assert whole["text"] == f"{start} worldbeta"
        assert whole["finish"] == "stop"
        assert whole["usage"]["completion_tokens"] == (5 if start else 4)


D7 = (IM_START, HELLO, WORLD, 33203, 23960, 57, 58, EOS)  # Hello, " world", DEF, GH, I, J


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (["EFGHI"], "Hello worldD", 5),
        (["lo wo"], "Hel", 2),
        (["world", "lo"], "Hel", 1),
        (["nowhere"], "Hello worldDEFGHIJ", 7),
        (["Hello world!"], "Hello worldDEFGHIJ", 7),
        (["J"], "Hello worldDEFGHI", 6),
    ],
)
def test_d7_stop_strings(serve: Serve, stop: list[str], text: str, tokens: int) -> None:
    """The earliest match wins, no delta shows any of it, and usage ends at the token that completed it."""
    whole, streamed = complete(serve(D7), [IM_START], stop=stop)
    assert whole["text"] == text
    assert whole["finish"] == "stop"
    assert whole["usage"]["completion_tokens"] == tokens
    shown = ""
    for delta in streamed.deltas:
        shown += delta
        assert text.startswith(shown)


def test_d7_stop_is_looked_for_in_generated_text_only(serve: Serve) -> None:
    """A stop string inside an echoed prompt, or half in it, does not count."""
    server = serve(D7)
    whole, _ = complete(server, [IM_START, HELLO], stop=["Hello"], echo=True, max_tokens=2)
    assert whole["text"].endswith("Hello worldDEF")
    assert whole["finish"] == "length"
    whole, _ = complete(server, [IM_START, HELLO], stop=["lo wor"], max_tokens=2)
    assert whole["text"] == " worldDEF"


P1 = (NEWLINE, HELLO, WORLD, EOS)

FINISHES: list[tuple[str, dict[str, Any], str, str, int]] = [
    ("an eos", {}, "Hello world", "stop", 3),
    ("an eos as the last token allowed", {"max_tokens": 3}, "Hello world", "stop", 3),
    (
        "a stop string completed by the last token allowed",
        {"max_tokens": 2, "stop": "rld"},
        "Hello wo",
        "stop",
        2,
    ),
    ("the limit", {"max_tokens": 2}, "Hello world", "length", 2),
    ("a limit of one", {"max_tokens": 1}, "Hello", "length", 1),
]


@pytest.mark.parametrize(
    ("fields", "text", "finish", "tokens"), [f[1:] for f in FINISHES], ids=[f[0] for f in FINISHES]
)
def test_p1_chunks_and_finish_reasons(
    serve: Serve, fields: dict[str, Any], text: str, finish: str, tokens: int
) -> None:
    server = serve(P1)
    for whole, streamed in (complete(server, [NEWLINE], **fields), chat(server, **fields)):
        assert (whole["text"], whole["finish"]) == (text, finish)
        assert whole["usage"]["completion_tokens"] == tokens
        check_chunks(streamed, whole)


def test_p1_an_eos_as_the_first_token(serve: Serve) -> None:
    """An empty answer is an empty string, not null."""
    for whole, streamed in (complete(serve((NEWLINE, EOS)), [NEWLINE]), chat(serve((NEWLINE, EOS)))):
        assert (whole["text"], whole["finish"]) == ("", "stop")
        assert whole["usage"]["completion_tokens"] == 1
        check_chunks(streamed, whole)


def check_chunks(streamed: Streamed, whole: dict[str, Any]) -> None:
    """One id, time and model; the role first and once; a finish reason in one chunk, null in the others."""
    *chunks, usage = streamed.chunks
    assert usage["choices"] == []
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert (
        len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in streamed.chunks})
        == 1
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert [choice["index"] for choice in choices] == [0] * len(choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole["finish"]]
    if whole["object"] == "chat.completion":
        assert streamed.chunks[0]["object"] == "chat.completion.chunk"
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in choices[1:])
    else:
        assert streamed.chunks[0]["object"] == "text_completion"


def test_chain_follows_its_script_in_transformers_too(tmp_path: Path) -> None:
    """The fixture itself: the reference says the same, by a wide margin."""
    from tests.support.reference import load_reference

    folder = checkpoints.make_chain(tmp_path, (5, 6, 7, 8, 2), vocab=64)
    reference = load_reference(folder)
    assert reference.greedy([5], 9, eos=[2]) == [6, 7, 8, 2]
    best = reference.last_logits([9, 9, 9, 5]).topk(2).values
    assert float(best[0] - best[1]) > 50
