"""Several choices of one request: they share the prompt's cache and nothing else."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from model.randomness import row_keys
from model.sampler import make_sampling, sample
from server.engine.request import FinishReason, Request, SamplingParams
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import checked, ids_of, manager_of, pool_of, prompt_of

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=1234)


def drawn_alone(oracle: Oracle, prompt: tuple[int, ...], tokens: int, copy: int) -> list[int]:
    """What the definition gives: the reference's logits, and u hashed from (seed, copy, position)."""
    ids = list(prompt)
    for position in range(tokens):
        logits = oracle.reference.last_logits(ids)[None]
        key = row_keys(*(np.array([x], dtype=np.uint64) for x in (SEEDED.seed, copy, position)))
        one = np.ones(1)
        batch = make_sampling(
            one * SEEDED.temperature, one * SEEDED.top_p, np.zeros(1, np.int64), 0 * one, key,
            torch.device("cpu"),
        )  # fmt: skip
        ids.append(int(sample(logits, batch)[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("length", [1, 16, 17])
@pytest.mark.parametrize("blocks", [100, 11], ids=["roomy", "tight"])
def test_three_choices_are_three_draws_of_the_same_seed(
    small: Path, oracle: Oracle, length: int, blocks: int
) -> None:
    prompt = prompt_of(length, 40)
    expected = [drawn_alone(oracle, prompt, 20, copy) for copy in range(3)]
    assert len({tuple(ids) for ids in expected}) == 3
    engine = checked(pool_of(small, blocks)[0])
    for max_tokens in (20, 20):  # the second finds the prompt in the cache
        (answers,) = run(engine, [greedy_request(prompt, max_tokens, n=3, sampling=SEEDED)])
        assert [answer.ids for answer in answers] == expected
    assert manager_of(engine).live_blocks == 0


def test_choices_share_the_prompt(small: Path) -> None:
    """40 tokens: two full blocks and a tail of 8, which each choice needs for itself."""
    engine = checked(fp32_engine(small, prefix_cache=False)[0])
    (answers,) = run(engine, [greedy_request(prompt_of(40, 41), 5, n=3, sampling=SEEDED)])
    kv = answers[-1].kv
    assert kv is not None
    assert kv.blocks == kv.exclusive == 2 * (2 + 3), "two shared blocks, three tails, for each of 2 KV heads"
    # All three draw in the same steps, so at the peak, the last one, each has written 4 of its 5 outputs.
    assert kv.tokens == 32 + 3 * (8 + 4)
    assert kv.cached_tokens == 0
    assert engine.stats().prompt_tokens == 40
    assert engine.stats().batched_tokens == 40 + 2 + 3 * 4, "the prompt ran once; a fork reruns one token"


@pytest.mark.parametrize("length", [2, 32, 33, 200])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_choices_of_one_token_run_the_prompt_once_and_draw_together(
    small: Path, oracle: Oracle, length: int, prefix_cache: bool
) -> None:
    """All tokens but the last in one step (they fit), then the last for each choice: two steps for any n."""
    prompt, n = prompt_of(length, 43), 20
    engine = checked(fp32_engine(small, prefix_cache=prefix_cache)[0])
    (answers,) = run(engine, [greedy_request(prompt, 1, n=n, sampling=SEEDED)])
    assert [answer.ids for answer in answers] == [drawn_alone(oracle, prompt, 1, copy) for copy in range(n)]
    assert engine.stats().batched_tokens == length - 1 + n
    assert engine.stats().steps == 2
    kv = answers[-1].kv
    assert kv is not None
    tail = (length - 1) // 16
    assert kv.blocks == 2 * (tail + n), "whole blocks are shared, and each choice has its own tail"


def test_a_sibling_goes_on_when_the_first_is_gone(small: Path, oracle: Oracle) -> None:
    prompt = prompt_of(40, 42)
    expected = [drawn_alone(oracle, prompt, 12, copy) for copy in range(3)]
    for steps_before_abort in (0, 1, 2, 5):
        engine = checked(fp32_engine(small, max_batch_tokens=24, max_num_seqs=8)[0])
        request = greedy_request(prompt, 12, n=3, sampling=SEEDED)
        engine.add(request)
        ids: list[list[int]] = [[], [], []]
        finish: dict[int, FinishReason] = {}
        cached: set[int] = set()
        step = 0
        while engine.has_work:
            if step == steps_before_abort:
                engine.abort(request.id, 0)
            for event in engine.step():
                if event.token is not None:
                    ids[event.index].append(event.token)
                if event.finish is not None:
                    finish[event.index] = event.finish
                cached.add(event.kv.cached_tokens)
            step += 1
        assert ids[1:] == expected[1:]
        assert cached == {0}, "what a request finds of its own is no hit"
        assert finish == {0: FinishReason.ABORT, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
        assert manager_of(engine).live_blocks == 0


def test_a_choice_that_has_ended_holds_nothing_while_its_siblings_run(small: Path) -> None:
    """Neither its text nor what its penalties look at, which is on the device."""
    sampling = dataclasses.replace(SEEDED, repetition_penalty=1.2)
    engine = checked(fp32_engine(small)[0])
    request = greedy_request(prompt_of(40, 49), 12, n=3, sampling=sampling)
    engine.add(request)
    for _ in range(4):
        engine.step()
    first, *others = engine._scheduler.running
    assert first.seen is not None
    held = [weakref.ref(first.seen._table), weakref.ref(first.chain._buffer)]
    engine.abort(request.id, 0)
    engine.step()
    assert engine._scheduler.running == others and len(others) == 2
    assert [reference() for reference in held] == [None, None]


def test_more_choices_than_places(small: Path, oracle: Oracle) -> None:
    prompt = prompt_of(20, 43)
    engine = checked(fp32_engine(small, max_num_seqs=2)[0])
    (answers,) = run(engine, [greedy_request(prompt, 6, n=7)])
    assert [answer.ids for answer in answers] == [oracle.greedy(prompt, 6)] * 7


def test_more_choices_than_the_pool_holds(small: Path, oracle: Oracle) -> None:
    """Eight choices of up to four blocks each, in a pool of eight."""
    prompt = prompt_of(20, 43)
    engine = checked(pool_of(small, 8)[0])
    (answers,) = run(engine, [greedy_request(prompt, 40, n=8)])
    assert [answer.ids for answer in answers] == [oracle.greedy(prompt, 40)] * 8
    assert manager_of(engine).live_blocks == 0


def test_several_prompts_in_one_request(small: Path, oracle: Oracle) -> None:
    """Choice i is copy i % n of prompt i // n; a prompt's answers are those it gets when sent by itself."""
    prompts = (prompt_of(20, 44), prompt_of(33, 45), prompt_of(20, 44))
    base = greedy_request(prompts[0], 8, n=2, sampling=SEEDED)
    request = dataclasses.replace(base, id="several", prompts=prompts)
    engine = checked(fp32_engine(small)[0])
    (answers,) = run(engine, [request])
    expected = [drawn_alone(oracle, prompt, 8, copy) for prompt in prompts for copy in range(2)]
    assert [answer.ids for answer in answers] == expected
    assert answers[0].ids == answers[4].ids
    alone = run(fp32_engine(small)[0], [base])
    assert [answer.ids for answer in alone[0]] == expected[:2]


def test_a_seed_does_not_depend_on_company_or_preemption(small: Path) -> None:
    """S2: alone, among eight others, in a pool that pushes sequences out."""
    request = greedy_request(prompt_of(20, 46), 40, sampling=SEEDED)
    alone = ids_of(fp32_engine(small)[0], [request])[0]
    crowd: list[Request] = [
        greedy_request(prompt_of(20 + i, 47), 40, sampling=SamplingParams(1.3, seed=i)) for i in range(8)
    ]
    again = [dataclasses.replace(request, id=f"again-{i}") for i in range(2)]
    assert ids_of(fp32_engine(small)[0], [*crowd[:4], again[0], *crowd[4:]])[4] == alone
    tight = checked(pool_of(small, 14)[0])
    crowd = [dataclasses.replace(r, id=f"{r.id}-tight") for r in crowd]
    assert ids_of(tight, [*crowd, again[1]])[8] == alone
    assert tight.stats().preemptions > 0


def test_each_row_keeps_its_own_parameters(small: Path) -> None:
    """S4: greedy, hot, narrow and min_p requests together, each as it is alone."""
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.4, top_k=50, seed=5),
        SamplingParams(temperature=0.7, top_p=0.5, seed=6),
        SamplingParams(temperature=1.0, min_p=0.2, seed=7),
        SamplingParams(temperature=1e-38, seed=8),
    ]
    requests = [greedy_request(prompt_of(20, 48), 12 + i, sampling=s) for i, s in enumerate(settings)]
    alone = [ids_of(fp32_engine(small)[0], [dataclasses.replace(r, id="alone")])[0] for r in requests]
    assert ids_of(fp32_engine(small)[0], requests) == alone
    assert alone[4][:12] == alone[0]
