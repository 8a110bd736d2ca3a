"""Penalties and biases in whole answers: transformers' own, and arithmetic step by step, in any company."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.engine.engine import Engine
from server.engine.penalties import is_penalised
from server.engine.request import FinishReason, Request, SamplingParams
from server.engine.seen import Seen
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import VOCAB, checked, ids_of, manager_of, on_batches, pool_of, prompt_of
from tests.support.equality import assert_same_ids
from tests.support.reference import Reference, load_reference

BIAS = ((11, 6.0), (200, -100.0), (301, 4.5), (400, 100.0), (401, -3.0))


def asked(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **settings)


def theirs(reference: Reference, prompt: Sequence[int], tokens: int, params: SamplingParams) -> list[int]:
    """What transformers' `generate` answers."""
    settings: dict[str, Any] = {}
    if params.repetition_penalty != 1.0:
        settings["repetition_penalty"] = params.repetition_penalty
    if params.logit_bias:
        settings["sequence_bias"] = {(token,): value for token, value in params.logit_bias}
    return reference.generate(prompt, tokens, **settings)


def by_hand(oracle: Oracle, prompt: Sequence[int], tokens: int, params: SamplingParams) -> list[int]:
    """The definition, from the reference's logits: counts taken anew from the whole text for each token."""
    answer: list[int] = []
    for _ in range(tokens):
        logits = oracle.reference.last_logits([*prompt, *answer]).clone()
        for token, value in params.logit_bias:
            logits[token] += value
        for token in {*prompt, *answer}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(answer).items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        answer.append(int(logits.argmax()))
    return answer


SETTINGS = {
    "repetition": asked(repetition_penalty=1.3),
    "encouraged": asked(repetition_penalty=0.8),
    "bias": asked(logit_bias=BIAS[:3] + BIAS[4:]),
    "forced": asked(logit_bias=BIAS),
    "both": asked(repetition_penalty=1.3, logit_bias=BIAS),
    "frequency": asked(frequency_penalty=2.0),
    "presence": asked(presence_penalty=2.0),
    "all": asked(repetition_penalty=1.2, frequency_penalty=1.5, presence_penalty=-0.5, logit_bias=BIAS[:2]),
    "none": asked(),
}


@pytest.mark.parametrize("name", ["repetition", "encouraged", "bias", "both"])
@pytest.mark.parametrize("prompt", [prompt_of(1, 80), prompt_of(33, 81), (7, 7, 9, 7) * 8])
def test_token_for_token_transformers_own(
    small: Path, oracle: Oracle, name: str, prompt: tuple[int, ...]
) -> None:
    expected = theirs(oracle.reference, prompt, 40, SETTINGS[name])
    assert ids_of(fp32_engine(small)[0], [greedy_request(prompt, 40, sampling=SETTINGS[name])]) == [expected]
    assert expected != oracle.greedy(prompt, 40), "it makes a difference"


@pytest.mark.model
@pytest.mark.parametrize(
    "params", [asked(repetition_penalty=1.3), asked(logit_bias=((260, 5.0), (28, -9.0)))]
)
def test_token_for_token_on_the_default_model(smol: Path, params: SamplingParams) -> None:
    reference, prompt = load_reference(smol), [19556, 905, 17565, 905, 17565]
    expected = theirs(reference, prompt, 30, params)
    (ours,) = ids_of(fp32_engine(smol)[0], [greedy_request(prompt, 30, sampling=params)])
    assert_same_ids(ours, expected)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_equals_the_definition(small: Path, oracle: Oracle, name: str) -> None:
    prompt = prompt_of(20, 82)
    expected = by_hand(oracle, prompt, 30, SETTINGS[name])
    assert ids_of(fp32_engine(small)[0], [greedy_request(prompt, 30, sampling=SETTINGS[name])]) == [expected]


@pytest.mark.parametrize("kind", ["frequency_penalty", "presence_penalty"])
def test_what_is_generated_falls_by_its_count_and_a_prompt_does_not(small: Path, kind: str) -> None:
    """S8: a bias makes one token likeliest, however it is penalised; the prompt holds it forty times."""
    params = asked(logit_bias=((77, 100.0),), **{kind: 2.0})
    request = greedy_request((77,) * 40, 4, sampling=params)
    engine = fp32_engine(small)[0]
    counted: list[Any] = []

    def look(batch: Any) -> None:
        penalties = batch.draws.adjustments.penalties
        counted.append(None if penalties is None else (penalties.ids.tolist(), penalties.counts.tolist()))

    on_batches(engine, look)
    ((answer,),) = run(engine, [request])
    assert answer.ids == [77] * 4
    assert counted == [None, ([77], [1]), ([77], [2]), ([77], [3])], "the prompt's forty are not counted"


