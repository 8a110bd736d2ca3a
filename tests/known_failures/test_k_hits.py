"""K1, K2, K4: a hit changes no answer, never covers what has not been computed, and is never a mistake."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cache import chain as chain_module
from cache.chain import TokenChain
from server.engine.engine import Engine
from server.engine.request import FinishReason, Request, SamplingParams
from tests.cache.test_prefix import found
from tests.cache.test_prefix import run as run_prompt
from tests.cache.test_random_use import drive
from tests.engine.conftest import Oracle
from tests.support.cache_harness import Harness, make_manager
from tests.support.driving import Answer, fp32_engine, greedy_request, run
from tests.support.engines import checked, manager_of, pool_of, prompt_of, run_staggered

TOKENS = 12


def asked(prompt: Sequence[int], tokens: int = TOKENS, **fields: object) -> Request:
    return greedy_request(prompt, tokens, logprobs=3, **fields)  # type: ignore[arg-type]


def assert_right(answer: Answer, prompt: Sequence[int], oracle: Oracle, tokens: int = TOKENS) -> None:
    """The ids are transformers', and so are the log-probabilities of each and of the best three."""
    assert answer.ids == oracle.greedy(prompt, tokens)
    text = torch.tensor([[*prompt, *answer.ids[:-1]]])
    with torch.inference_mode():
        logits = oracle.reference.model(text, logits_to_keep=tokens).logits[0]
    expected = torch.log_softmax(logits.to(torch.float32), -1)
    for row, token, score in zip(expected, answer.ids, answer.scores, strict=True):
        assert score is not None
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in score.top] == row.topk(3).indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def engine_of(folder: Path, prefix_cache: bool, **options: object) -> Engine:
    return checked(fp32_engine(folder, prefix_cache=prefix_cache, **options)[0])


def cached(answer: Answer) -> int:
    assert answer.kv is not None
    return answer.kv.cached_tokens


