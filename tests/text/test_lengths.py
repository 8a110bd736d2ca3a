"""prompt + max_tokens against the context: exact at the edge, never cut down."""

from __future__ import annotations

import pytest

from server.text.errors import RequestError
from server.text.lengths import Budget, too_long


def test_what_fits_is_granted_to_the_last_token() -> None:
    assert Budget(100, 40, "max_tokens", 16).max_tokens(["prompt"], [60]) == 40
    assert Budget(100, None, "max_tokens", 16).max_tokens(["prompt"], [60]) == 16
    assert Budget(100, None, "max_tokens", 16).max_tokens(["prompt"], [99]) == 1
    assert Budget(100, None, "max_tokens", None).max_tokens(["messages"], [60]) == 40
    assert Budget(100, 0, "max_tokens", 16).max_tokens(["prompt"], [100]) == 0
    assert Budget(100, None, "max_tokens", None).max_tokens(["a", "b"], [60, 90]) == 10


@pytest.mark.parametrize(
    ("asked", "length", "param", "numbers"),
    [
        (41, 60, "max_tokens", ("60", "41", "101", "100")),
        (10**18, 60, "max_tokens", ("60", "100", str(10**18))),
        (10**4300 - 1, 60, "max_tokens", ("60", "100", "more than 30 digits")),
        (1, 100, "prompt", ("100",)),
        (None, 100, "prompt", ("100",)),
        (None, 9000, "prompt", ("9000", "100")),
        (0, 101, "prompt", ("101", "100")),
    ],
)
def test_one_token_more_is_refused_with_both_numbers(
    asked: int | None, length: int, param: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        Budget(100, asked, "max_tokens", 16).max_tokens(["prompt"], [length])
    error = caught.value
    assert (error.code, error.param, error.status) == ("context_length_exceeded", param, 400)
    assert all(number in error.message for number in numbers)


def test_one_bad_prompt_refuses_the_list() -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\] has 101 tokens") as caught:
        Budget(100, None, "max_tokens", 16).max_tokens(["prompt[0]", "prompt[1]"], [5, 101])
    assert caught.value.param == "prompt[1]"
    with pytest.raises(RequestError, match=r"prompt\[1\]: must have at least one token"):
        Budget(100, None, "max_tokens", 16).max_tokens(["prompt[0]", "prompt[1]"], [5, 0])


def test_too_long_says_where() -> None:
    assert too_long("messages", 9, 8, at_least=True).message.startswith("messages has at least 9 tokens;")


def test_a_mode_without_room_does_not_ask_for_less() -> None:
    """Where the pool holds no token in and one out in a mode, a shorter prompt is no help."""
    for limit in (0, 1):
        with pytest.raises(
            RequestError, match=rf"may have {limit}\. No prompt fits: .*another mode"
        ) as caught:
            Budget(limit, None, "max_tokens", 16).max_tokens(["prompt"], [1])
        assert caught.value.message.startswith("prompt has 1 token;")
    assert too_long("prompt", 2, 2).message.endswith("Shorten it.")
