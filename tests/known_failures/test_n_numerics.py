"""N: an answer does not depend on who else is served, and 16 bits are computed as well as elsewhere."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from server.engine import device
from tests.support.checkpoints import edit_config
from tests.support.decoding import load_decoder, native_heads, run_alone, some_ids
from tests.support.driving import fp32_engine
from tests.support.equality import assert_bf16_logits
from tests.support.reference import Reference, load_reference, load_reference_tokenizer
from tests.support.server import Served
from tests.support.standing import Known, known_from_reference
from tests.support.tensors import all_tensors, rewrite

Serves = Callable[..., Served]
Tiny = Callable[..., Path]

# ---- N1: greedy answers and batch mates

RAND_PROMPTS = [[7 + i, *range(100 + 10 * i, 100 + 10 * i + n)] for i, n in enumerate((3, 15, 30, 63, 120))]
SMOL_PROMPTS = [
    "Hello",
    "The capital of France is",
    "def fibonacci(n: int) -> list[int]:\n    numbers = [",
    "Il était une fois, dans un petit village au bord de la mer,",
    "17 + 25 = 42\n31 + 48 = 79\n56 + 27 =",
]
MATES = [[1000 + 7 * i, *range(2000, 2000 + length)] for i, length in enumerate(range(1, 90, 6))]
assert len(MATES) == 15

Said = tuple[list[str], list[float]]


async def ask(http: httpx.AsyncClient, prompt: Any, tokens: int, salt: str) -> Said:
    """An answer's tokens and their log-probabilities; the salt keeps prefixes apart."""
    body = {
        "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 1,
        "cache_salt": salt,
    }  # fmt: skip
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    scores = reply.json()["choices"][0]["logprobs"]
    return scores["tokens"], scores["token_logprobs"]


async def in_company(
    server: Served, prompts: Sequence[Any], tokens: int, longest: int
) -> dict[str, list[Said]]:
    """Each prompt alone, all of them beside MATES, and each among MATES that run already.

    Of each mate up to `longest` tokens are asked.
    """
    found: dict[str, list[Said]] = {}
    async with server.async_http() as http:

        def mates(salt: str) -> list[Coroutine[Any, Any, Said]]:
            return [ask(http, mate[:longest], 3 * tokens, salt) for mate in MATES]

        found["alone"] = [await ask(http, prompt, tokens, "alone") for prompt in prompts]
        crowd = await asyncio.gather(*(ask(http, p, tokens, "crowd") for p in prompts), *mates("crowd"))
        found["beside 15 others"] = list(crowd[: len(prompts)])
        running = [asyncio.create_task(mate) for mate in mates("late")]
        while not any(mate.done() for mate in running):
            if (await http.get("/health")).json()["running"] == len(MATES):
                break
        found["arriving late"] = await asyncio.gather(*(ask(http, p, tokens, "late") for p in prompts))
        await asyncio.gather(*running)
    return found


def assert_company_changes_nothing(
    found: dict[str, list[Said]], reference: Reference, tokenizer: Any, prompts: Sequence[Any]
) -> None:
    """Ids and log-probabilities are transformers' for each prompt alone; 1e-4 is allowed."""
    for index, prompt in enumerate(prompts):
        ids = prompt if isinstance(prompt, list) else tokenizer(prompt).input_ids
        tokens = len(found["alone"][index][0])
        answer = reference.greedy(ids, tokens)
        rows = reference.logits([*ids, *answer])[len(ids) - 1 : -1].log_softmax(-1)
        scores = rows[torch.arange(tokens), torch.tensor(answer)]
        for company, answers in found.items():
            said, logprobs = answers[index]
            names = [name for name in said if not name.startswith("bytes:")]
            assert len(said) == tokens
            assert all(name in tokenizer.decode(answer) for name in names), company
            error = (torch.tensor(logprobs) - scores).abs().max()
            assert float(error) < 1e-4, f"prompt {index} {company}: log-probabilities differ by {error:.3g}"
            assert said == found["alone"][index][0], company


async def test_n1_rand_alone_in_a_crowd_and_late(served: Serves, rand: Path, rand_known: Known) -> None:
    server = served(rand, rand_known, kv_memory=32 << 20)
    found = await in_company(server, RAND_PROMPTS, 20, 90)
    assert_company_changes_nothing(found, load_reference(rand), load_reference_tokenizer(rand), RAND_PROMPTS)


