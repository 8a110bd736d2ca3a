"""S1, S2, S4: edges of the sampling parameters, seeds, and requests that share a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import checkpoints
from tests.support.asking import Body, all_at_once, greedy_text, text_of, texts_together
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.refusals import check_error
from tests.support.scripted import HELLO
from tests.support.server import Served, inside

C = "/v1/completions"
PROMPT = [11, *range(700, 706)]
OTHER = [12, *range(800, 812)]
TOKENS = 16
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
WARM: dict[str, Any] = {"prompt": PROMPT, "temperature": 1, "max_tokens": TOKENS}
NEIGHBOUR: dict[str, Any] = {"prompt": OTHER, "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def greedy(rand: Path) -> str:
    """transformers' answer to PROMPT."""
    return greedy_text(rand, PROMPT, TOKENS)


@pytest.fixture(scope="module")
def neighbour(rand: Path) -> str:
    """transformers' answer to who runs beside."""
    return greedy_text(rand, OTHER, 60)


# ---- S1: edge values -------------------------------------------------------------------------------------


def test_s1_what_is_as_good_as_greedy(rand_served: Served, greedy: str, neighbour: str) -> None:
    """Temperatures that would divide logits to infinity, and filters that leave one token."""
    fields: list[Body] = [{"temperature": t} for t in (0, -0.0, 5e-324, 1e-45, 1e-38, 1e-6, 1e-4)]
    fields += [{"top_p": p} for p in (0, 0.0, 1e-10, 5e-324)]
    fields += [{"top_k": 1}, {"min_p": 1}, {"top_k": 1, "temperature": 2}]
    bodies = [{**WARM, **field} for field in fields]
    *texts, beside = texts_together(rand_served, [*bodies, NEIGHBOUR])
    assert dict(zip(map(str, fields), texts, strict=True)) == dict.fromkeys(map(str, fields), greedy)
    assert beside == neighbour


def test_s1_what_filters_nothing(rand_served: Served, greedy: str, neighbour: str) -> None:
    """Off is off, and more than the vocabulary is all of it: one seed, one text, which is not greedy."""
    off = [{"top_k": k} for k in (0, -1, 49152, 49153, 9999999, 2**63, 10**30)]
    off += [{"top_p": 1}, {"top_p": 1.0, "min_p": 0}, {}]
    *texts, beside = texts_together(rand_served, [*({**WARM, "seed": 3, **f} for f in off), NEIGHBOUR])
    assert len(set(texts)) == 1 and texts[0] != greedy
    assert beside == neighbour


NONSENSE: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-1, -1e-9, 2.0001, 1e9, 1e308, True, "1", [])),
    *({"top_p": value} for value in (-1, -1e-9, 1.5, 1.0000001, "0.9")),
    *({"top_k": value} for value in (-2, -(10**30), 1.5, "5", False)),
    *({"min_p": value} for value in (-0.1, 1.1)),
    *({"repetition_penalty": value} for value in (0, -1, 1e-300, 11, 1e308)),
]


def test_s1_nonsense_is_refused(rand_served: Served, neighbour: str) -> None:
    def refuse() -> None:
        for field in NONSENSE:
            (name,) = field
            error = check_error(rand_served.http.post(C, json={**WARM, **field}))
            assert error["param"] == name, (field, error)

    _, beside = all_at_once([refuse, lambda: text_of(rand_served, **NEIGHBOUR)])
    assert beside == neighbour


# ---- S2: seeds -------------------------------------------------------------------------------------------

CROWD: list[Body] = [
    {**WARM, "prompt": [20 + i, *range(300, 305 + i)], "seed": i, "temperature": 0.5 + i / 8}
    for i in range(8)
]


def test_s2_no_seed_is_another_one_each_time(rand_served: Served) -> None:
    assert len({text_of(rand_served, **WARM) for _ in range(3)}) == 3
    assert len(set(texts_together(rand_served, [WARM] * 4))) == 4


def test_s2_a_seed_says_the_same_in_any_company(rand_served: Served, rand: Path) -> None:
    """Alone, in a batch, in one place or another of it, with and without a cached prefix, after a restart."""
    long = {**WARM, "prompt": [13, *range(400, 440)], "seed": 7}
    for body in ({**WARM, "seed": 7}, long):
        alone = [text_of(rand_served, **body, cache_salt=salt) for salt in ("a", "b", "b")]
        assert len(set(alone)) == 1
        assert texts_together(rand_served, [*CROWD, body])[-1] == alone[0]
        assert texts_together(rand_served, [body, *CROWD])[0] == alone[0]
        with inside(rand, kv_memory=32 << 20) as another:
            assert text_of(another, **body) == alone[0]
        assert text_of(rand_served, **{**body, "seed": 8}) != alone[0]


