"""Answers within a grammar: what the engine draws fits, ends where it must, and disturbs nobody."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from server.engine.constraint import BitArray
from server.engine.engine import Engine
from server.engine.request import Constraint, FinishReason, Request, SamplingParams
from server.text.grammar_build import to_lark
from server.text.grammar_matcher import GrammarSource, write_constraint
from server.text.tokenizer import Tokenizer
from tests.support.driving import GREEDY, Answer, fp32_engine, greedy_request, run
from tests.support.engines import checked, manager_of, on_batches

EOS = 2
WARM = SamplingParams(temperature=1.0, seed=7)
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids of the tiny model's 384."""
    rng = Random(f"{length}-{seed}")
    return [rng.randrange(3, 384) for _ in range(length)]


class Words:
    """The tiny model with its tokenizer, and engines that know its grammars."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_folder(folder)
        self.source = GrammarSource(lambda: self.tokenizer, 384)

    def engine(self, **options: Any) -> Engine:
        return checked(fp32_engine(self.folder, matchers=self.source, **options)[0])

    def ask(self, kind: str, source: str, seed: int = 0, tokens: int = 60, **fields: Any) -> Request:
        """`ends` are the ids that end the answer, the checkpoint's own if left out."""
        ends = fields.pop("ends", (EOS,))
        constraint = write_constraint(ends, to_lark(kind, source))
        settings = {"stop_ids": ends, "constraint": constraint} | fields
        return greedy_request(prompt_of(9 + seed % 5, seed), tokens, **settings)

    def text(self, answer: Answer) -> str:
        return self.tokenizer.decode(answer.ids)


@pytest.fixture(scope="module")
def words(tiny_served: Path) -> Words:
    return Words(tiny_served)


def ids(answers: Sequence[Sequence[Answer]]) -> list[list[list[int]]]:
    return [[answer.ids for answer in request] for request in answers]


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_an_answer_fits_and_ends_at_the_token_that_completes_it(
    words: Words, sampling: SamplingParams
) -> None:
    answers = run(
        words.engine(), [words.ask("regex", DATE, seed, n=3, sampling=sampling) for seed in range(4)]
    )
    for answer in (answer for request in answers for answer in request):
        assert re.fullmatch(DATE, words.text(answer))
        assert answer.finish is FinishReason.STOP and answer.ids[-1] != EOS


def test_the_likeliest_of_what_is_allowed_is_drawn(words: Words) -> None:
    """Greedy within `[ab]{6}`: at each place the best of the tokens that fit, by the free model's scores."""
    free = words.engine()
    (answer,) = run(words.engine(), [words.ask("regex", "[ab]{6}")])[0]
    fits = [t for t in range(384) if re.fullmatch("[ab]{1,6}", words.tokenizer.token_text(t).name)]
    prompt = words.ask("regex", "[ab]{6}").prompts[0]
    taken: list[int] = []
    for token in answer.ids:
        bias = tuple((t, 100.0) for t in fits if len(words.tokenizer.decode([*taken, t])) <= 6)
        biased = SamplingParams(temperature=0.0, logit_bias=bias)
        ((best,),) = run(free, [greedy_request([*prompt, *taken], 1, sampling=biased)])
        assert token == best.ids[0]
        taken.append(token)


def test_others_in_the_batch_are_answered_as_if_alone(words: Words) -> None:
    bound = [words.ask("regex", DATE, seed, sampling=WARM, n=2) for seed in range(3)]
    free = [greedy_request(prompt_of(12, seed), 20, sampling=replace(WARM, seed=seed)) for seed in range(3)]
    mixed = [request for pair in zip(bound, free, strict=True) for request in pair]
    together = run(words.engine(), mixed)
    alone = [run(words.engine(), [request])[0] for request in mixed]
    assert ids(together) == ids(alone)


def test_preemption_keeps_the_place_in_the_grammar(words: Words) -> None:
    pattern = "([a-z]{6,12} ){16}[0-9]{3}"
    requests = [words.ask("regex", pattern, seed, tokens=150, sampling=WARM, n=2) for seed in range(5)]
    engine = words.engine(kv_memory=16 * 2 * manager_of(words.engine()).state.layout.block_bytes)
    squeezed = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert ids(squeezed) == ids([run(words.engine(), [request])[0] for request in requests])
    assert all(re.fullmatch(pattern, words.text(answer)) for request in squeezed for answer in request)


def test_who_leaves_takes_his_place_in_the_grammar_along(words: Words) -> None:
    """And nothing of his sibling's, who goes on."""
    request = words.ask("regex", DATE, sampling=WARM, n=2)
    (expected,) = ids(run(words.engine(), [request]))
    engine, answers = words.engine(), [Answer(), Answer()]
    engine.add(request)
    matcher: Any = None
    for step in range(40):
        if step == 3:
            matcher = weakref.ref(engine._scheduler.running[0].matcher)
            engine.abort(request.id, 0)
        for event in engine.step():
            answers[event.index].take(event)
        if step == 3:
            assert engine.has_work and matcher() is None
    assert [answer.finish for answer in answers] == [FinishReason.ABORT, FinishReason.STOP]
    assert answers[1].ids == expected[1]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_fails_takes_no_token_twice(words: Words, at: int) -> None:
    requests = [words.ask("regex", DATE, seed, sampling=WARM, n=2) for seed in range(3)]
    expected = ids(run(words.engine(), requests))
    engine, calls = words.engine(), [-1]

    def once(batch: Any) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("a fault on purpose")

    on_batches(engine, once)
    assert ids(run(engine, requests)) == expected
    assert engine.stats().failed_steps == 1


