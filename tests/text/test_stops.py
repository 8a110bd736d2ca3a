"""Stop strings, against a reading of the whole text, however it is cut into pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None, int]:
    """The emitted pieces, the stop that was hit, and after how many pieces."""
    matcher = StopMatcher(stops, include=include)
    emitted = []
    for count, piece in enumerate(pieces, 1):
        result = matcher.push(piece)
        emitted.append(result.text)
        if result.stop is not None:
            return emitted, result.stop, count
    emitted.append(matcher.finish())
    return emitted, None, len(pieces)


def whole(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, spelled out: the first to be complete, of those the longest; the text before it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "want", "pieces"),
    [
        (["EFGHI"], "Hello worldD", 5),
        (["lo wo"], "Hel", 2),
        (["world", "lo"], "Hel", 1),
        (["J"], "Hello worldDEFGHI", 6),
        (["Hello worldDEFGHIJ"], "", 6),
        (["absent"], "Hello worldDEFGHIJ", 6),
    ],
)
def test_a_stop_over_several_tokens(stops: list[str], want: str, pieces: int) -> None:
    emitted, stop, count = run(stops, ["Hello", " world", "DEF", "GH", "I", "J"])
    assert "".join(emitted) == want
    assert count == pieces
    assert (stop is None) == (stops == ["absent"])


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
)
@example(["abcd", "bc"], ["ab", "cd"])
@example(["b", "ab"], ["ab"])
def test_any_cut_gives_the_same_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    emitted, stop, count = run(stops, pieces)
    assert ("".join(emitted), stop) == whole(stops, text)
    if stop is not None:  # the hit came with the piece that completed it
        assert whole(stops, "".join(pieces[: count - 1]))[1] is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
)
@example(["aba", "b"], ["ab", "ab"])
def test_a_stop_that_belongs_to_the_answer(stops: list[str], pieces: list[str]) -> None:
    """The text ends with it, the same place ends it, and nothing waits: each piece passes as it came."""
    emitted, stop, count = run(stops, pieces, include=True)
    before, right = whole(stops, "".join(pieces))
    assert ("".join(emitted), stop) == (before + (right or ""), right)
    assert emitted[: count - 1] == pieces[: count - 1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.text(alphabet="ab", max_size=12),
)
def test_only_what_can_still_match_is_held_back(stops: list[str], text: str) -> None:
    matcher, sent = StopMatcher(stops), ""
    for index, char in enumerate(text):
        result = matcher.push(char)
        sent += result.text
        if result.stop is not None:
            return
        so_far = text[: index + 1]
        held = max((k for stop in stops for k in range(1, len(stop)) if so_far.endswith(stop[:k])), default=0)
        assert sent == so_far[: len(so_far) - held]


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything").text == "anything"
    assert matcher.finish() == ""


def test_the_worst_text_costs_no_more_than_its_length() -> None:
    stops = ["a" * 1000 + chr(0x62 + i) for i in range(16)]
    started = time.perf_counter()
    emitted, stop, _ = run(stops, ["a"] * 20_000)
    assert stop is None and "".join(emitted) == "a" * 20_000
    assert time.perf_counter() - started < 2  # re-scanning at each token: 20,000 · 16 · 1,000 steps
