"""A cached prefix answers only its own attention mode, head map and calibration, from the same text and root.

RAND's every token depends on all the text before it, so a block of another mode under an answer would change
it. The right answers come from transformers: of the folder itself for native and mha, and for mqa of an
ordinary MQA checkpoint whose K and V weights are the averages that the mean head map makes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from model.heads import MeanHeads, NativeHeads, RepeatHeads, Variant
from server.app import load
from server.config import ModelOptions
from server.engine.options import EngineOptions
from server.text.asks import CompletionAsk, SamplingAsk
from server.text.prepare import Preparer
from tests.support import checkpoints
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.reference import Reference, load_reference, load_reference_tokenizer
from tests.support.server import Served, inside

MODES = ("native", "mha", "mqa")
TOKENS = 12
PROMPT = [11, *range(500, 539)]  # 40 tokens: 2 whole blocks of 16 can be found
OTHERS = [[*PROMPT[:32], 60 + i, *range(700, 720 + i)] for i in range(3)]  # share its first two blocks
THREE = (
    Variant("native", NativeHeads(2)),
    Variant("mha", RepeatHeads(4)),
    Variant("mqa", MeanHeads(1)),
)


@pytest.fixture(scope="module")
def references(rand: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """transformers for each mode. RAND has 2 KV heads of 16."""
    mean = tmp_path_factory.mktemp("mean") / "rand"
    shutil.copytree(rand, mean)
    weights = load_file(rand / "model.safetensors")
    for name in [name for name in weights if ".k_proj." in name or ".v_proj." in name]:
        weights[name] = weights[name].reshape(2, 16, -1).mean(0).contiguous()
    save_file(weights, mean / "model.safetensors", {"format": "pt"})
    checkpoints.edit_config(mean, {"num_key_value_heads": 1})
    own = load_reference(rand)
    return {"native": own, "mha": own, "mqa": load_reference(mean)}


@pytest.fixture
def server(rand: Path) -> Iterator[Served]:
    with inside(rand, served_name="rand", attention=MODES, head_map="mean", debug=True) as server:
        yield server


def name_of(mode: str) -> str:
    return "rand" if mode == "native" else f"rand@{mode}"


def body(mode: str, ids: list[int]) -> dict[str, Any]:
    return {
        "model": name_of(mode), "prompt": ids, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
    }  # fmt: skip


def told(reply: Any) -> tuple[str, int]:
    """The text, and how many prompt tokens came out of the cache."""
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["text"], answer["usage"]["kv_cache"]["cached_tokens"]


def test_equal_prompts_in_turn(server: Served, rand: Path, references: dict[str, Reference]) -> None:
    """The first time no mode finds anything, whatever the others left; the second time each finds its own."""
    tokenizer = load_reference_tokenizer(rand)
    right = {
        mode: tokenizer.decode(references[mode].greedy(PROMPT, TOKENS), skip_special_tokens=True)
        for mode in MODES
    }
    assert right["native"] != right["mqa"], "RAND tells the maps apart"
    for cached in (0, 32, 32):
        for mode in MODES:
            reply = server.http.post("/v1/completions", json=body(mode, PROMPT))
            assert told(reply) == (right[mode], cached), (mode, cached)


async def test_equal_prompts_at_once(server: Served, rand: Path, references: dict[str, Reference]) -> None:
    """All modes and four prompts with one beginning in flight together, three times. Who computes a block
    that another is computing too may keep it to itself the first time; the third time all is known."""
    tokenizer = load_reference_tokenizer(rand)
    asked = [(mode, ids) for ids in (PROMPT, *OTHERS) for mode in MODES]
    right = [
        tokenizer.decode(references[mode].greedy(ids, TOKENS), skip_special_tokens=True)
        for mode, ids in asked
    ]
    async with server.async_http() as http:
        for _ in range(3):
            posts = [http.post("/v1/completions", json=body(mode, ids)) for mode, ids in asked]
            answers = [told(reply) for reply in await asyncio.gather(*posts)]
            assert [text for text, _ in answers] == right
        assert [cached for _, cached in answers] == [(len(ids) - 1) // 16 * 16 for _, ids in asked]


def test_the_cache_itself_tells_modes_apart(rand: Path, references: dict[str, Reference]) -> None:
    """Even under one root, which the words never give to two modes: the first to publish is the one found."""
    engine = fp32_engine(rand, variants=THREE, debug=True)[0]
    for first in MODES:
        root = first.encode().ljust(32, b"\0")
        for mode in (first, *MODES, *MODES):
            ((answer,),) = run(engine, [greedy_request(PROMPT, TOKENS, variant=mode, root=root)])
            assert answer.ids == references[mode].greedy(PROMPT, TOKENS)
            assert answer.kv is not None
            assert answer.kv.cached_tokens in ((0, 32) if mode == first else (0,)), (first, mode)
        assert answer.finish is not None and engine.dead is None


@pytest.mark.parametrize("mode", MODES)
async def test_another_calibration_finds_nothing(rand: Path, mode: str, tmp_path: Path) -> None:
    """The same engine, prompt, mode and key; what differs is the identity of the numbers in the head map."""
    options = EngineOptions(dtype="float32", kv_memory=8 << 20, attention=MODES, head_map="mean", debug=True)
    loaded = load(ModelOptions(str(rand), tmp_path, "rand", engine=options), rand)
    assert loaded.served.variants["mqa"].identity == "mean"
    seen = []
    for identity in ("aligned:1a2b", "aligned:1a2c", "aligned:1a2b", "mean", "aligned:1a2c", ""):
        variants = {
            name: replace(variant, identity=identity) for name, variant in loaded.served.variants.items()
        }
        preparer = Preparer(replace(loaded.served, variants=variants), loaded.tokenizer, loaded.chat)
        sampling = SamplingAsk(temperature=0.0)
        ask = CompletionAsk("one", PROMPT, model=name_of(mode), max_tokens=2, sampling=sampling)
        prepared = await preparer.completion(ask)
        await preparer.close()
        ((answer,),) = run(loaded.engine, [prepared.request])
        assert answer.kv is not None
        seen.append(answer.kv.cached_tokens)
    assert seen == [0, 0, 32, 0, 32, 0]
