"""What a matcher allows: every id of a vocabulary judged by hand, at every place of a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from server.engine.request import Constraint
from server.text import grammar_matcher
from server.text.grammar_build import GrammarError, to_lark
from server.text.grammar_matcher import GrammarMatcher, GrammarSource, GrammarStuck, write_constraint
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level, sentencepiece_file

EOS = 2
CHOICES = (
    "by the harbour wall",
    "by the hill",
    "by",
    "naïve",
    "日本",
    " a leading space",
    'a "quote", a\nnew line and a \\',
    "a|b*(c)[d]{e}^f$g.h/i",
)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (byte_level() if request.param == "bytes" else sentencepiece_file())(folder)
    return Tokenizer.from_folder(folder)


def source_of(tokenizer: Tokenizer, rows: int | None = None) -> GrammarSource:
    return GrammarSource(lambda: tokenizer, rows or tokenizer.vocab_size + 7)


def constraint(kind: str, source: str, ends: Iterable[int] = (EOS,)) -> Constraint:
    return write_constraint(ends, to_lark(kind, source))


def regex(source: GrammarSource, pattern: str, ends: Iterable[int] = (EOS,)) -> tuple[GrammarMatcher, object]:
    """A matcher, and what keeps its grammar known."""
    made = constraint("regex", pattern, ends)
    return source.matcher(made), source.compile(to_lark("regex", pattern))


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """An id for each letter, without a space before it."""
    ids = range(tokenizer.vocab_size)
    return [next(i for i in ids if tokenizer.token_text(i).name == letter) for letter in text]


def allowed(matcher: GrammarMatcher, rows: int = 4096) -> set[int]:
    bits = np.full(-(-rows // 32), -1, dtype=np.int32)
    matcher.fill(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def by_hand(tokenizer: Tokenizer, alternatives: Sequence[str], text: bytes) -> set[int]:
    """The ids that go on from `text` towards one of the alternatives."""
    whole = [alternative.encode() for alternative in alternatives]
    found = {EOS} if text in whole else set()
    for token in range(tokenizer.vocab_size):
        raw = tokenizer.token_text(token).raw
        if raw and any(alternative.startswith(text + raw) for alternative in whole):
            found.add(token)
    return found


def test_every_id_at_every_place_of_a_choice(tokenizer: Tokenizer) -> None:
    source = source_of(tokenizer)
    start = source.matcher(constraint("choice", json.dumps(CHOICES)))
    reached = set()
    for seed in range(120):
        matcher, text, rng = start.copy(), b"", Random(seed)
        while True:
            expected = by_hand(tokenizer, CHOICES, text)
            assert allowed(matcher) == expected
            assert matcher.complete == (expected == {EOS})
            token = rng.choice(sorted(expected))
            if token == EOS or matcher.complete:
                reached.add(text.decode())
                break
            matcher.advance(token)
            text += tokenizer.token_text(token).raw
    assert reached == set(CHOICES)


def test_end_marks_stand_exactly_where_the_text_is_whole(tokenizer: Tokenizer) -> None:
    (a,) = letters(tokenizer, "a")
    marks = {EOS, 1} | {i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).raw == b"b"}
    matcher, _ = regex(source_of(tokenizer), "ab?", ends=marks)
    assert marks & allowed(matcher) == set()
    matcher.advance(a)
    assert allowed(matcher) == marks  # `b` could follow as text, but it ends the answer
    assert matcher.complete


def test_without_end_marks_an_answer_goes_on_while_it_can(tokenizer: Tokenizer) -> None:
    (a,) = letters(tokenizer, "a")
    matcher, _ = regex(source_of(tokenizer), "a{1,3}", ends=())
    for _ in range(2):
        matcher.advance(a)
        assert a in allowed(matcher) and not matcher.complete
    matcher.advance(a)
    assert matcher.complete and allowed(matcher) == set()


def test_an_end_mark_that_is_the_only_way_on_stays(tokenizer: Tokenizer) -> None:
    ways = by_hand(tokenizer, ["qz"], b"")
    matcher, _ = regex(source_of(tokenizer), "qz", ends=(EOS, *ways))
    assert allowed(matcher) == ways


def test_special_tokens_and_ids_without_a_row_are_never_allowed(tokenizer: Tokenizer) -> None:
    rows = tokenizer.vocab_size - 30
    matcher, _ = regex(source_of(tokenizer, rows), "(?s:.)*")
    expected = {token for token in range(rows) if _is_text(tokenizer.token_text(token).raw)} | {EOS}
    assert allowed(matcher) == expected
    bits = np.full(3, -1, dtype=np.int32)  # fewer words than the vocabulary needs
    matcher.fill(bits)
    assert allowed(matcher, 96) == {token for token in expected if token < 96}


def _is_text(raw: bytes) -> bool:
    """Whether UTF-8 can begin with these bytes."""
    for cut in range(4):
        try:
            return bool(raw[: len(raw) - cut].decode() or cut) and (
                cut == 0 or _begins_character(raw[len(raw) - cut :])
            )
        except UnicodeDecodeError:
            continue
    return False


def _begins_character(tail: bytes) -> bool:
    head = tail[0]
    length = 2 if 0xC2 <= head < 0xE0 else 3 if 0xE0 <= head < 0xF0 else 4 if 0xF0 <= head < 0xF5 else 0
    return 0 < len(tail) < length


def test_a_token_that_does_not_fit_is_an_error(tokenizer: Tokenizer) -> None:
    matcher, _ = regex(source_of(tokenizer), "ab")
    with pytest.raises(GrammarStuck):
        matcher.advance(letters(tokenizer, "z")[0])


def test_a_copy_goes_its_own_way(tokenizer: Tokenizer) -> None:
    a, b, c = letters(tokenizer, "abc")
    matcher, _ = regex(source_of(tokenizer), "a(b|c)d")
    matcher.advance(a)
    other = matcher.copy()
    before = allowed(matcher)
    other.advance(b)
    assert allowed(matcher) == before != allowed(other)
    matcher.advance(c)
    assert allowed(matcher) == allowed(other)


def test_a_grammar_is_compiled_while_nobody_holds_it(tokenizer: Tokenizer) -> None:
    source = source_of(tokenizer)
    lark = to_lark("regex", "held")
    held = source.compile(lark)
    assert source.compile(lark) is held
    del held
    matcher = source.matcher(write_constraint([EOS], lark))
    assert len(allowed(matcher)) > 0
    with pytest.raises(GrammarError):
        source.matcher(write_constraint([EOS], "start: nothing"))


def test_a_tokenizer_that_puts_spaces_between_tokens_is_refused(tmp_path: Path) -> None:
    byte_level()(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": None}))
    with pytest.raises(GrammarError, match="has no decoder"):
        source_of(Tokenizer.from_folder(tmp_path)).compile(to_lark("regex", "a"))


def test_equal_bytes_mean_equal_grammars() -> None:
    assert write_constraint([3, 1], "x") == write_constraint([1, 3], "x") != write_constraint([1], "x")
    assert grammar_matcher.read_constraint(write_constraint([], "a\nb")) == ([], "a\nb")


WIDE = "(a|b)*a(a|b){60}"  # its lexer makes a new state at nearly every letter


def test_states_that_are_used_up_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level()(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    source = source_of(tokenizer)
    a, b = letters(tokenizer, "ab")
    monkeypatch.setattr("server.text.grammar_build.MAX_STATES", 2000)
    compiled = source.compile(to_lark("regex", WIDE))
    first, rng, answers = compiled._first, Random(0), []
    for _ in range(30):
        matcher = compiled.matcher([EOS])
        for _ in range(120):
            token = rng.choice((a, b))
            assert token in allowed(matcher)
            matcher.advance(token)
        answers.append(matcher)
    assert compiled._first is not first and not compiled.worn
    monkeypatch.setattr(grammar_matcher, "_QUICK_SECONDS", 0.0)
    with pytest.raises(GrammarStuck, match="too many states"):
        for matcher in answers * 100:
            matcher.advance(rng.choice((a, b)))
    assert compiled.worn
    assert source.compile(compiled.lark) is not compiled