def crowd(seed: int, tokens: int = 40) -> list[Request]:
    """Every setting, greedy and drawn, of different lengths."""
    return [
        greedy_request(
            prompt_of(20 + i, seed), tokens, n=1 + i % 3 // 2,
            sampling=dataclasses.replace(params, temperature=i % 2 * 0.9, seed=i),
        )
        for i, params in enumerate(SETTINGS.values())
    ]  # fmt: skip


def all_ids(engine: Engine, requests: Sequence[Request]) -> list[list[list[int]]]:
    return [[answer.ids for answer in answers] for answers in run(engine, requests)]


def alone(folder: Path, requests: Sequence[Request]) -> list[list[list[int]]]:
    """Each request's answers in an engine of its own, one at a time."""
    engine = fp32_engine(folder, prefix_cache=False)[0]
    return [all_ids(engine, [dataclasses.replace(r, id=f"{r.id}-alone")])[0] for r in requests]


def test_no_row_depends_on_the_others(small: Path) -> None:
    """S4: all settings in one batch, in small chunks; again, with the prompts in the cache."""
    requests = crowd(83)
    expected = alone(small, requests)
    engine = checked(fp32_engine(small, max_batch_tokens=48, max_num_seqs=16)[0])
    assert all_ids(engine, requests) == expected
    assert all_ids(engine, [dataclasses.replace(r, id=f"{r.id}-again") for r in requests]) == expected
    assert engine.stats().cached_tokens > 0


def recount(engine: Engine) -> int:
    """Each running sequence's table against its text; how many were looked at."""
    looked = 0
    for sequence in engine._scheduler.running:
        if sequence.seen is None:
            continue
        assert is_penalised(sequence)
        text = sequence.chain.tokens.tolist()
        answer = text[len(sequence.prompt) :][: sequence.seen.taken]
        assert len(answer) in (sequence.output, sequence.output - 1), "the last token counts in the next step"
        expected = Counter(answer)
        if sequence.work.request.sampling.repetition_penalty != 1.0:
            expected.update(dict.fromkeys(sequence.prompt, 0))
        ids, counts = sequence.seen.entries.tolist()
        assert len(ids) == len(set(ids)), "each id once"
        assert dict(zip(ids, counts, strict=True)) == {token: expected[token] for token in expected}
        looked += 1
    return looked


def test_counts_outlive_preemption(small: Path) -> None:
    """In a pool that pushes sequences out again and again; every table is recounted after every step."""
    requests = crowd(84, tokens=100)
    expected = alone(small, requests)
    engine = checked(pool_of(small, 20)[0])
    step, looked = engine.step, [0]

    def counted() -> Any:
        events = step()
        looked[0] += recount(engine)
        return events

    engine.step = counted  # type: ignore[method-assign]
    assert all_ids(engine, requests) == expected
    assert engine.stats().preemptions > 0 and looked[0] > 500
    assert manager_of(engine).live_blocks == 0


def test_more_than_a_table_has_room_for_at_first(small: Path, oracle: Oracle) -> None:
    """150 different tokens from a prompt of one: the table grows twice."""
    params = asked(frequency_penalty=100.0, presence_penalty=100.0)
    ((answer,),) = run(fp32_engine(small)[0], [greedy_request((5,), 200, sampling=params)])
    assert len(set(answer.ids)) == 200
    assert answer.ids[:40] == by_hand(oracle, (5,), 40, params)


def test_a_request_that_was_aborted_leaves_no_trace(small: Path) -> None:
    """The same prompt afterwards, in the place that it had."""
    request = greedy_request(prompt_of(20, 85), 40, n=2, sampling=SETTINGS["all"])
    (expected,) = alone(small, [request])
    engine = checked(fp32_engine(small)[0])
    engine.add(request)
    for _ in range(10):
        engine.step()
    engine.abort(request.id)
    while engine.has_work:
        engine.step()
    assert all_ids(engine, [dataclasses.replace(request, id="later")]) == [expected]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_step_that_fails_counts_nothing_twice(small: Path, at: int) -> None:
    """It is run again for each alone, and the tokens it had counted before the fault are there once."""
    requests = crowd(86, tokens=12)
    expected = alone(small, requests)
    engine = checked(fp32_engine(small)[0])
    calls = [-1]

    def once(batch: Any) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("a fault on purpose")

    on_batches(engine, once)
    assert all_ids(engine, requests) == expected
    assert engine.stats().failed_steps == 1