def test_s2_a_cached_prefix_was_there(rand_served: Served) -> None:
    """What the test before takes for granted."""
    body = {**WARM, "prompt": [14, *range(400, 440)], "seed": 7, "ignore_eos": True}
    replies = [rand_served.http.post(C, json=body).json() for _ in range(2)]
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 32]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_s2_odd_seeds(rand_served: Served) -> None:
    """64 bits, signed or not; -1 is 2^64 - 1. Anything else is refused, in words."""
    good = [-1, 0, 2**63, 2**64 - 1, -(2**63)]
    texts = dict(zip(good, texts_together(rand_served, [{**WARM, "seed": s} for s in good]), strict=True))
    assert texts[-1] == texts[2**64 - 1] and texts[2**63] == texts[-(2**63)]
    assert len(set(texts.values())) == 3
    for seed in (2**64, -(2**63) - 1, 10**40, "7", 1.5, 7.0, True, [7]):
        assert check_error(rand_served.http.post(C, json={**WARM, "seed": seed}))["param"] == "seed"
    assert text_of(rand_served, **WARM, seed=None) not in texts.values()


def test_s2_choices_have_draws_of_their_own(rand_served: Served) -> None:
    body = {**WARM, "seed": 7, "n": 4, "ignore_eos": True}
    texts = [[c["text"] for c in rand_served.http.post(C, json=body).json()["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    assert texts[0][0] == text_of(rand_served, **WARM, seed=7)


# ---- S4: one request's parameters govern the batch -------------------------------------------------------

PUSHED = {"77": 25}  # so that an answer repeats itself until a penalty stops it
MIXED: list[Body] = [
    GREEDY,
    {**WARM, "temperature": 1.4, "top_k": 50, "seed": 5},
    {**GREEDY, "logit_bias": PUSHED},
    {**GREEDY, "logit_bias": PUSHED, "frequency_penalty": 2},
    {**GREEDY, "logit_bias": PUSHED, "presence_penalty": 2, "max_tokens": 9},
    {**GREEDY, "logit_bias": PUSHED, "repetition_penalty": 1.5, "max_tokens": 40},
    {**WARM, "logit_bias": {"77": 100}, "seed": 6, "max_tokens": 3},
    {**WARM, "top_p": 0.5, "min_p": 0.1, "seed": 9, "n": 2},
    {**GREEDY, "prompt": OTHER, "stop_token_ids": [705], "min_tokens": 2},
    {**WARM, "temperature": 2, "top_k": 200, "seed": 1, "logprobs": 5, "max_tokens": 30},
]


def test_s4_each_as_if_alone(rand_served: Served, rand: Path, greedy: str) -> None:
    stop = greedy[len(greedy) // 2 :][:3]
    first = load_reference(rand).greedy(PROMPT, 1)[0]
    bodies = [*MIXED, {**GREEDY, "stop": stop}, {**GREEDY, "logit_bias": {str(first): -100}}]
    alone = [text_of(rand_served, **body) for body in bodies]
    assert len(set(alone)) == len(bodies), "each parameter makes a difference"
    assert alone[0] == greedy and alone[-2] == greedy[: greedy.index(stop)]
    for _ in range(3):
        assert texts_together(rand_served, bodies) == alone
    assert texts_together(rand_served, bodies[::-1]) == alone[::-1]


TIED = (300, 905, 4000)


@pytest.fixture(scope="module")
def ties(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Iterator[tuple[Path, Served]]:
    """CHAIN where three ids follow each of themselves with equal logits."""
    folder = checkpoints.make_chain(tmp_path_factory.mktemp("ties"), (HELLO, TIED[1]))

    def tied(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "lm_head.weight":
            tensor[list(TIED)] = tensor[TIED[1]].clone()
        return tensor

    checkpoints._edit_tensors(folder, tied)
    checkpoints.add_tokenizer(folder, smol)
    with inside(folder) as server:
        yield folder, server


def test_s4_greedy_ties_go_to_the_lowest_id(ties: tuple[Path, Served]) -> None:
    """As transformers' argmax has it, and next to rows that draw; a draw takes any of the three."""
    folder, server = ties
    best = load_reference(folder).last_logits([HELLO])
    assert best[list(TIED)].unique().numel() == 1 and int(best.argmax()) == min(TIED)
    piece = load_reference_tokenizer(folder).decode([min(TIED)])
    greedy = {"prompt": [HELLO], "temperature": 0, "max_tokens": 1}
    drawn = [{**greedy, "temperature": 1, "seed": seed} for seed in range(12)]
    texts = texts_together(server, [greedy, *drawn, greedy])
    assert texts[0] == texts[-1] == piece
    assert set(texts[1:-1]) == {load_reference_tokenizer(folder).decode([token]) for token in TIED}
