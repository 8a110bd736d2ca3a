"""What the benchmarks ask for, what they make of the answers, and what the work costs by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from loadtest.bench_cost import longer_context, model_cost, work_cost
from loadtest.bench_rows import Answer, BenchError, closed_loop, quantile, row
from loadtest.bench_work import WORKLOADS, Ask, Work, asks, mixed, repetitive, uniform_like

SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
}  # fmt: skip


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=lambda work: work.name)
def test_a_seed_settles_the_prompts(work: Work) -> None:
    given = asks(work, 7)
    assert given == asks(work, 7) and given != asks(work, 8)
    assert len(given) == work.requests
    assert {len(ask.prompt) for ask in given} == {work.prompt}
    assert {ask.output for ask in given} == {work.output}
    assert len({ask.prompt[: work.shared] for ask in given}) == 1
    assert len({ask.prompt[work.shared : work.shared + 16] for ask in given}) == work.requests
    assert all(300 <= token < 40000 for token in given[0].prompt)


def test_mixed_lengths_and_as_much_uniform_work() -> None:
    given = mixed(200, 7, gap=0.5)
    alike = uniform_like(given, 7)
    assert all(16 <= len(ask.prompt) <= 2000 and 1 <= ask.output <= 300 for ask in given)
    assert min(len(ask.prompt) for ask in given) < 100 and max(len(ask.prompt) for ask in given) > 1900
    assert all(a.arrival < b.arrival for a, b in pairwise(given))
    assert given[-1].arrival / len(given) == pytest.approx(0.5, rel=0.3)
    for tokens in (lambda ask: len(ask.prompt), lambda ask: ask.output):
        assert sum(map(tokens, given)) == sum(map(tokens, alike))
        assert len({tokens(ask) for ask in alike}) <= 2
    assert len(given) == len(alike) and all(ask.arrival == 0 for ask in alike)


def test_a_repetitive_prompt_repeats() -> None:
    (ask, other) = repetitive(Work("r", 2, 1, 100, 5), 7)
    assert len(ask.prompt) == 100 and ask.prompt[:84] == ask.prompt[16:] and ask.prompt != other.prompt


def test_figures_are_what_the_answers_say() -> None:
    work = Work("w", requests=2, concurrency=2, prompt=10, output=3)
    answers = [Answer(1.0, [1.5, 1.6, 1.8], 3), Answer(1.0, [2.0, 2.1, 2.2], 3)]
    found = row(work, answers, wall=4.0)
    assert (found.out_tok_s, found.total_tok_s) == (6 / 4, 26 / 4)
    assert (found.ttft_p50, found.ttft_p99) == (1000.0, 1000.0)
    assert found.itl_p50 == pytest.approx(100) and found.itl_p99 == pytest.approx(200)


@pytest.mark.parametrize("tokens", [2, 4])
def test_an_answer_of_another_length_is_no_measurement(tokens: int) -> None:
    with pytest.raises(BenchError, match="other than 3 tokens"):
        row(Work("w", 1, 1, 10, 3), [Answer(0.0, [1.0], tokens)], 1.0)


def test_quantiles_are_measured_values() -> None:
    assert quantile(list(range(100)), 0.99) == 99 and quantile([3.0, 1.0, 2.0], 0.5) == 2.0


class Scripted:
    """An engine that gives each request a token a step."""

    def __init__(self, given: Sequence[Ask]) -> None:
        self.left = {i: ask.output for i, ask in enumerate(given)}
        self.running: list[int] = []
        self.most = 0

    def add(self, index: int, ask: Ask) -> None:
        self.running.append(index)
        self.most = max(self.most, len(self.running))

    def step(self) -> list[tuple[int, list[int], bool]]:
        news = []
        for index in list(self.running):
            self.left[index] -= 1
            news.append((index, [index], self.left[index] == 0))
            if self.left[index] == 0:
                self.running.remove(index)
        return news


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    given = [Ask((1, 2), output) for output in (5, 1, 3, 2, 4, 1)]
    engine = Scripted(given)
    answers, wall = closed_loop(given, 2, engine.add, engine.step)
    assert engine.most == 2
    assert [answer.tokens for answer in answers] == [5, 1, 3, 2, 4, 1]
    assert [answer.ids for answer in answers[:2]] == [[0] * 5, [1]]
    assert all(0 < answer.arrivals[0] - answer.started <= wall for answer in answers)


def test_nobody_is_added_before_he_arrives() -> None:
    given = [Ask((1,), 1, 0.0), Ask((1,), 1, 0.05)]
    engine = Scripted(given)
    answers, wall = closed_loop(given, 2, engine.add, engine.step)
    assert engine.most == 1 and wall >= 0.05
    assert answers[1].started - answers[0].started >= 0.04


def test_what_the_default_model_costs() -> None:
    """DESIGN.md: 269 MB of weights, 212 and 57 MFLOP a token, 23,040 bytes of cache."""
    cost = model_cost(SMOLLM2)
    assert cost.body == 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert cost.weight_bytes == 268_959_744
    assert (round(2 * cost.body / 1e6), round(2 * cost.head / 1e6)) == (212, 57)
    assert cost.token_bytes == 23_040
    assert cost.pair_flops == 4 * 30 * 576


@pytest.mark.parametrize(
    ("prompt", "output", "shared", "chunk"), [(5, 3, 0, 2), (8, 1, 0, 4), (7, 4, 4, 2), (3, 2, 0, 16)]
)
def test_a_workload_costs_what_its_steps_do(prompt: int, output: int, shared: int, chunk: int) -> None:
    """Counted step by step for one sequence, as the engine would run it."""
    cost = model_cost(SMOLLM2)
    read, pairs, tokens, steps, place = 0, 0, 0, 0, shared
    while place < prompt + output - 1:
        count = min(chunk, prompt - place) if place < prompt else 1
        read += place + count
        pairs += sum(place + i + 1 for i in range(count))
        tokens, steps, place = tokens + count, steps + 1, place + count
    found = work_cost(cost, Work("w", 3, 1, prompt, output, shared), 3 * steps, chunk)
    assert found.bytes == 3 * (steps * cost.weight_bytes + read * cost.token_bytes)
    flops = 2 * cost.body * tokens + 2 * cost.head * output + cost.pair_flops * pairs
    assert found.flops == 3 * flops


def test_four_times_the_context_costs_its_cache() -> None:
    more = longer_context(model_cost(SMOLLM2), 8, 512, 2048)
    assert more.bytes == 8 * 1536 * 23_040
    assert more.flops == 8 * 1536 * 4 * 30 * 576