def test_a_fault_while_a_table_changes(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made anew from the text."""
    requests = crowd(87, tokens=12)
    expected = alone(small, requests)
    engine = checked(fp32_engine(small)[0])
    write, calls = Seen.write, [0]

    def failing(self: Seen, places: Any, entries: Any) -> None:
        calls[0] += 1
        if calls[0] in (3, 20):
            raise RuntimeError("a fault on purpose")
        write(self, places, entries)

    monkeypatch.setattr(Seen, "write", failing)
    assert all_ids(engine, requests) == expected
    assert engine.stats().failed_steps == 2


@pytest.mark.parametrize("bad", [VOCAB, 999_999, -1, -VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_changes_nobody(small: Path, oracle: Oracle, bad: int) -> None:
    """S7: it never comes this far; if it did, neither a neighbour's row nor the last entry would feel it."""
    last = VOCAB - 1
    reckless = greedy_request(prompt_of(20, 88), 10, sampling=asked(logit_bias=((bad, 100.0),)))
    pushed = greedy_request(
        prompt_of(20, 89), 10, sampling=asked(logit_bias=((last, 100.0),)), stop_ids=(bad,), min_tokens=10
    )
    before, after = (greedy_request(prompt_of(20, 90 + i), 10) for i in range(2))
    ids = ids_of(fp32_engine(small)[0], [before, reckless, after, pushed])
    plain = [oracle.greedy(r.prompts[0], 10) for r in (before, reckless, after)]
    assert ids == [*plain, [last] * 10]


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-30, 1e30, 1e300])
def test_an_absurd_penalty_still_gives_an_answer(small: Path, oracle: Oracle, penalty: float) -> None:
    """Beyond what fp32 holds, too; and a neighbour's stays what it is."""
    absurd = greedy_request(prompt_of(20, 93), 10, sampling=asked(repetition_penalty=penalty))
    healthy = greedy_request(prompt_of(20, 94), 10)
    engine = fp32_engine(small)[0]
    sent: list[float] = []
    on_batches(engine, lambda batch: sent.extend(batch.draws.adjustments.penalties.repetition.tolist()))
    (answer,), (other,) = run(engine, [absurd, healthy])
    assert all(0 < value < math.inf for value in sent), "0 / 0 and 0 * inf would be no numbers"
    assert answer.finish is FinishReason.LENGTH and len(answer.ids) == 10
    assert other.ids == oracle.greedy(prompt_of(20, 94), 10)


def test_a_table_names_each_id_once() -> None:
    seen = Seen(np.array([5, 7, 9], dtype=np.int64), torch.device("cpu"))
    for tokens in ([7], [8, 7], [4], [10, 4]):
        news = seen.count(tokens)
        seen.write([place for place, _, _ in news], torch.tensor([entry[1:] for entry in news]).T)
    assert seen.entries.tolist() == [[5, 7, 9, 8, 4, 10], [0, 2, 0, 1, 2, 1]]


def test_who_asks_for_nothing_pays_nothing(small: Path) -> None:
    engine = fp32_engine(small)[0]
    adjusted: list[Any] = []
    on_batches(engine, lambda batch: adjusted.append(batch.draws.adjustments))
    (answers,) = run(
        engine, [greedy_request(prompt_of(20, 91), 5, sampling=SamplingParams(0.9, 0.9, 5, 0.1))]
    )
    assert answers[0].finish is FinishReason.LENGTH and adjusted == [None] * 5


def sent_by_steps(engine: Engine, request: Request, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of all host arrays that the engine hands to torch in each step, block tables aside."""
    from_numpy, sizes = torch.from_numpy, []

    def counted(array: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("server.engine"):
            sizes[-1].append(array.size)
        return from_numpy(array)

    engine.add(request)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_numpy", counted)
        while engine.has_work:
            sizes.append([])
            engine.step()
    return sizes


def test_a_step_sends_as_much_whatever_the_prompt(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And however long the answer: 8 ids against 200, the second token against the fortieth."""
    sent = {
        length: sent_by_steps(
            fp32_engine(small)[0],
            greedy_request(prompt_of(length, 92), 40, sampling=SETTINGS["all"]), monkeypatch,
        )
        for length in (8, 200)
    }  # fmt: skip
    assert max(sent[200][0]) > 150, "the prompt's ids, once"
    assert sent[8][1] == sent[200][1], "the first step of one token is made from nothing"
    steady = [sizes for steps in sent.values() for sizes in steps[2:]]
    assert all(sizes == steady[0] for sizes in steady)
