"""A fault of the model, the cache or the engine: who pays for it, and who goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.engine import Engine
from server.engine.errors import EngineDead
from server.engine.request import FinishReason, Request
from tests.engine.conftest import Oracle
from tests.support.driving import Answer, fp32_engine, generate, greedy_request, run
from tests.support.engines import checked, manager_of, on_batches, pool_of, prompt_of

BAD_LENGTH = 150  # the poisoned request is the one this long; no other comes near


def six(bad: bool = True) -> list[Request]:
    requests = [greedy_request(prompt_of(12 + 7 * i, 70 + i), 20) for i in range(5)]
    return [*requests[:2], greedy_request(prompt_of(BAD_LENGTH, 70), 20), *requests[2:]] if bad else requests


def is_bad(batch: Any) -> bool:
    return bool((batch.meta.host_seq_len >= BAD_LENGTH).any())


def assert_unharmed(answers: list[list[Answer]], requests: list[Request], oracle: Oracle) -> None:
    for (answer,), request in zip(answers, requests, strict=True):
        assert answer.ids == oracle.greedy(request.prompts[0], 20)
        assert answer.finish is FinishReason.LENGTH


def raises_when(condition: Callable[[Any], bool]) -> Callable[[Any], None]:
    def hook(batch: Any) -> None:
        if condition(batch):
            raise RuntimeError("a fault on purpose")

    return hook


@pytest.mark.parametrize("late", [False, True], ids=["before the model", "after it wrote"])
@pytest.mark.parametrize("at", [0, 1, 5, 18])
def test_a_step_that_raises_once_harms_nobody(small: Path, oracle: Oracle, at: int, late: bool) -> None:
    engine = checked(pool_of(small, 40, max_batch_tokens=64)[0])
    forward, calls = engine._runner.run, [0]

    def once(batch: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 != at:
            return forward(batch)
        if late:
            forward(batch)
        raise RuntimeError("a fault on purpose")

    engine._runner.run = once  # type: ignore[method-assign]
    requests = six(bad=False)
    assert_unharmed(run(engine, requests), requests, oracle)
    assert engine.stats().failed_steps == 1 and engine.dead is None


@pytest.mark.parametrize("after", [BAD_LENGTH, BAD_LENGTH + 3], ids=["in prefill", "at the third decode"])
def test_one_request_that_always_fails(small: Path, oracle: Oracle, after: int) -> None:
    """P4, L4: it gets the error, once; the others never notice; its blocks are free."""
    engine = checked(fp32_engine(small, max_batch_tokens=64)[0])
    on_batches(engine, raises_when(lambda batch: bool((batch.meta.host_seq_len >= after).any())))
    requests = six()
    answers = run(engine, requests)
    (bad,) = answers.pop(2)
    assert bad.finish is FinishReason.ERROR and "RuntimeError" in (bad.error or "")
    assert len(bad.ids) == after - BAD_LENGTH
    assert_unharmed(answers, requests[:2] + requests[3:], oracle)
    assert engine.dead is None and manager_of(engine).live_blocks == 0
    assert generate(engine, requests[0].prompts[0], 20) == oracle.greedy(requests[0].prompts[0], 20)


def test_a_bad_request_alone_does_not_end_the_engine(small: Path, oracle: Oracle) -> None:
    """Again and again, as by a client that retries: one token of nobody's shows that the engine is well."""
    engine = checked(fp32_engine(small)[0])
    on_batches(engine, raises_when(is_bad))
    for _ in range(3):
        ((bad,),) = run(engine, [greedy_request(prompt_of(BAD_LENGTH, 71), 5, n=1)])
        assert bad.finish is FinishReason.ERROR
    choices = run(engine, [greedy_request(prompt_of(BAD_LENGTH, 71), 5, n=3)])[0]
    assert [choice.finish for choice in choices] == [FinishReason.ERROR] * 3
    assert engine.dead is None
    assert generate(engine, prompt_of(12, 70), 20) == oracle.greedy(prompt_of(12, 70), 20)


