"""Attention modes: names, aliases, which ones a checkpoint has, and what is said of the others."""

from __future__ import annotations

import pytest

from model.errors import ModelError
from model.modes import Heads, parse_mode, parse_modes, spellings, valid_modes

SMOL = Heads(q_heads=9, kv_heads=3)
LLAMA = Heads(q_heads=32, kv_heads=8)


def test_valid_modes() -> None:
    assert [(m.name, m.kv_heads, m.lossy) for m in valid_modes(SMOL)] == [
        ("mqa", 1, True),
        ("native", 3, False),
        ("mha", 9, False),
    ]
    assert [m.name for m in valid_modes(LLAMA)] == ["mqa", "gqa2", "gqa4", "native", "gqa16", "mha"]
    assert [m.name for m in valid_modes(Heads(8, 1))] == ["native", "gqa2", "gqa4", "mha"]
    assert [m.name for m in valid_modes(Heads(4, 4))] == ["mqa", "gqa2", "native"]
    # 6 divides 12 query heads, and is neither a multiple nor a divisor of 4.
    assert [m.kv_heads for m in valid_modes(Heads(12, 4))] == [1, 2, 4, 12]
    # A config may claim billions of heads; this one is prime.
    assert [m.kv_heads for m in valid_modes(Heads(2**31 - 1, 1))] == [1, 2**31 - 1]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("native", "native"),
        ("gqa3", "native"),
        ("mha", "mha"),
        ("gqa9", "mha"),
        ("mqa", "mqa"),
        ("gqa1", "mqa"),
    ],
)
def test_aliases_are_canonical(text: str, name: str) -> None:
    assert parse_mode(text, SMOL).name == name
    assert text.strip() in spellings(parse_mode(text, SMOL), SMOL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gqa4", "gqa4: 4 KV heads cannot share 9 query heads equally"),
        ("gqa0", "'gqa0' is not known"),
        ("gqa03", "'gqa03' is not known"),
        ("gqa18", "cannot share 9"),
        ("GQA3", "'GQA3' is not known"),
        ("", "'' is not known"),
        ("gqa٣", "is not known"),
    ],
)
def test_a_wrong_one_lists_the_right_ones(text: str, words: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_mode(text, SMOL)
    assert words in str(error.value)
    assert "mqa (1), native (3), mha (9)" in str(error.value)


def test_neither_multiple_nor_divisor() -> None:
    with pytest.raises(
        ModelError, match="2 is neither a multiple nor a divisor of the checkpoint's 3 KV heads"
    ):
        parse_mode("gqa2", Heads(q_heads=6, kv_heads=3))
    with pytest.raises(ModelError, match="gqa2: 2 KV heads cannot share 9"):
        parse_mode("gqa2", SMOL)


def test_the_same_twice() -> None:
    assert [m.name for m in parse_modes(["mqa", "native", "mha"], SMOL)] == ["mqa", "native", "mha"]
    with pytest.raises(ModelError, match=r"mha and gqa9 are the same here \(9 KV heads\); name it once"):
        parse_modes(["mha", "gqa9"], SMOL)
    with pytest.raises(ModelError, match=r"native and native are the same"):
        parse_modes(["native", "native"], SMOL)


def test_spellings() -> None:
    assert spellings(parse_mode("mha", SMOL), SMOL) == ("mha", "gqa9")
    assert spellings(parse_mode("native", SMOL), SMOL) == ("native", "gqa3")
    assert spellings(parse_mode("native", Heads(4, 4)), Heads(4, 4)) == ("native", "mha", "gqa4")


def test_a_long_word_is_not_repeated_whole() -> None:
    with pytest.raises(ModelError, match=r"^attention mode 'x{40}'\.\.\. is not known; ") as caught:
        parse_mode("x" * 5000, Heads(9, 3))
    assert len(str(caught.value)) < 200