@pytest.fixture(params=[True, False], ids=["cache on", "cache off"])
def prefix_cache(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("budget", [None, 64, 7])
def test_k1_one_prompt_four_times(
    small: Path, oracle: Oracle, prefix_cache: bool, budget: int | None
) -> None:
    """70 ids, of which 64 are whole blocks; in steps of any size."""
    engine = engine_of(small, prefix_cache, max_batch_tokens=budget, max_num_seqs=4)
    prompt = prompt_of(70, 5)
    for hit in (0, 64, 64, 64):
        ((answer,),) = run(engine, [asked(prompt)])
        assert_right(answer, prompt, oracle)
        assert cached(answer) == (hit if prefix_cache else 0)


def test_k1_a_shared_prefix_with_other_tails(small: Path, oracle: Oracle, prefix_cache: bool) -> None:
    """40 ids in common, 32 of them a hit; one tail goes on where another answer went."""
    engine = engine_of(small, prefix_cache)
    shared = prompt_of(40, 6)
    tails = [prompt_of(5 + i, 7 + i) for i in range(4)]
    turn = tuple(oracle.greedy(shared + tails[0], TOKENS)) + prompt_of(9, 60)
    for i, tail in enumerate([*tails, tails[0] + turn, ()]):
        ((answer,),) = run(engine, [asked(shared + tail)])
        assert_right(answer, shared + tail, oracle)
        expected = (0, 32, 32, 32, 48, 32)[i]  # 45 + 12 - 1 tokens of the first are known: three blocks
        assert cached(answer) == (expected if prefix_cache else 0)


def test_k1_equal_prompts_at_one_moment(small: Path, oracle: Oracle, prefix_cache: bool) -> None:
    """In one batch, where nobody's blocks are computed when the others begin: no hit on what is not there."""
    engine = engine_of(small, prefix_cache)
    prompt = prompt_of(70, 8)
    for answers in run(engine, [asked(prompt) for _ in range(4)]):
        assert_right(answers[0], prompt, oracle)
        assert cached(answers[0]) == 0


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_k1_one_that_comes_during_the_others_prefill(
    small: Path, oracle: Oracle, prefix_cache: bool, after: int
) -> None:
    """150 ids in steps of 64: what the first has computed so far may be a hit, the rest may not."""
    engine = engine_of(small, prefix_cache, max_batch_tokens=64)
    prompt = prompt_of(150, 9)
    first, second = asked(prompt), asked(prompt)
    answers = run_staggered(engine, [(0, first), (after, second)])
    for request in (first, second):
        assert_right(answers[request.id][0], prompt, oracle)
    if not prefix_cache:
        assert cached(answers[second.id][0]) == 0
    assert cached(answers[second.id][0]) <= 144


def test_k1_hits_of_copies_and_after_an_abort(small: Path, oracle: Oracle, prefix_cache: bool) -> None:
    """Siblings: n answers on a hit, and a prompt whose first asker has left in the middle of its prefill."""
    engine = engine_of(small, prefix_cache, max_batch_tokens=32, max_num_seqs=4)
    prompt = prompt_of(100, 30)
    gone = asked(prompt)
    engine.add(gone)
    engine.step()
    engine.step()
    engine.abort(gone.id)
    engine.step()
    for _ in range(2):
        (answers,) = run(engine, [asked(prompt, n=3)])
        for answer in answers:
            assert_right(answer, prompt, oracle)


def test_k1_hits_in_a_pool_that_forgets(small: Path, oracle: Oracle, prefix_cache: bool) -> None:
    """A sibling: what was evicted is computed again, and what was preempted finds its own blocks, or not."""
    engine = checked(pool_of(small, 14, prefix_cache=prefix_cache)[0])
    shared = prompt_of(40, 6)
    prompts = [shared + prompt_of(10 + i, 50 + i) for i in range(5)]
    for _ in range(2):
        answers = run(engine, [asked(prompt, 40) for prompt in prompts])
        for prompt, (answer,) in zip(prompts, answers, strict=True):
            assert_right(answer, prompt, oracle, 40)
    assert engine.stats().preemptions > 0


def test_k1_sampled_answers_do_not_change_either(small: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    prompt = prompt_of(70, 5)
    answers = []
    for prefix_cache in (False, True):
        engine = engine_of(small, prefix_cache)
        answers += [run(engine, [asked(prompt, n=2, sampling=params)])[0] for _ in range(2)]
    assert all([a.ids for a in answer] == [a.ids for a in answers[0]] for answer in answers)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_k2_block_boundaries_and_full_hits(small: Path, oracle: Oracle, length: int) -> None:
    """Each prompt twice, 40 new tokens; a hit covers whole blocks and never the last token. `checked` looks
    after every step that blocks held are ceil(tokens with K and V / 16)."""
    prompt = prompt_of(length, 4)
    engine = checked(fp32_engine(small)[0])
    for hit in (0, (length - 1) // 16 * 16):
        ((answer,),) = run(engine, [asked(prompt, 40)])
        assert_right(answer, prompt, oracle, 40)
        assert answer.finish is FinishReason.LENGTH
        assert answer.kv is not None and answer.kv.cached_tokens == hit <= length - 1
        tokens = length + 40 - 1
        assert (answer.kv.tokens, answer.kv.blocks) == (tokens, 2 * -(-tokens // 16))
    assert manager_of(engine).live_blocks == 0


@pytest.mark.parametrize("block_size", [1, 4, 64])
@pytest.mark.parametrize("tokens", [1, 2])
def test_k2_other_block_sizes(small: Path, oracle: Oracle, block_size: int, tokens: int) -> None:
    """Siblings: blocks of one token, whose last is never a hit; answers that end at a boundary."""
    engine = checked(fp32_engine(small, block_size=block_size)[0])
    for length in (1, 4, 63, 64, 65):
        prompt = prompt_of(length, 4)
        for hit in (0, (length - 1) // block_size * block_size):
            ((answer,),) = run(engine, [asked(prompt, tokens, root=bytes([tokens, length]) * 16)])
            assert_right(answer, prompt, oracle, tokens)
            assert cached(answer) == hit


@pytest.mark.parametrize(
    ("root", "tokens"),
    [("b", [1] * 4), ("a", [2] * 4), ("b", [2] * 4)],
    ids=["another root", "other tokens", "both"],
)
def test_k4_an_equal_digest_is_not_a_hit(
    root: str, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash is a constant; A is stored, B is looked up."""
    monkeypatch.setattr(chain_module, "block_digest", lambda parent, tokens: bytes(32))
    harness = Harness(make_manager(50), compare=False)
    harness.close(run_prompt(harness, [1] * 4))
    assert len(harness.manager.state.index.by_digest) == 1
    assert found(harness, [1] * 5) == 4
    assert found(harness, [*tokens, 9], root) == 0
    assert found(harness, [*tokens, 9], variant="native") == 0


def test_k4_equal_blocks_under_other_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the same tokens after different ones; the digest forgets what came before."""
    monkeypatch.setattr(chain_module, "block_digest", lambda parent, tokens: tokens.ljust(32, b"\0"))
    harness = Harness(make_manager(50), compare=False)
    one, two, seven, eight = ([token] * 4 for token in (1, 2, 7, 8))
    harness.close(run_prompt(harness, one + seven + eight))
    assert found(harness, [*one, *seven, *eight, 5]) == 12
    harness.close(run_prompt(harness, two))
    assert found(harness, [*two, *seven, *eight, 5]) == 4, "eight follows seven, but not this one"
    assert found(harness, [*seven, *eight, 5]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_k4_a_constant_hash_under_random_use(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, parent, root and variant tell all blocks apart, and every one reads back as itself."""
    monkeypatch.setattr(chain_module, "block_digest", lambda parent, tokens: bytes(32))
    drive(Harness(make_manager(60, max_seq_len=32), compare=False), 1000, seed)


def test_k4_answers_with_a_constant_hash(
    small: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a model: nobody gets another's words."""
    monkeypatch.setattr(chain_module, "block_digest", lambda parent, tokens: bytes(32))
    engine = checked(fp32_engine(small)[0])
    prompts = [prompt_of(40, i) for i in range(3)]
    for prompt in [*prompts, *prompts]:
        ((answer,),) = run(engine, [asked(prompt)])
        assert_right(answer, prompt, oracle)


@pytest.mark.parametrize("seed", ["0", "1", "12345", "random"])
def test_k4_digests_are_the_same_in_every_process(seed: str) -> None:
    """sha-256 over the parent's digest and the ids as little-endian int32, whatever PYTHONHASHSEED is."""
    root = bytes(range(32))
    first = hashlib.sha256(root + struct.pack("<2i", 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 9, 10)).digest()
    chain = "TokenChain(bytes(range(32)), 2, [7, 8, 9, 10])"
    program = f"from cache.chain import TokenChain; print({chain}.digests(0, 2))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str([first, second])


def test_k4_ids_that_a_plain_hash_confuses() -> None:
    """hash(-1) == hash(-2) in Python, and 1, 256 beside 257 are the same bytes in some encodings."""
    pairs = [([-1, 5], [-2, 5]), ([1, 256], [257, 0]), ([0, 1], [1, 0]), ([1, 2**31 - 1], [2**31 - 1, 1])]
    for one, other in pairs:
        digests = [TokenChain(bytes(32), 2, ids).digests(0, 1) for ids in (one, other)]
        assert digests[0] != digests[1], (one, other)