def test_an_end_mark_ends_what_could_go_on_and_has_no_say_before(words: Words) -> None:
    push = SamplingParams(temperature=0.0, logit_bias=((EOS, 100.0),))
    ((answer,),) = run(words.engine(), [words.ask("regex", "abc+", sampling=push)])
    assert words.text(answer) == "abc" and answer.ids[-1] == EOS and answer.finish is FinishReason.STOP


def test_without_end_marks_it_goes_on_to_its_length_or_its_end(words: Words) -> None:
    endless, short = run(
        words.engine(), [words.ask("regex", "a+", ends=(), tokens=9), words.ask("regex", "a{1,5}", ends=())]
    )
    assert endless[0].finish is FinishReason.LENGTH and len(endless[0].ids) == 9
    assert short[0].finish is FinishReason.STOP and words.text(short[0]) == "aaaaa"


def test_a_cut_answer_is_the_beginning_of_one_that_fits(words: Words) -> None:
    ((answer,),) = run(words.engine(), [words.ask("regex", DATE, tokens=3)])
    assert answer.finish is FinishReason.LENGTH and len(answer.ids) == 3
    matcher = words.source.matcher(write_constraint([EOS], to_lark("regex", DATE)))
    for token in answer.ids:
        matcher.advance(token)
    assert not matcher.complete


def test_the_last_token_may_complete_it(words: Words) -> None:
    ((whole,),) = run(words.engine(), [words.ask("regex", DATE)])
    ((just,),) = run(words.engine(), [words.ask("regex", DATE, tokens=len(whole.ids))])
    assert (just.ids, just.finish) == (whole.ids, FinishReason.STOP)


def test_penalties_biases_and_scores_work_beside_it(words: Words) -> None:
    a, b = (words.tokenizer.encode_rendered(letter)[0] for letter in "ab")
    sampling = SamplingParams(temperature=0.0, logit_bias=((a, -100.0), (EOS, 100.0)), presence_penalty=2.0)
    bound = words.ask("regex", "[ab]{4}", sampling=sampling, logprobs=2)
    engine = words.engine()
    engine.add(bound)
    events = [event for _ in range(20) for event in engine.step()]
    tokens = [event.token for event in events]
    assert all(token is not None for token in tokens) and a not in tokens
    assert words.tokenizer.decode(token for token in tokens if token is not None) == "bbbb"
    # Scores are the raw model's: of all tokens the likeliest, which here is none that fits.
    ((free,),) = run(words.engine(), [greedy_request(bound.prompts[0], 1)])
    assert events[0].score is not None
    assert events[0].score.top[0][0] == free.ids[0] and free.ids[0] not in (a, b)
    assert events[0].score.logprob < events[0].score.top[0][1]


class Breaking:
    """A matcher that allows everything, and fails at its third token."""

    complete = False

    def __init__(self) -> None:
        self.taken = 0

    def fill(self, bits: BitArray) -> None:
        bits[:] = -1

    def advance(self, token: int) -> None:
        self.taken += 1
        if self.taken == 3:
            raise ValueError("the grammar broke")

    def copy(self) -> Breaking:
        return Breaking()


class BreakingSource:
    def matcher(self, constraint: Constraint) -> Breaking:
        if constraint.grammar == b"none":
            raise ValueError("no such grammar")
        return Breaking()


def test_a_grammar_that_fails_on_the_way_ends_its_own_request_only(tiny_served: Path) -> None:
    engine = checked(fp32_engine(tiny_served, matchers=BreakingSource())[0])
    broken = greedy_request(prompt_of(9), 20, n=2, constraint=Constraint(b"x"))
    free = greedy_request(prompt_of(9), 20)
    breaking, going = run(engine, [broken, free])
    assert [(a.finish, a.error, len(a.ids)) for a in breaking] == [
        (FinishReason.ERROR, "the grammar broke", 2)
    ] * 2
    assert ids([going]) == ids(run(fp32_engine(tiny_served)[0], [free]))
    assert engine.dead is None and engine.report(check=True).states.live.blocks == 0
    with pytest.raises(ValueError, match="no such grammar"):
        engine.add(greedy_request(prompt_of(9), 20, constraint=Constraint(b"none")))
    assert not engine.has_work


def test_an_engine_without_grammars_says_so(tiny_served: Path) -> None:
    engine, _ = fp32_engine(tiny_served)
    with pytest.raises(ValueError, match="without grammars"):
        engine.add(greedy_request(prompt_of(9), 20, constraint=Constraint(b"x")))


def test_json_is_json(words: Words) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}}
    request = words.ask("json", json.dumps(schema | {"required": ["n"], "additionalProperties": False}))
    ((answer,),) = run(words.engine(), [request])
    value = json.loads(words.text(answer))
    assert answer.finish is FinishReason.STOP and 1 <= value["n"] <= 99
    assert words.text(answer) == json.dumps(value)  # one space after a colon


def test_bits_beyond_the_vocabulary_mean_nothing(words: Words) -> None:
    matcher = words.source.matcher(write_constraint([EOS], to_lark("regex", "a+")))
    bits = np.zeros(20, dtype=np.int32)
    matcher.fill(bits)
    assert not bits[12:].any()
