"""Scores on their way from token events to deltas: in step with the tokens, those of the prompt first."""

from __future__ import annotations

import pytest

from server.engine.request import FinishReason, KVPeak, TokenEvent, TokenScore
from server.text.echo import echo_of_text
from server.text.generate import ChoiceDelta
from server.text.scores import Scores
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level
from tests.text.test_generate import ABORT, LENGTH, Script, play, prepared


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("scores")
    byte_level()(folder)
    return Tokenizer.from_folder(folder)


def scored(index: int, token: int | None, finish: FinishReason | None = None, **fields: object) -> TokenEvent:
    score = None if token is None else TokenScore(-float(token))
    kv = KVPeak(1, 1, 2, 0)
    return TokenEvent("r", index, token, finish, kv, score=score, **fields)  # type: ignore[arg-type]


async def test_scores_go_with_their_tokens_at_once(tokenizer: Tokenizer) -> None:
    """Text that is held back, or cut off, holds back no score; offsets are those before the cut."""
    ids = [token for char in "seven" for token in tokenizer.encode(char)]
    events = [[scored(0, token)] for token in ids]
    deltas, _ = await play(Script(*events), prepared(stops=["ven"], scores=Scores(0)), tokenizer)
    assert [delta.text for delta in deltas] == ["s", "e", "", "", ""]
    assert [delta.scores for delta in deltas] == [(TokenScore(-float(token)),) for token in ids]
    assert [delta.offsets for delta in deltas] == [(0,), (1,), (2,), (3,), (4,)]


async def test_scores_of_a_prompt_come_before_everything_else(tokenizer: Tokenizer) -> None:
    """With the first delta of each choice of the prompt, whoever is told of them first."""
    a, echo = tokenizer.encode("a")[0], echo_of_text("xyz", tokenizer, (5, 6, 7))
    told = (None, TokenScore(-1.0), TokenScore(-2.0))
    service = Script(
        [scored(1, a)],
        [scored(1, a), scored(0, a, prompt_scores=told)],
        [scored(0, a, LENGTH), scored(1, a, LENGTH)],
    )
    deltas, done = await play(service, prepared(n=2, echo=(echo,), scores=Scores(0)), tokenizer)
    score = TokenScore(-float(a))
    assert deltas == [
        ChoiceDelta(1, "xyzaa", (a, a), None, (score, score), (3, 4), told),
        ChoiceDelta(0, "xyza", (a,), None, (score,), (3,), told),
        ChoiceDelta(0, "a", (a,), LENGTH, (score,), (4,)),
        ChoiceDelta(1, "a", (a,), LENGTH, (score,), (5,)),
    ]
    assert done.completion_tokens == 5


async def test_scores_of_a_prompt_alone(tokenizer: Tokenizer) -> None:
    told = (None, TokenScore(-1.0), TokenScore(-2.0))
    service = Script([scored(0, None, LENGTH, prompt_scores=told)], [scored(1, None, LENGTH)])
    deltas, done = await play(service, prepared(n=2, scores=Scores(None, 3)), tokenizer)
    assert deltas == [
        ChoiceDelta(0, "", (), LENGTH, prompt_scores=told),
        ChoiceDelta(1, "", (), LENGTH, prompt_scores=told),
    ]
    assert done.completion_tokens == 0


async def test_a_prompt_without_its_scores_hides_nothing(tokenizer: Tokenizer) -> None:
    """If the engine ends a choice before it could tell them, the end is told all the same."""
    deltas, _ = await play(Script([scored(0, None, ABORT)]), prepared(scores=Scores(None, 3)), tokenizer)
    assert deltas == [ChoiceDelta(0, "", (), ABORT)]
