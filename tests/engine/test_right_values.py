"""The default model's cache in numbers, by the engine, over HTTP and in the metrics: 1 : 3 : 9, exactly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.heads import MeanHeads, NativeHeads, RepeatHeads, Variant
from server.engine.build import build_engine
from server.engine.engine import Engine
from server.engine.options import EngineOptions
from tests.support.driving import greedy_request, run
from tests.support.native import native
from tests.support.server import Served, inside

pytestmark = pytest.mark.model
BLOCK = 122_880  # bf16: 2 * 30 layers * 16 tokens * 64 * 2 bytes
HEADS = {"mqa": 1, "native": 3, "mha": 9}
PROMPT = [1, *range(1000, 1031)]  # 32 tokens


@pytest.fixture(scope="module")
def engine(smol: Path) -> Engine:
    variants = (
        Variant("native", NativeHeads(3)), Variant("mha", RepeatHeads(9)), Variant("mqa", MeanHeads(1)),
    )  # fmt: skip
    options = EngineOptions(dtype="bfloat16", kv_memory=400 * BLOCK, debug=True)
    return build_engine(options, smol, variants=variants, native=native)[0]


def test_the_33rd_kv_token_of_every_mode_in_one_step(engine: Engine) -> None:
    """32 prompt tokens are 2 logical blocks; the first token drawn is the 33rd, written in the next step."""
    for mode in HEADS:
        engine.add(greedy_request(PROMPT, 3, variant=mode, root=mode.encode().ljust(32)))
    engine.step()
    assert engine.live_bytes() == {mode: 2 * heads * BLOCK for mode, heads in HEADS.items()}
    engine.step()
    assert engine.live_bytes() == {mode: 3 * heads * BLOCK for mode, heads in HEADS.items()}
    report = {variant.name: variant for variant in engine.report().variants}
    assert {name: v.live_bytes for name, v in report.items()} == engine.live_bytes()
    assert {name: v.bytes_per_token for name, v in report.items()} == {
        "mqa": 7_680,
        "native": 23_040,
        "mha": 69_120,
    }
    assert {v.live_tokens for v in report.values()} == {33}
    while engine.has_work:
        engine.step()
    assert engine.dead is None and set(engine.live_bytes().values()) == {0}


def test_a_request_that_ends_with_128_kv_tokens(engine: Engine) -> None:
    """120 prompt tokens and 9 of output, the last of which is never written: 8 logical blocks."""
    prompt = [1, *range(2000, 2119)]
    requests = [greedy_request(prompt, 9, variant=m, root=m.encode().ljust(32)) for m in HEADS]
    for (answer,), (mode, heads) in zip(run(engine, requests), HEADS.items(), strict=True):
        assert answer.kv is not None
        assert (answer.kv.tokens, answer.kv.blocks, answer.kv.exclusive) == (128, 8 * heads, 8 * heads), mode


@pytest.fixture(scope="module")
def server(smol: Path) -> Iterator[Served]:
    """Modes named by their aliases; reports and metrics know them by their canonical names."""
    options: dict[str, Any] = {
        "attention": ("gqa3", "gqa9", "gqa1"), "head_map": "mean", "dtype": "bfloat16", "debug": True,
    }  # fmt: skip
    with inside(smol, served_name="smol", kv_memory=400 * BLOCK, **options) as server:
        yield server


async def test_live_bytes_over_http_stand_as_one_to_three_to_nine(server: Served) -> None:
    """65 to 80 tokens are 5 logical blocks from the first step to the last, so whenever all three are there
    the ratio is exact, in `/v1/kv` and in the requests' own accounts; metrics name the same modes."""
    body = {"prompt": [5, *range(3000, 3064)], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    seen: list[tuple[dict[str, int], str]] = []
    async with server.async_http() as http:

        async def ask(mode: str) -> Any:
            return await http.post("/v1/completions", json=body | {"model": f"smol@{mode}"})

        asked = [asyncio.ensure_future(ask(mode)) for mode in ("gqa1", "native", "mha")]
        while not all(task.done() for task in asked):
            report = (await http.get("/v1/kv")).json()
            live = {variant["name"]: variant["live_bytes"] for variant in report["variants"]}
            seen.append((live, (await http.get("/metrics")).text))
        replies = [(await task).json() for task in asked]
    assert [reply["usage"]["kv_cache"]["blocks"] for reply in replies] == [5, 15, 45]
    assert [reply["usage"]["kv_cache"]["bytes_peak"] for reply in replies] == [
        5 * BLOCK, 15 * BLOCK, 45 * BLOCK,
    ]  # fmt: skip
    together = [(live, text) for live, text in seen if all(live.values())]
    assert together, "the three were never seen side by side"
    for live, _ in together:
        assert live == {"native": 15 * BLOCK, "mha": 45 * BLOCK, "mqa": 5 * BLOCK}
    for _, text in seen:
        labels = re.findall(r'headroom:kv_live_bytes\{variant="([^"]*)"\}', text)
        assert sorted(labels) == ["mha", "mqa", "native"]
    assert "gqa" not in seen[0][1]


def test_the_audit_of_a_server_agrees(server: Served) -> None:
    """Through everything that ran before: 400 blocks and the scratch block, whole pages of 4 KiB."""
    told = server.kv(check=True)["audit"]
    assert told["predicted_bytes"] == told["arena_bytes"] == told["device_bytes"] == 401 * BLOCK
    assert told["agrees"] is True
    assert 0 < told["resident_bytes"] <= 401 * BLOCK
