"""Scores of prompts: transformers' log_softmax, in any chunks, pushed out, aborted or failed on the way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model import logprobs
from server.engine.request import FinishReason, Request, SamplingParams, TokenScore
from tests.engine.conftest import Oracle
from tests.support.driving import Answer, fp32_engine, greedy_request, run
from tests.support.engines import VOCAB, checked, ids_of, manager_of, on_batches, pool_of, prompt_of
from tests.support.scores import TOLERANCE, assert_output_scores, assert_score, right_scores


def assert_prompt_scores(oracle: Oracle, prompt: Sequence[int], answer: Answer, best: int) -> None:
    right = right_scores(oracle, prompt)
    told = answer.prompt_scores
    assert told is not None and len(told) == len(prompt) and told[0] is None
    for position, score in enumerate(told[1:], start=1):
        assert_score(score, right[position - 1], prompt[position], best)


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 100])
def test_a_prompt_is_scored(small: Path, oracle: Oracle, length: int, tokens: int) -> None:
    """One token, at the borders of a block, in several chunks."""
    prompt = prompt_of(length, 62)
    engine = checked(fp32_engine(small, max_batch_tokens=24, max_num_seqs=8)[0])
    ((answer,),) = run(engine, [greedy_request(prompt, tokens, prompt_logprobs=3)])
    assert_prompt_scores(oracle, prompt, answer, 3)
    assert answer.ids == oracle.greedy(prompt, tokens)
    assert answer.finish is FinishReason.LENGTH and answer.events == max(tokens, 1)
    assert set(answer.scores) <= {None}, "the answer's own scores are another wish"
    assert manager_of(engine).live_blocks == 0


@pytest.mark.parametrize("best", [0, 1, 20])
def test_prompt_and_answer_are_scored_each_as_asked(small: Path, oracle: Oracle, best: int) -> None:
    prompt = prompt_of(40, 63)
    request = greedy_request(prompt, 8, prompt_logprobs=best, logprobs=20 - best)
    ((answer,),) = run(fp32_engine(small, max_batch_tokens=32, max_num_seqs=8)[0], [request])
    assert_prompt_scores(oracle, prompt, answer, best)
    assert_output_scores(oracle, prompt, answer, 20 - best)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 20, 48])
def test_nothing_is_drawn_where_no_token_is_asked_for(
    small: Path, oracle: Oracle, length: int, n: int
) -> None:
    """The prompt runs once; its cache is that of the prompt, in full; every choice ends, without a token."""
    prompt = prompt_of(length, 64)
    engine = checked(fp32_engine(small)[0])
    (answers,) = run(engine, [greedy_request(prompt, 0, n=n, prompt_logprobs=2)])
    assert_prompt_scores(oracle, prompt, answers[0], 2)
    for answer in answers:
        assert (answer.ids, answer.finish, answer.events) == ([], FinishReason.LENGTH, 1)
    assert [answer.prompt_scores for answer in answers[1:]] == [None] * (n - 1)
    kv = answers[0].kv
    assert kv is not None and kv.cached_tokens == 0
    if length > 1:  # prompts of one token share nothing, so each choice ran its own
        assert engine.stats().batched_tokens == length
        assert (kv.tokens, kv.blocks) == (length, 2 * -(-length // 16))
    assert engine.stats().output_tokens == 0
    assert manager_of(engine).live_blocks == 0


def test_several_prompts_and_choices(small: Path, oracle: Oracle) -> None:
    """The first choice of each prompt tells its scores; the others share its cache as ever."""
    prompts = (prompt_of(20, 65), prompt_of(33, 66), prompt_of(1, 67))
    base = greedy_request(prompts[0], 7, n=2, prompt_logprobs=1)
    engine = checked(fp32_engine(small)[0])
    (answers,) = run(engine, [dataclasses.replace(base, prompts=prompts)])
    for index, answer in enumerate(answers):
        prompt = prompts[index // 2]
        assert answer.ids == oracle.greedy(prompt, 7)
        if index % 2:
            assert answer.prompt_scores is None
        else:
            assert_prompt_scores(oracle, prompt, answer, 1)
    assert engine.stats().batched_tokens == sum(map(len, prompts)) + 2 + 1 + 6 * 6, "a fork reruns one token"


def test_the_prefix_index_gives_scored_prompts_nothing_and_gets_their_blocks(
    small: Path, oracle: Oracle
) -> None:
    """K10: plain before; twice; a longer one of the same beginning; then plain, which may read."""
    prompt = prompt_of(40, 68)
    longer = (*prompt, *prompt_of(20, 69))
    engine = checked(fp32_engine(small)[0])
    assert ids_of(engine, [greedy_request(prompt, 5)]) == [oracle.greedy(prompt, 5)]
    for text in (prompt, prompt, longer):
        ((answer,),) = run(engine, [greedy_request(text, 1, prompt_logprobs=1)])
        assert_prompt_scores(oracle, text, answer, 1)
        assert answer.kv is not None and answer.kv.cached_tokens == 0
    assert engine.stats().cached_tokens == 0
    ((answer,),) = run(engine, [greedy_request(longer, 5)])
    assert answer.ids == oracle.greedy(longer, 5)
    assert answer.kv is not None and answer.kv.cached_tokens == 48, "three of the longer one's blocks"


def scored_crowd(seed: int) -> list[Request]:
    """Prompts of all lengths, of every attention mode, scored or not, with and without answers."""
    return [
        greedy_request(
            prompt_of(10 + 13 * i, seed), (0, 12, 30)[i % 3] if i % 4 else 30, n=1 + i % 2,
            variant=("native", "mha", "mqa")[i % 3], prompt_logprobs=(None, 0, 5, 20)[i % 4],
            logprobs=(None, 2)[i % 2], sampling=SamplingParams(i % 2 * 0.9, seed=i),
        )
        for i in range(10)
    ]  # fmt: skip


MODES = {"attention": ("native", "mha", "mqa"), "head_map": "mean"}


def close(told: TokenScore | None, right: TokenScore | None) -> bool:
    """The same ids, and values to rounding: another batch shape may round a logit differently."""
    if told is None or right is None:
        return told is right
    values = [told.logprob, *(value for _, value in told.top)]
    return [token for token, _ in told.top] == [token for token, _ in right.top] and values == pytest.approx(
        [right.logprob, *(value for _, value in right.top)], abs=TOLERANCE
    )


@pytest.mark.parametrize("blocks", [24, 200])
@pytest.mark.parametrize("chunk", [16, 512])
def test_scores_do_not_depend_on_company_chunks_or_preemption(small: Path, blocks: int, chunk: int) -> None:
    requests = scored_crowd(70)
    alone = fp32_engine(small, prefix_cache=False, **MODES)[0]
    expected = [run(alone, [dataclasses.replace(r, id=f"{r.id}-alone")])[0] for r in requests]
    engine = checked(pool_of(small, blocks, max_batch_tokens=chunk, max_num_seqs=16, **MODES)[0])
    for answers, right in zip(run(engine, requests), expected, strict=True):
        for answer, one in zip(answers, right, strict=True):
            assert (answer.ids, answer.finish) == (one.ids, one.finish)
            for mine, its in (
                (answer.prompt_scores or (), one.prompt_scores or ()),
                (answer.scores, one.scores),
            ):
                assert len(mine) == len(its) and all(map(close, mine, its))
    assert manager_of(engine).live_blocks == 0


@pytest.mark.parametrize("cache", [True, False], ids=["with", "without"])
def test_a_prompt_that_is_pushed_out_half_way(small: Path, oracle: Oracle, cache: bool) -> None:
    """Three in front grow until the scored prompt behind them, in the midst of its chunks of 3, has to go.
    When it comes back the index knows all it had written, and more: something began like it before."""
    fronts, prompt = [greedy_request(prompt_of(20, 90 + i), 60) for i in range(3)], prompt_of(150, 72)
    scored = greedy_request(prompt, 3, prompt_logprobs=1)
    engine = checked(pool_of(small, 20, max_batch_tokens=6, max_num_seqs=4, prefix_cache=cache)[0])
    run(engine, [greedy_request(prompt[:140], 1)])
    for front in fronts:
        engine.add(front)
    answer, computed = Answer(), []
    for step in range(1000):
        if step == 14:
            engine.add(scored)
        for event in engine.step():
            if event.request_id == scored.id:
                answer.take(event)
        computed += [s.computed for s in engine._scheduler.running if s.readable is not None]
    assert_prompt_scores(oracle, prompt, answer, 1)
    assert answer.ids == oracle.greedy(prompt, 3)
    assert computed[0] == 3, "nothing was read at first"
    assert any(later <= sooner for sooner, later in itertools.pairwise(computed)), "it was pushed out"
    assert not engine.has_work


def test_an_abort_half_way_and_a_sibling_that_goes_on(small: Path, oracle: Oracle) -> None:
    """Choice 0 leaves while its prompt is being scored; choice 1 ends as asked, and no block is kept."""
    prompt = prompt_of(90, 73)
    for tokens in (0, 4):
        engine = checked(fp32_engine(small, max_batch_tokens=24, max_num_seqs=4)[0])
        request = greedy_request(prompt, tokens, n=2, prompt_logprobs=1)
        engine.add(request)
        for _ in range(2):
            engine.step()
        engine.abort(request.id, 0)
        answers = [Answer(), Answer()]
        while engine.has_work:
            for event in engine.step():
                answers[event.index].take(event)
        assert [answer.finish for answer in answers] == [FinishReason.ABORT, FinishReason.LENGTH]
        assert answers[1].ids == oracle.greedy(prompt, tokens)
        assert [answer.prompt_scores for answer in answers] == [None, None]
        assert manager_of(engine).live_blocks == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_fails_scores_nothing_twice(small: Path, oracle: Oracle, at: int) -> None:
    engine = checked(fp32_engine(small, max_batch_tokens=64, max_num_seqs=8)[0])
    calls = [-1]

    def once(batch: Any) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("a fault on purpose")

    on_batches(engine, once)
    requests = [greedy_request(prompt_of(50 + i, 74), 4, prompt_logprobs=i, logprobs=i) for i in range(3)]
    for (answer,), request in zip(run(engine, requests), requests, strict=True):
        assert_prompt_scores(oracle, request.prompts[0], answer, request.prompt_logprobs or 0)
        assert_output_scores(oracle, request.prompts[0], answer, request.logprobs or 0)
    assert engine.stats().failed_steps == 1


def test_a_choice_that_ended_with_its_sibling_does_not_fail_too(small: Path) -> None:
    """Prompts of one token run side by side: the step fails, then the second choice alone. Its sibling has
    ended both by then."""
    engine = checked(fp32_engine(small)[0])
    calls = [0]

    def failing(batch: Any) -> None:
        calls[0] += 1
        if calls[0] in (1, 3):
            raise RuntimeError("a fault on purpose")

    on_batches(engine, failing)
    (answers,) = run(engine, [greedy_request((5,), 0, n=2, prompt_logprobs=1)])
    assert [answer.finish for answer in answers] == [FinishReason.LENGTH] * 2
    assert engine.dead is None and calls == [3] and manager_of(engine).live_blocks == 0


def test_a_broken_logit_in_a_prompt_fails_its_choice_alone(small: Path, oracle: Oracle) -> None:
    """NaN after the prompt's 31st token, from which nothing is drawn: its score would be a lie."""
    engine = checked(fp32_engine(small)[0])
    decoder = engine._runner._decoder
    hidden = decoder.hidden

    def poisoned(ids: Any, positions: Any, segments: Any, attention: Any, kv: Any, wanted: Any) -> Any:
        states = hidden(ids, positions, segments, attention, kv, wanted)
        return torch.where((positions[wanted] == 30)[:, None], torch.nan, states)

    decoder.hidden = poisoned  # type: ignore[method-assign]
    bad = greedy_request(prompt_of(40, 75), 4, prompt_logprobs=1)
    short = greedy_request(prompt_of(20, 76), 4, prompt_logprobs=1)
    (broken,), (whole,) = run(engine, [bad, short])
    assert (broken.finish, broken.error) == (FinishReason.ERROR, "the model's logits are not finite")
    assert broken.prompt_scores is None and manager_of(engine).live_blocks == 0
    assert_prompt_scores(oracle, prompt_of(20, 76), whole, 1)


def test_no_more_than_32_mib_of_logits(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head sees a prompt's states in pieces; here a piece is made to hold ten rows."""
    monkeypatch.setattr(logprobs, "PIECE_BYTES", 10 * VOCAB * 4 + 3)
    engine = fp32_engine(small)[0]
    decoder = engine._runner._decoder
    head, rows = decoder.logits, []

    def seen(hidden: Any) -> Any:
        rows.append(len(hidden))
        return head(hidden)

    decoder.logits = seen  # type: ignore[method-assign]
    run(engine, [greedy_request(prompt_of(64, 77), 2, prompt_logprobs=1)])
    assert sorted(rows) == [1, 1, 3] + [10] * 6, "63 rows of the prompt, and two draws"


def test_nothing_is_kept_but_the_scores(small: Path) -> None:
    """They go out with the first event, and nobody holds them after it."""
    engine = fp32_engine(small)[0]
    engine.add(greedy_request(prompt_of(64, 78), 20, prompt_logprobs=1))
    (event,) = engine.step()
    assert event.prompt_scores is not None
    (sequence,) = engine._scheduler.running
    assert sequence.prompt_scores is None
    (event,) = engine.step()
    assert event.prompt_scores is None
