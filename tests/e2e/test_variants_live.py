"""One server, several attention modes: by name, side by side in every forward, each with its own cache."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.decoder import Decoder
from server.engine.engine import Engine
from tests.support.server import Served, inside

C, CHAT = "/v1/completions", "/v1/chat/completions"
MODES = ("native", "mha", "mqa")
BLOCK_BYTES = 2 * 2 * 16 * 16 * 4  # two layers, blocks of 16 tokens, head_dim 16, fp32
KV_HEADS = {"native": 2, "mha": 4, "mqa": 1}


@pytest.fixture(scope="module")
def server(tiny_served: Path) -> Iterator[Served]:
    """4 query and 2 KV heads, as native, mha and mqa."""
    with inside(tiny_served, attention=MODES, head_map="mean", served_name="tiny") as server:
        yield server


def body(ids: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": ids, "temperature": 0, "max_tokens": tokens, "ignore_eos": True} | fields


def ids_of(seed: int, count: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 380 for i in range(count)]


def ask(server: Served, path: str = C, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert isinstance(found, dict)
    return found


async def ask_all(server: Served, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    async with server.async_http() as http, asyncio.timeout(60):
        replies = await asyncio.gather(*(http.post(C, json=one) for one in bodies))
    assert [reply.status_code for reply in replies] == [200] * len(bodies)
    return [reply.json() for reply in replies]


class Forwards:
    """Counts forwards of any decoder, and engine steps that computed something."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.maps: list[list[int]] = []  # of each forward: the KV heads of its segments
        self.steps = 0
        hidden, step = Decoder.hidden, Engine.step

        def counted(decoder: Decoder, ids: Any, positions: Any, segments: Any, *rest: Any) -> Any:
            self.maps.append(sorted(segment.head_map.kv_heads for segment in segments))
            return hidden(decoder, ids, positions, segments, *rest)

        def stepped(engine: Engine) -> Any:
            before = len(self.maps)
            events = step(engine)
            self.steps += len(self.maps) > before
            return events

        patch.setattr(Decoder, "hidden", counted)
        patch.setattr(Engine, "step", stepped)


