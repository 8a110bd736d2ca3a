"""The four shapes of a prompt, and everything that is none of them."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.errors import RequestError
from server.text.prompts import check_ids, read_prompts


def test_the_four_shapes() -> None:
    assert read_prompts("a\x00b", 128).texts == ("a\x00b",)
    assert read_prompts(["a", ""], 128).texts == ("a", "")
    assert read_prompts([1, 2], 128).ids == ([1, 2],)
    assert read_prompts([[1], [2, 3]], 128).ids == ([1], [2, 3])
    assert [len(read_prompts(value, 128)) for value in ("a", ["a", "b"], [1, 2, 3], [[1], [2]])] == [
        1,
        2,
        1,
        2,
    ]
    assert len(read_prompts(list(range(10_000)), 128)) == 1  # ids of one prompt, not prompts


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([None], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        (["a", ["b"]], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], 2], "prompt[1]"),
        ("\ud83d", "prompt"),
        (["ok", "\ud83d"], "prompt[1]"),
        (["a"] * 129, "prompt"),
        ([[1]] * 100_000, "prompt"),
    ],
)
def test_other_shapes_are_refused(value: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompts(value, 128)
    assert caught.value.param == param and len(caught.value.message) < 300


def test_ids_are_embedding_rows() -> None:
    assert check_ids("prompt", [0, 49_151], 49_152) == (0, 49_151)
    for index, wrong in enumerate(([49_152], [7, -1], [7, 7, 1.5], [1, 1, 1, True], [1, 1, 1, 1, 2**40])):
        with pytest.raises(RequestError) as caught:
            check_ids("prompt", wrong, 49_152)
        assert caught.value.param == f"prompt[{index}]"
        assert "from 0 to 49151" in caught.value.message and caught.value.code == "invalid_token_id"
    with pytest.raises(RequestError, match=r"^prompt\[1\]: must be a token id .*, got 'a'"):
        check_ids("prompt", [19_556, "a"], 49_152)
