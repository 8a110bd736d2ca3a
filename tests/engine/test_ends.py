"""How a choice ends: stop ids, min_tokens, max_tokens, and which wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from server.engine.request import FinishReason
from tests.support.checkpoints import make_chain
from tests.support.driving import Answer, fp32_engine, greedy_request, run

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 -> 11 -> 12 -> 13 -> 2, and 20 -> 2 -> 21 -> 22 -> 23."""
    folder = tmp_path_factory.mktemp("chain")
    return make_chain(folder, [10, 11, 12, 13, 2, 21, 22, 23, 24], [20, 2], vocab=64, max_position=256)


def answer(folder: Path, prompt: Sequence[int], tokens: int, **fields: object) -> Answer:
    ((got,),) = run(fp32_engine(folder)[0], [greedy_request(prompt, tokens, **fields)])  # type: ignore[arg-type]
    return got


def test_a_stop_id_ends_and_is_reported(chain: Path) -> None:
    got = answer(chain, [10], 20, stop_ids=(2,))
    assert (got.ids, got.finish) == ([11, 12, 13, 2], STOP)


def test_the_limit_ends(chain: Path) -> None:
    got = answer(chain, [10], 2, stop_ids=(2,))
    assert (got.ids, got.finish) == ([11, 12], LENGTH)


def test_a_stop_id_exactly_at_the_limit_is_a_stop(chain: Path) -> None:
    got = answer(chain, [10], 4, stop_ids=(2,))
    assert (got.ids, got.finish) == ([11, 12, 13, 2], STOP)


def test_a_stop_id_as_the_first_token(chain: Path) -> None:
    got = answer(chain, [20], 5, stop_ids=(2,))
    assert (got.ids, got.finish) == ([2], STOP)


def test_without_stop_ids_eos_is_an_id_like_any_other(chain: Path) -> None:
    got = answer(chain, [20], 4)
    assert (got.ids, got.finish) == ([2, 21, 22, 23], LENGTH)


def test_any_of_several_stop_ids(chain: Path) -> None:
    got = answer(chain, [10], 20, stop_ids=(2, 12, 50))
    assert (got.ids, got.finish) == ([11, 12], STOP)


def test_stop_ids_cannot_be_drawn_before_min_tokens(chain: Path) -> None:
    """S9: the chain would stop at once; the first four tokens may not be stop ids, the fifth may."""
    got = answer(chain, [20], 8, stop_ids=(2, 0), min_tokens=4)
    assert len(got.ids) >= 4
    assert not {2, 0} & set(got.ids[:4])
    free = answer(chain, [20], 8, stop_ids=(2, 0))
    assert free.ids == [2]


def test_min_tokens_bans_only_in_its_own_row(chain: Path) -> None:
    engine = fp32_engine(chain)[0]
    requests = [
        greedy_request([20], 5, stop_ids=(2,)),
        greedy_request([20], 5, stop_ids=(2,), min_tokens=5),
        greedy_request([20], 3),
    ]
    first, second, third = (answers[0] for answers in run(engine, requests))
    assert (first.ids, first.finish) == ([2], STOP)
    assert 2 not in second.ids and (len(second.ids), second.finish) == (5, LENGTH)
    assert third.ids == [2, 21, 22]
