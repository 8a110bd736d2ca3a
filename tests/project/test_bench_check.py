"""The check of a benchmark's answers: what passes, what does not, and that the oracle is transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench_answers import Origin, write
from loadtest.bench_check import TOKENS, Oracle, Truth, check, judge
from loadtest.equality import first_difference, near_ties
from loadtest.tiny import make_tiny
from tests.support.reference import load_reference

SECOND = 100  # added to the best id, it gives the second best one
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def truth(gaps: Sequence[float]) -> Truth:
    """Ids 0, 1, 2 ..., each better by its gap than the second best, and by 5 than the third."""
    best = [[(i, 10.0), (i + SECOND, 10.0 - gap), (i + 2 * SECOND, 5.0)] for i, gap in enumerate(gaps)]
    return Truth(list(range(len(gaps))), best)


def spell(ids: Sequence[int]) -> str:
    """a, b, c for the best ids, A, B, C for the second, a digit for others; id 4 spells nothing."""
    kinds = (str.lower, str.upper, lambda letter: str(ord(letter) % 10))
    return "".join(kinds[i // SECOND](LETTERS[i % SECOND]) for i in ids if i != 4)


def said(ids: Sequence[int], text: bool) -> dict[str, Any]:
    return {"ids": [] if text else list(ids), "text": spell(ids) if text else None, "tokens": len(ids)}


TIE_AT_4 = [3.0, 3.0, 3.0, 3.0, 0.5, 3.0, 3.0, 3.0]  # between an id that spells nothing and one that does
WIDE, TIE_AT_3 = [3.0] * 8, [3.0, 3.0, 3.0, 0.5, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("text", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize(
    ("ids", "gaps", "verdict"),
    [
        (range(8), WIDE, ("equal", 8)),
        ([0, 1, 2, 3 + SECOND, 77, 78, 79, 80], TIE_AT_3, ("near_ties", 3)),
        ([0, 1, 2, 3, 4 + SECOND, 77, 78, 79], TIE_AT_4, ("near_ties", 4)),
        ([0, 1, 2, 3 + SECOND, 5, 6, 7, 8], WIDE, ("wrong", 3)),
        ([0, 1, 2, 3 + 2 * SECOND, 5, 6, 7, 8], TIE_AT_3, ("wrong", 3)),
        ([0, 1, 2, 3, 4, 5 + SECOND, 6, 7], TIE_AT_3, ("wrong", 5)),
        ([0 + SECOND, 1, 2, 3, 4, 5, 6, 7], TIE_AT_3, ("wrong", 0)),
    ],
)
def test_only_a_near_tie_excuses(
    text: bool, ids: Sequence[int], gaps: list[float], verdict: tuple[str, int]
) -> None:
    if text:
        ids = [i % 26 if SECOND > i > 25 else i for i in ids]
    found, agreed = judge(said(ids, text), [truth(gaps)], 1.0, spell)
    assert found == verdict[0]
    assert text or agreed == verdict[1]


PIECES = {0: " a", 1: " b", 2: "", 3: " c", 4: " d", 10: " another", 11: "", 12: " x", 13: " an"}


def pieces(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def told(text: str, ids: Sequence[int], ties: dict[int, int], tokens: int) -> str:
    """The verdict on `text` where the reference says `ids`, and `ties` are as good at their places."""
    best = [[(token, 9.0), *((ties[i], 8.9) for _ in "x" if i in ties)] for i, token in enumerate(ids)]
    return judge({"text": text, "ids": [], "tokens": tokens}, [Truth(list(ids), best)], 1.0, pieces)[0]


@pytest.mark.parametrize(
    ("text", "ids", "ties", "tokens", "verdict"),
    [
        (" a b c x", [0, 1, 3, 4], {0: 11}, 4, "wrong"),  # a silent tie, then ids that agree
        (" b another x", [1, 10, 4], {1: 0}, 3, "wrong"),  # a tie that begins what was said anyway
        (" another b", [10, 12], {0: 0}, 2, "wrong"),
        (" b another", [1, 0], {}, 2, "wrong"),  # the whole answer: nothing may follow
        (" b another", [1, 0], {1: 13}, 2, "wrong"),  # nor follow its tie
        (" b another", [1, 0], {1: 10}, 2, "near_ties"),
        (" a b another c", [0, 1, 0, 4], {2: 10}, 5, "near_ties"),  # it begins as the reference does
        (" a b x", [0, 1, 3, 4], {2: 11}, 4, "undecided"),  # whatever comes after the silent one
        (" a b x", [0, 1, 2, 4], {2: 12}, 4, "near_ties"),  # the reference is silent there
    ],
)
def test_a_tie_excuses_only_what_it_spells(
    text: str, ids: list[int], ties: dict[int, int], tokens: int, verdict: str
) -> None:
    assert told(text, ids, ties, tokens) == verdict


def test_what_follows_may_continue_the_last_id() -> None:
    wanted = [1] * (TOKENS - 1) + [0]
    text = " b" * (TOKENS - 1) + " another"
    assert told(text, wanted, {}, TOKENS + 1) == "equal" and told(text, wanted, {}, TOKENS) == "wrong"


def test_a_short_answer_is_compared_as_far_as_it_goes() -> None:
    assert judge(said(range(3), text=False), [truth(WIDE)], 1.0, spell) == ("equal", 3)
    assert judge(said(range(3), text=True), [truth(WIDE)], 1.0, spell) == ("equal", 3)


def test_any_of_the_reference_s_answers_will_do() -> None:
    other = Truth([9, *range(1, 8)], truth(WIDE).best)
    assert judge(said([9, *range(1, 8)], text=False), [truth(WIDE), other], 1.0, spell) == ("equal", 8)


def test_the_rule_s_two_halves() -> None:
    assert first_difference([1, 2, 3], [1, 2]) is None and first_difference([1, 3], [1, 2, 3]) == 1
    assert near_ties([(7, 2.0), (8, 1.5), (9, 1.0)], 1.0) == [8]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def oracle(tiny_folder: Path) -> Oracle:
    return Oracle(tiny_folder)


PROMPTS = [[300 + (7 * i + j) % 80 for j in range(12)] for i in range(3)]


@pytest.mark.parametrize("shared", [0, 8], ids=["nothing shared", "a head shared"])
def test_the_oracle_is_transformers(oracle: Oracle, tiny_folder: Path, shared: int) -> None:
    prompts = [[*PROMPTS[0][:shared], *prompt[shared:]] for prompt in PROMPTS]
    reference = load_reference(tiny_folder)
    for prompt, found in zip(prompts, oracle.truths(prompts), strict=True):
        assert found.ids == reference.greedy(prompt, TOKENS)
        best = reference.last_logits(prompt).topk(2)
        assert [token for token, _ in found.best[0][:2]] == best.indices.tolist()
        assert [logit for _, logit in found.best[0][:2]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_banned_end_is_not_drawn(oracle: Oracle) -> None:
    (plain,) = oracle.truths(PROMPTS[:1])
    (other,) = oracle.truths(PROMPTS[:1], banned=[plain.ids[0]])
    assert other.ids[0] == plain.best[0][1][0] and plain.ids[0] not in other.ids


def test_bf16_has_an_error(oracle: Oracle) -> None:
    assert 1e-4 < oracle.error(PROMPTS[0] * 3) < 10


def test_files_are_counted(oracle: Oracle) -> None:
    truths = oracle.truths(PROMPTS)
    good = [{"prompt": p, **said(t.ids, text=False)} for p, t in zip(PROMPTS, truths, strict=True)]
    worst = truths[1].best[0][-1][0]
    bad = [good[0], {**good[1], "ids": [worst, *good[1]["ids"][1:]]}, good[2]]
    text = [{**each, "text": oracle.decode(each["ids"]), "ids": []} for each in good]
    found = check(oracle, {"a": {"w": good}, "b": {"w": bad}, "c": {"w": text}}, None)
    assert (found["a"]["w"]["equal"], found["a"]["w"]["wrong"]) == (3, 0)
    assert found["c"]["w"]["equal"] == 3
    assert found["b"]["w"]["equal"] == 2 and found["b"]["w"]["wrong"] + found["b"]["w"]["near_ties"] == 1
    assert check(oracle, {"a": {"w": good}}, 1)["a"]["w"]["answers"] == 1
    fewer = check(oracle, {"a": {"w": good}, "b": {"w": good[1:]}}, None)
    assert (fewer["a"]["w"]["equal"], fewer["b"]["w"]["equal"]) == (3, 2)


def test_the_command_writes_what_it_found(
    tiny_folder: Path, tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadtest import bench_check

    found = oracle.truths(PROMPTS[:1])[0]
    texts, result = tmp_path / "texts.json", tmp_path / "found.json"
    write(texts, Origin("tiny", 1, "abc"), {"w": [{"prompt": PROMPTS[0], **said(found.ids, text=False)}]})
    words = ["x", "--model", str(tiny_folder), "--texts", f"ours={texts}", "--json", str(result)]
    monkeypatch.setattr("sys.argv", words)
    assert bench_check.main() == 0
    assert json.loads(result.read_text())["ours"]["w"]["equal"] == 1