@pytest.mark.model
async def test_n1_the_default_model_alone_in_a_crowd_and_late(served: Serves, smol: Path) -> None:
    server = served(smol, known_from_reference(smol, "The capital of France is", 2), kv_memory=256 << 20)
    found = await in_company(server, SMOL_PROMPTS, 4, 12)
    assert_company_changes_nothing(found, load_reference(smol), load_reference_tokenizer(smol), SMOL_PROMPTS)


# ---- N2: half precision on a CPU

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("name", [*HALVES, "float32"])
def test_n2_every_dtype_answers(served: Serves, tiny_served: Path, name: str) -> None:
    """No operation lacks it; chats, samples and a prefix hit too."""
    plain = served(tiny_served, known_from_reference(tiny_served, "The old clockmaker", 6))
    assert plain.kv()["pool"]["dtype"] == "float32"
    body = {"prompt": "The old clockmaker", "temperature": 0, "max_tokens": 6}
    said = plain.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    server = served(tiny_served, Known("The old clockmaker", said, 6), dtype=name)
    assert server.kv()["pool"]["dtype"] == name
    for fields in ({}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"logprobs": 3}, {"n": 3}):
        reply = server.http.post("/v1/completions", json={**body, **fields})
        assert reply.status_code == 200, reply.text
    reply = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", HALVES)
def test_n2_errs_no_more_than_transformers_in_the_same_dtype(tiny: Tiny, family: str, name: str) -> None:
    folder = tiny(family=family, hidden=128, layers=4, dtype=HALVES[name], std=0.1)
    decoder = load_decoder(folder, HALVES[name])
    ids = some_ids(200)
    ours = run_alone(decoder, ids, native_heads(decoder), 64)
    assert ours.dtype == torch.float32
    theirs = load_reference(folder, HALVES[name]).logits(ids)
    assert_bf16_logits(ours, theirs, load_reference(folder).logits(ids), name)


@pytest.mark.model
@pytest.mark.parametrize("name", HALVES)
def test_n2_the_default_model_in_half_precision(smol: Path, name: str) -> None:
    ids = load_reference_tokenizer(smol)("The capital of France is Paris, and that of Italy is").input_ids
    decoder = load_decoder(smol, HALVES[name])
    ours = run_alone(decoder, ids, native_heads(decoder))
    theirs = load_reference(smol, HALVES[name]).logits(ids)
    assert_bf16_logits(ours, theirs, load_reference(smol).logits(ids))


def test_n2_norms_and_logits_are_fp32(tiny: Tiny, tmp_path: Path) -> None:
    """Values of a few hundred, whose squares float16 cannot hold: a norm computed in it is no number."""
    folder = shutil.copytree(tiny(dtype=torch.float16), tmp_path / "large")
    tensors = all_tensors(folder)
    tensors["model.embed_tokens.weight"] *= 2000
    assert float(tensors["model.embed_tokens.weight"].abs().max()) > 1000
    rewrite(folder, tensors)
    decoder = load_decoder(folder, torch.float16)
    ids = some_ids(40)
    ours = run_alone(decoder, ids, native_heads(decoder), 16)
    theirs = load_reference(folder, torch.float16).logits(ids)
    assert_bf16_logits(ours, theirs, load_reference(folder).logits(ids))
    layer = decoder.weights.layers[0]
    assert layer.input_norm.dtype == layer.post_norm.dtype == decoder.weights.norm.dtype == torch.float32


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", None])
@pytest.mark.parametrize("flags", [{"avx2"}, {"avx512f", "avx512_bf16"}, {"amx_bf16"}], ids=" ".join)
def test_n2_the_default_is_16_bit_only_where_the_cpu_computes_in_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, stored: str | None, flags: set[str]
) -> None:
    """Else float32, and the reason is told; the key is the old one or transformers 5's."""
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    folder = shutil.copytree(tiny(), tmp_path / "model")
    edit_config(folder, {} if stored is None else {key: stored}, drop=["torch_dtype", "dtype"])
    if stored is not None:
        edit_config(folder, {key: stored})
    _, facts = fp32_engine(folder, dtype="auto")
    native = stored in HALVES and flags != {"avx2"}
    assert facts.dtype == ("bfloat16" if native else "float32")
    assert ("names no dtype" if stored is None else stored) in facts.dtype_reason
    assert stored not in HALVES or ("bf16" in facts.dtype_reason)
    for asked in (*HALVES, "float32"):
        _, facts = fp32_engine(folder, dtype=asked)
        assert (facts.dtype, facts.dtype_reason) == (asked, "as asked")
