"""Which log-probabilities may be asked for, and how many of them."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.errors import RequestError
from server.text.scores import MAX_SCORES, Scores, chat_scores, completion_scores


def test_what_is_asked() -> None:
    assert completion_scores(None, None) == Scores()
    assert [completion_scores(k, None).output for k in (0, 5)] == [0, 5]
    assert completion_scores(None, 20).prompt == 20
    assert chat_scores(None, None, None).output is None
    assert chat_scores(False, 0, None).output is None
    assert [chat_scores(True, top, None).output for top in (None, 0, 20)] == [0, 0, 20]
    assert chat_scores(None, None, 0).prompt == 0


@pytest.mark.parametrize("value", [-1, 6, 10**9, True, 1.0, "1"])
def test_a_completions_limits(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^logprobs: must be an integer from 0 to 5, got "):
        completion_scores(value, None)


@pytest.mark.parametrize("value", [-1, 21, 10**9, True, 1.0, "1"])
def test_a_chats_limits(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^top_logprobs: must be an integer from 0 to 20, got "):
        chat_scores(True, value, None)
    with pytest.raises(RequestError, match=r"^prompt_logprobs: must be an integer from 0 to 20, got "):
        chat_scores(None, None, value)


def test_top_logprobs_need_logprobs() -> None:
    for off in (None, False):
        with pytest.raises(RequestError, match=r"^top_logprobs: is allowed only with `logprobs` true, got 3"):
            chat_scores(off, 3, None)
    with pytest.raises(RequestError, match=r"^logprobs: must be true or false, got 1"):
        chat_scores(1, None, None)


def test_what_the_engine_tells_of_a_prompt() -> None:
    """The wider of the two wishes, where an echo makes the prompt a part of the answer."""
    assert Scores(5, None).of_prompt(echo=False) is None
    assert Scores(5, None).of_prompt(echo=True) == 5
    assert Scores(0, 3).of_prompt(echo=True) == 3
    assert Scores(4, 0).of_prompt(echo=True) == 4
    assert Scores(None, 0).of_prompt(echo=True) == Scores(None, 0).of_prompt(echo=False) == 0


def test_an_answer_has_a_size() -> None:
    """Prompt and output count, each token for itself and for those beside it."""
    many = MAX_SCORES // 4
    Scores(3, None).check_size(10, 1, 1, many, False)
    with pytest.raises(
        RequestError, match=f"^logprobs: .* {4 * (many + 10)} .* limit is {MAX_SCORES}"
    ) as caught:
        Scores(3, None).check_size(10, 1, 1, many, True)
    assert caught.value.param == "logprobs"
    Scores(None, 3).check_size(many // 2, 2, 2, 1000, False)
    with pytest.raises(RequestError, match=r"^prompt_logprobs: "):
        Scores(None, 3).check_size(many // 2 + 1, 2, 2, 0, False)
    with pytest.raises(RequestError, match=r"^top_logprobs: "):
        Scores(1, 1, "top_logprobs").check_size(many, 1, 1, many + 1, False)