@pytest.mark.parametrize("in_flight", [1, 6])
def test_a_model_that_always_fails_ends_the_engine(small: Path, in_flight: int) -> None:
    engine = fp32_engine(small)[0]
    on_batches(engine, raises_when(lambda batch: True))
    requests = six()[:in_flight]
    answers = run(engine, requests)
    assert all(answer.finish is FinishReason.ERROR and answer.error for (answer,) in answers)
    assert engine.dead is not None and "on purpose" in engine.dead
    assert not engine.has_work
    with pytest.raises(EngineDead, match="restart"):
        engine.add(greedy_request([1, 2, 3], 4))


def test_planning_that_fails_once_is_tried_again(small: Path, oracle: Oracle) -> None:
    engine = checked(fp32_engine(small)[0])
    fail_plans(engine, {0, 4})
    requests = six(bad=False)
    assert_unharmed(run(engine, requests), requests, oracle)


def test_planning_that_fails_twice_ends_the_engine(small: Path) -> None:
    engine = fp32_engine(small)[0]
    fail_plans(engine, {4, 5})
    answers = run(engine, six())
    assert all(answer.finish is FinishReason.ERROR for (answer,) in answers)
    assert engine.dead is not None


def fail_plans(engine: Engine, which: set[int]) -> None:
    plan, calls = engine._scheduler.plan, [-1]

    def failing() -> Any:
        calls[0] += 1
        if calls[0] in which:
            raise KeyError("a fault on purpose")
        return plan()

    engine._scheduler.plan = failing  # type: ignore[method-assign]


def test_admission_that_fails_costs_only_its_request(small: Path, oracle: Oracle) -> None:
    """L4: the cache raises for one request, its books being right."""
    engine = checked(fp32_engine(small)[0])
    manager = manager_of(engine)
    open_, calls = manager.open, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("a fault on purpose")
        return open_(*args, **kwargs)

    manager.open = failing  # type: ignore[method-assign]
    requests = six()
    answers = run(engine, requests)
    (bad,) = answers.pop(2)
    assert bad.finish is FinishReason.ERROR and bad.ids == []
    assert_unharmed(answers, requests[:2] + requests[3:], oracle)


def test_wrong_books_end_the_engine(small: Path) -> None:
    engine = fp32_engine(small)[0]
    manager = manager_of(engine)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a fault on purpose")

    manager.advance = broken  # type: ignore[method-assign]
    answers = run(engine, six())
    assert all(answer.finish is FinishReason.ERROR for (answer,) in answers)
    assert engine.dead is not None


def test_logits_that_are_not_numbers_fail_their_choice_alone(small: Path, oracle: Oracle) -> None:
    engine = checked(fp32_engine(small)[0])
    decoder = engine._runner._decoder
    hidden = decoder.hidden

    def poisoned(ids: Any, positions: Any, segments: Any, attention: Any, kv: Any, wanted: Any) -> Any:
        states = hidden(ids, positions, segments, attention, kv, wanted)
        bad = positions[wanted] == BAD_LENGTH + 2
        return torch.where(bad[:, None], torch.nan, states)

    decoder.hidden = poisoned  # type: ignore[method-assign]
    requests = six()
    answers = run(engine, requests)
    (bad,) = answers.pop(2)
    assert (bad.finish, bad.error) == (FinishReason.ERROR, "the model's logits are not finite")
    assert len(bad.ids) == 3
    assert_unharmed(answers, requests[:2] + requests[3:], oracle)
    assert engine.stats().failed_steps == 0


def test_copies_of_a_failed_step_are_not_lost(small: Path, oracle: Oracle) -> None:
    """The step that forks two siblings, with a tail to copy, fails once."""
    engine = checked(fp32_engine(small)[0])
    calls = [0]

    def second_step(batch: Any) -> bool:
        calls[0] += 1
        return calls[0] == 2

    on_batches(engine, raises_when(second_step))
    prompt = prompt_of(40, 72)
    (answers,) = run(engine, [greedy_request(prompt, 10, n=3)])
    assert [answer.ids for answer in answers] == [oracle.greedy(prompt, 10)] * 3


def test_trying_the_engine_out_touches_no_block(small: Path) -> None:
    engine = fp32_engine(small, kv_memory=1 << 18)[0]
    generate(engine, prompt_of(200, 73), 20)
    pool = manager_of(engine).pool
    before = pool.arena[:, :, : pool.total].clone()
    engine._runner.try_out(engine._shape)
    assert torch.equal(pool.arena[:, :, : pool.total], before)