async def test_one_forward_a_step_for_all_modes(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine answers of 30 tokens, three of each mode: their decode steps are shared."""
    forwards = Forwards(monkeypatch)
    prompts = [ids_of(i, 20 + 5 * i) for i in range(3)]
    names = ("tiny", "tiny@mha", "tiny@mqa")
    bodies = [body(ids, 30, model=name, logprobs=None) for ids in prompts for name in names]
    answers = await ask_all(server, bodies)
    assert len(forwards.maps) == forwards.steps, "each step is one forward"
    assert [1, 2, 4] in forwards.maps, "with tokens of every mode"
    assert len(forwards.maps) < 2 * 30, "nine answers took the steps of one or two"
    texts = [answer["choices"][0]["text"] for answer in answers]
    for native, mha, mqa in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        assert mha == native, "expanding is exact"
        assert mqa != native, "averaging is not"
    assert [answer["model"] for answer in answers] == list(names) * 3


def test_names_and_aliases(server: Served) -> None:
    """Every spelling reaches its mode, and is echoed as it was asked."""
    heads = {
        None: 2, "tiny": 2, "tiny@native": 2, "tiny@gqa2": 2, "tiny@mha": 4, "tiny@gqa4": 4, "tiny@mqa": 1,
        "tiny@gqa1": 1,
    }  # fmt: skip
    for name, kv_heads in heads.items():
        for path, what in ((C, {"prompt": "ab"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            answer = ask(server, path, model=name, max_tokens=2, ignore_eos=True, **what)
            assert answer["model"] == (name or "tiny")
            assert answer["usage"]["kv_cache"]["bytes_per_token"] == kv_heads * 256
        if name is not None:
            assert server.http.get(f"/v1/models/{name}").json()["id"] == name
    for wrong, what in (("tiny@gqa3", "attention mode"), ("other", "model"), ("other@mha", "model")):
        for reply in (
            server.http.post(C, json={"model": wrong, "prompt": "a"}),
            server.http.get(f"/v1/models/{wrong}"),
        ):
            assert reply.status_code == 404
            error = reply.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"] == (
                f"The {what} `{wrong}` is not served here. Served: tiny, tiny@mha, tiny@mqa."
            )


def test_the_first_mode_answers_where_none_is_named(tiny_served: Path) -> None:
    """Also under the bare name, where native is not served."""
    with inside(tiny_served, attention=("gqa4", "mqa"), head_map="mean", served_name="tiny") as server:
        listed = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
        assert listed == ["tiny@mha", "tiny@mqa"]
        for named, echoed in (({}, "tiny@mha"), ({"model": "tiny"}, "tiny")):
            answer = ask(server, prompt="ab", max_tokens=2, **named)
            assert (answer["model"], answer["usage"]["kv_cache"]["bytes_per_token"]) == (echoed, 1024)
        reply = server.http.post(C, json={"model": "tiny@native", "prompt": "a"})
        assert reply.status_code == 404
        assert "Served: tiny@mha, tiny@mqa." in reply.json()["error"]["message"]


def test_what_is_listed(server: Served) -> None:
    models = server.http.get("/v1/models").json()["data"]
    told = [
        {key: model[key] for key in ("id", "kv_heads", "group", "bytes_per_token", "lossy", "head_map")}
        for model in models
    ]
    assert told == [
        {"id": "tiny", "kv_heads": 2, "group": 2, "bytes_per_token": 512, "lossy": False,
         "head_map": "native"},
        {"id": "tiny@mha", "kv_heads": 4, "group": 1, "bytes_per_token": 1024, "lossy": False,
         "head_map": "repeat"},
        {"id": "tiny@mqa", "kv_heads": 1, "group": 4, "bytes_per_token": 256, "lossy": True,
         "head_map": "mean"},
    ]  # fmt: skip
    assert [model["max_model_len"] for model in models] == [512] * 3
    assert [model["live_bytes"] for model in models] == [0] * 3


def test_live_bytes_of_each_mode(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, steps = Decoder.hidden, [0]

    def slow(*args: Any) -> Any:
        steps[0] += 1
        time.sleep(0.02)
        return hidden(*args)

    monkeypatch.setattr(Decoder, "hidden", slow)
    asked = body(ids_of(5, 40), 400, stream=True, model="tiny@mha")
    with server.http.stream("POST", C, json=asked) as reply:
        lines = reply.iter_lines()  # named: one that is collected closes the connection, and the answer ends
        next(lines)
        live = {m["id"]: m["live_bytes"] for m in server.http.get("/v1/models").json()["data"]}
        assert live["tiny"] == live["tiny@mqa"] == 0
        assert live["tiny@mha"] >= 3 * 4 * BLOCK_BYTES
        assert live["tiny@mha"] % (4 * BLOCK_BYTES) == 0
    assert steps[0] > 0, "steps were slow enough to be looked at"
    server.wait_idle(10)


def test_models_are_told_while_a_step_runs(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine's thread is busy with."""
    go, hidden = threading.Event(), Decoder.hidden
    begun = threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return hidden(*args)

    monkeypatch.setattr(Decoder, "hidden", slow)
    asking = threading.Thread(target=ask, args=(server,), kwargs=body(ids_of(6, 20), 2))
    asking.start()
    try:
        assert begun.wait(10)
        with httpx.Client(base_url=server.url, trust_env=False, timeout=5) as http:
            assert len(http.get("/v1/models").json()["data"]) == 3
            assert http.get("/v1/models/tiny@mqa").json()["kv_heads"] == 1
    finally:
        go.set()
        asking.join()


def test_each_mode_counts_its_own_cache(server: Served) -> None:
    """100 tokens of prompt and 29 of output: 128 are written, 8 logical blocks of Hkv physical ones."""
    for number, mode in enumerate(MODES):
        heads = KV_HEADS[mode]
        usage = ask(server, **body(ids_of(20 + number, 100), 29, model=f"tiny@{mode}"))["usage"]["kv_cache"]
        held = 8 * heads * BLOCK_BYTES
        assert usage == {
            "bytes_per_token": held // 128, "blocks": 8 * heads, "bytes_peak": held, "bytes_exclusive": held,
            "tail_waste_bytes": 0, "cached_tokens": 0, "mha_equivalent_bytes": 8 * 4 * BLOCK_BYTES,
            "saved_ratio": 1 - heads / 4,
        }  # fmt: skip
    kv = server.kv(check=True)
    assert [variant["name"] for variant in kv["variants"]] == list(MODES)


def test_modes_share_no_prefix(server: Served) -> None:
    """The same prompt in three modes: each computes it once, and finds its own the second time."""
    prompt = ids_of(40, 70)
    texts: dict[str, set[str]] = {mode: set() for mode in MODES}
    for cached in (0, 64):
        for mode in MODES:
            answer = ask(server, **body(prompt, 12, model=f"tiny@{mode}"))
            assert answer["usage"]["kv_cache"]["cached_tokens"] == cached, mode
            texts[mode].add(answer["choices"][0]["text"])
    assert texts["native"] == texts["mha"] != texts["mqa"]
    assert [len(found) for found in texts.values()] == [1, 1, 1]


async def test_a_small_pool_serves_all_modes(tiny_served: Path, server: Served) -> None:
    """A dozen at once in a pool for two or three: the answers are those of a large pool."""
    bodies = [body(ids_of(60 + i, 30), 40, model=f"tiny@{MODES[i % 3]}") for i in range(12)]
    with inside(
        tiny_served, attention=MODES, head_map="mean", served_name="tiny", kv_memory=48 * BLOCK_BYTES
    ) as small:
        crowded = await ask_all(small, bodies)
        small.wait_idle(10)
        assert small.kv(check=True)["states"]["live"]["blocks"] == 0
    for answer, alone in zip(crowded, [ask(server, **one) for one in bodies], strict=True):
        assert answer["choices"] == alone["choices"]


def test_a_mode_that_the_pool_cannot_hold(tiny_served: Path) -> None:
    """3 blocks are a logical block of the first mode, 3 of mqa, and none of mha: whose requests are a 400."""
    with inside(
        tiny_served, attention=MODES, head_map="mean", served_name="tiny", kv_memory=3 * BLOCK_BYTES
    ) as server:
        lengths = [model["max_model_len"] for model in server.http.get("/v1/models").json()["data"]]
        assert lengths == [16, 0, 48]
        reply = server.http.post(C, json=body([5, 6], 2, model="tiny@mha"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert ask(server, **body([5] * 40, 8, model="tiny@mqa"))["usage"]["kv_cache"]["blocks"] == 3


@pytest.mark.model
async def test_the_default_model_in_three_modes(smol: Path) -> None:
    """SmolLM2-135M in bf16: a request that ends with 128 KV tokens holds 8 logical blocks of 16 tokens."""
    with inside(
        smol, attention=MODES, head_map="mean", dtype="bfloat16", served_name="smollm2-135m",
        kv_memory=256 << 20, max_model_len=1024,
    ) as server:  # fmt: skip
        bodies = [body(ids_of(i, 100), 29, model=f"smollm2-135m@{mode}") for i, mode in enumerate(MODES)]
        answers = await ask_all(server, bodies)
        for answer, heads in zip(answers, (3, 9, 1), strict=True):
            usage = answer["usage"]["kv_cache"]
            assert (usage["bytes_per_token"], usage["blocks"]) == (heads * 7680, 8 * heads)
            assert usage["bytes_peak"] == 8 * heads * 122880
            assert usage["mha_equivalent_bytes"] == 72 * 122880
            assert usage["saved_ratio"] == pytest.approx(1 - heads / 9)
        assert server.kv(check=True)["pool"]["block_bytes"] == 122880
