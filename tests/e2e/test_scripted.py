"""CHAIN: the model says exactly what a test wrote, so every character of every chunk is known.

Three kinds of failure that such servers are known for: D1, a character split over tokens; D6, special
tokens inside the text; D7, stop strings over several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.scripted import (
    BETA,
    EOS,
    HELLO,
    IM_START,
    LLAMA,
    NEWLINE,
    NI_HAO,
    WORLD,
    Serve,
    chain_servers,
    chat,
    complete,
)

D1 = ((HELLO, WORLD, *LLAMA, EOS), (NEWLINE, *NI_HAO, EOS))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Iterator[Serve]:
    with chain_servers(lambda: tmp_path_factory.mktemp("chain"), smol) as get:
        yield get


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


def test_chain_follows_its_script_in_transformers_too(tmp_path: Path) -> None:
    """The fixture itself: the reference says the same, by a wide margin."""
    from tests.support.reference import load_reference

    folder = checkpoints.make_chain(tmp_path, (5, 6, 7, 8, 2), vocab=64)
    reference = load_reference(folder)
    assert reference.greedy([5], 9, eos=[2]) == [6, 7, 8, 2]
    best = reference.last_logits([9, 9, 9, 5]).topk(2).values
    assert float(best[0] - best[1]) > 50
