"""The default model, in fp32, against transformers on the same folder: a real checkpoint, real text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import driving, prompts
from tests.support.driving import fp32_engine, greedy_request
from tests.support.equality import Tally, assert_bf16_logits, assert_same_ids
from tests.support.reference import Reference, load_reference, load_reference_tokenizer, token_losses
from tests.support.tap import listen

pytestmark = pytest.mark.model

TOKENS = 64


@pytest.fixture(scope="module")
def reference(smol: Path) -> Reference:
    return load_reference(smol)


@pytest.fixture(scope="module")
def asked(smol: Path) -> dict[str, list[int]]:
    """Twenty prompts as ids: texts, chats, and 1,500 tokens of prose."""
    tokenizer = load_reference_tokenizer(smol)
    asked = {name: list(tokenizer(text).input_ids) for name, text in prompts.TEXTS.items()}
    for name, messages in prompts.CHATS.items():
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        asked[name] = list(tokenizer(rendered, add_special_tokens=False).input_ids)
    asked["long"] = list(tokenizer(prompts.PROSE).input_ids)[: prompts.LONG_TOKENS]
    assert len(asked) == 20
    assert (len(asked["one token"]), len(asked["long"])) == (1, 1500)
    return asked


@pytest.fixture(scope="module")
def answers(smol: Path, asked: dict[str, list[int]]) -> dict[str, list[int]]:
    """Our greedy answers, all prompts at once."""
    engine, _ = fp32_engine(smol, kv_memory=512 << 20, max_model_len=2048)
    requests = [greedy_request(ids, TOKENS) for ids in asked.values()]
    return {name: answer.ids for name, (answer,) in zip(asked, driving.run(engine, requests), strict=True)}


def test_greedy_ids_in_one_batch(
    reference: Reference, asked: dict[str, list[int]], answers: dict[str, list[int]]
) -> None:
    """Every id is the one transformers would have chosen after the same text."""
    tally = Tally()
    for name, answer in answers.items():
        assert len(answer) == TOKENS
        expected = reference.greedy_along(asked[name], answer)
        assert_same_ids(answer, expected, asked[name], reference.last_logits, tally, where=name)
    print(tally, *tally.notes, sep="\n")
    assert tally.near_ties <= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_ids_against_generation(
    reference: Reference, asked: dict[str, list[int]], answers: dict[str, list[int]]
) -> None:
    """The same, with transformers generating token by token from its own cache."""
    tally = Tally()
    for name, answer in answers.items():
        expected = reference.greedy(asked[name], TOKENS)
        assert_same_ids(answer, expected, asked[name], reference.last_logits, tally, where=name)
    print(tally, *tally.notes, sep="\n")


def test_a_few_alone(
    smol: Path, asked: dict[str, list[int]], answers: dict[str, list[int]], reference: Any
) -> None:
    """Alone, in small chunks, and again with a prefix hit: the ids of the batch."""
    engine, _ = fp32_engine(smol, kv_memory=512 << 20, max_model_len=2048, max_batch_tokens=64)
    tally = Tally()
    for name in ("long", "chat", "emoji", "long"):
        answer = driving.generate(engine, asked[name], 24)
        assert_same_ids(answer, answers[name][:24], asked[name], reference.last_logits, tally, where=name)
    assert engine.stats().cached_tokens >= 1499 // 16 * 16
    print(tally, *tally.notes, sep="\n")


def test_perplexity(smol: Path, reference: Reference) -> None:
    """Of 2,000 tokens of prose, from the logits the engine computes chunk by chunk."""
    ids = list(load_reference_tokenizer(smol)(prompts.PROSE).input_ids)[: prompts.PERPLEXITY_TOKENS]
    assert len(ids) == prompts.PERPLEXITY_TOKENS
    losses: list[torch.Tensor] = []
    with listen() as tap:
        engine, _ = fp32_engine(smol, kv_memory=128 << 20, max_model_len=2048, max_batch_tokens=256)
        engine.add(greedy_request(ids, 1))
        while engine.has_work:
            engine.step()
            (run,) = tap.runs
            first = run.stop - len(run.logits[-1])
            losses.append(token_losses(run.logits.pop(), ids[first + 1 : run.stop + 1]))
    ours = float(torch.cat(losses).mean().exp())
    theirs = reference.perplexity(ids)
    print(f"perplexity {ours:.5f}, transformers {theirs:.5f}")
    assert torch.cat(losses).shape == (len(ids) - 1,)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert 5 < ours < 50, "neither of the two reads this text"


def test_bf16_errs_no_more_than_transformers_does(
    smol: Path, asked: dict[str, list[int]], reference: Reference
) -> None:
    """Logits of a few texts, judged by fp32; greedy ids may differ at a near tie of twice the error."""
    plain, tally = load_reference(smol, torch.bfloat16), Tally()
    for name in ("python", "emoji", "chat with a history"):
        with listen() as tap:
            engine, facts = fp32_engine(smol, dtype="bfloat16", kv_memory=64 << 20, max_model_len=512)
            assert facts.dtype == facts.kv_dtype == "bfloat16"
            answer = driving.generate(engine, asked[name], 24)
        text = [*asked[name], *answer][:-1]
        exact, ours = reference.logits(text), torch.cat(tap.runs[0].logits)
        near_tie = assert_bf16_logits(ours, plain.logits(text), exact, name)
        expected = reference.greedy_along(asked[name], answer)
        assert_same_ids(answer, expected, asked[name], reference.last_logits, tally, near_tie, name)
    print(tally, *tally.notes, sep="\n")


@pytest.fixture(scope="module", autouse=True)
def _free(reference: Reference) -> Iterator[None]:
    """The reference takes half a gigabyte; let it go with this module."""
    yield
    from tests.support import reference as module

    module._load.cache_clear()
