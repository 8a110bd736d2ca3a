"""A request's ids are transformers' ids: alone, in a crowd, in chunks, after a hit or a preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, generate, greedy_request, run
from tests.support.engines import checked, ids_of, prompt_of, run_staggered


def test_alone_beside_fifteen_others_and_arriving_late(small: Path, oracle: Oracle) -> None:
    subjects = [prompt_of(length, 1) for length in (1, 17, 40, 100, 63)]
    expected = [oracle.greedy(prompt, 24) for prompt in subjects]
    for prompt, ids in zip(subjects, expected, strict=True):
        assert generate(fp32_engine(small)[0], prompt, 24) == ids
    crowd = [greedy_request(prompt_of(5 + 9 * i, 2), 10 + 3 * i) for i in range(15)]
    own = [greedy_request(prompt, 24) for prompt in subjects]
    assert ids_of(checked(fp32_engine(small)[0]), [*crowd, *own])[15:] == expected
    late = [greedy_request(prompt, 24) for prompt in subjects]
    answers = run_staggered(
        checked(fp32_engine(small)[0]),
        [(0, r) for r in [greedy_request(prompt_of(5 + 9 * i, 2), 40) for i in range(15)]]
        + [(7 + 3 * i, r) for i, r in enumerate(late)],
    )
    assert [answers[r.id][0].ids for r in late] == expected


@pytest.mark.parametrize("budget", [1, 3, 16, 37, 512])
def test_chunks_of_any_size(small: Path, oracle: Oracle, budget: int) -> None:
    engine = checked(fp32_engine(small, max_batch_tokens=budget, max_num_seqs=1)[0])
    for length in (1, 17, 60):
        prompt = prompt_of(length, 3)
        assert generate(engine, prompt, 8) == oracle.greedy(prompt, 8), (budget, length)


def test_different_roots_share_nothing(small: Path) -> None:
    engine = fp32_engine(small)[0]
    prompt = prompt_of(64, 10)
    for root in (b"a" * 32, b"b" * 32):
        ((answer,),) = run(engine, [greedy_request(prompt, 2, root=root)])
        assert answer.kv is not None and answer.kv.cached_tokens == 0
