"""What can be asked without running the model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cache.errors import CacheError
from server.engine.errors import EngineDead
from server.engine.stats import Status
from tests.api.test_answers import CC, C, asked
from tests.api.test_bodies import check_error
from tests.support.api import MAX_LEN, serving
from tests.support.fake_service import BLOCK_BYTES, TOTAL, FakeService


async def test_health(words: Path) -> None:
    service = FakeService()
    async with serving(words, service) as api:
        assert (await api.http.get("/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
        for status in Status:
            service.status = status
            reply = await api.http.get("/health")
            if status is Status.OK:
                assert reply.status_code == 200
            else:
                error = check_error(reply, 503)
                assert error["code"] == str(status)
                assert "because the test says so" in error["message"]


async def test_models_and_version(words: Path) -> None:
    service = FakeService(pace=0.02)
    async with serving(words, service) as api:
        card = {
            "id": "tiny", "object": "model", "created": 1, "owned_by": "headroom", "max_model_len": MAX_LEN,
            "kv_heads": 2, "group": 2, "bytes_per_token": 128, "lossy": False,
            "head_map": "native", "live_bytes": 0,
        }  # fmt: skip
        assert (await api.http.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await api.http.get("/v1/models/tiny")).json() == card
        assert (await api.http.get("/v1/models/tiny@native")).json() == card | {"id": "tiny@native"}
        assert (await api.http.get("/version")).json() == {"version": "1.2.3"}
        answering = asyncio.ensure_future(api.http.post(C, json=asked(C, max_tokens=20)))
        await asyncio.sleep(0.1)
        assert (await api.http.get("/v1/models/tiny")).json()["live_bytes"] == 2 * BLOCK_BYTES
        await answering


async def test_tokens_there_and_back(words: Path) -> None:
    async with serving(words) as api:
        for text in ("", "abc", "Ünïcödé \N{LLAMA} \n", "<|im_start|>user"):
            reply = (await api.http.post("/tokenize", json={"prompt": text})).json()
            assert reply["count"] == len(reply["tokens"])
            assert reply["max_model_len"] == MAX_LEN
            back = (await api.http.post("/detokenize", json={"tokens": reply["tokens"]})).json()
            assert back == {"prompt": text}
        assert (await api.http.post("/tokenize", json={"prompt": "ab"})).json()["tokens"] == [67, 68]
        messages = [{"role": "user", "content": "ab"}]
        reply = (await api.http.post("/tokenize", json={"messages": messages, "model": "tiny"})).json()
        await api.http.post(CC, json=asked(CC, messages=messages))
        assert tuple(reply["tokens"]) == api.service.requests[0].prompts[0]


async def test_tokens_refused(words: Path) -> None:
    async with serving(words) as api:
        bodies: list[Any] = [
            {},
            {"prompt": 5},
            {"prompt": "a", "messages": []},
            {"messages": "a"},
            {"prompt": ["a"]},
        ]
        chat = [{"role": "user", "content": "a"}]
        bodies += [{"messages": []}, {"prompt": "a", "return_token_strs": True}]
        bodies += [{"messages": chat, "add_special_tokens": True}]
        for body in bodies:
            check_error(await api.http.post("/tokenize", json=body), 400)
        for tokens in ([384], [-1], [2**70], ["a"], [True], "ab", None):
            check_error(await api.http.post("/detokenize", json={"tokens": tokens}), 400)
        many = [67] * 2**17
        assert (await api.http.post("/detokenize", json={"tokens": many})).status_code == 200
        error = check_error(await api.http.post("/detokenize", json={"tokens": [*many, 67]}), 400)
        assert error["message"] == "tokens: at most 131072 ids at once, got 131073."
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [67]})):
            assert (
                check_error(await api.http.post(path, json={**body, "model": "x"}), 404)["code"]
                == "model_not_found"
            )


async def test_metrics(words: Path) -> None:
    async with serving(words) as api:
        await api.http.post(C, json=asked(C))
        await api.http.post(C, json={})
        text = (await api.http.get("/metrics")).text
        found = {
            s.name + json.dumps(s.labels): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
        }
        assert found["headroom:num_requests_running{}"] == 0
        assert found["headroom:prompt_tokens_total{}"] == 7
        assert found["headroom:generation_tokens_total{}"] == 5
        assert found['headroom:request_success_total{"finished_reason": "stop"}'] == 3
        assert found["headroom:time_to_first_token_seconds_count{}"] == 1
        assert found["headroom:inter_token_latency_seconds_count{}"] == 4
        assert found['headroom:kv_blocks{"state": "free"}'] == TOTAL
        assert found['headroom:kv_live_bytes{"variant": "native"}'] == 0
        assert found['headroom:requests_total{"outcome": "ok"}'] == 1
        assert found['headroom:requests_total{"outcome": "invalid"}'] == 1


async def test_two_apps_share_no_numbers(words: Path) -> None:
    async with serving(words) as one, serving(words) as two:
        await one.http.post(C, json=asked(C))
        assert 'outcome="ok"} 1.0' in (await one.http.get("/metrics")).text
        assert 'outcome="ok"} 0.0' in (await two.http.get("/metrics")).text


async def test_metrics_of_a_dead_engine(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead(check: bool = False) -> None:
        raise EngineDead("it fell over")

    async with serving(words) as api:
        monkeypatch.setattr(api.service, "report", dead)
        reply = await api.http.get("/metrics")
        assert reply.status_code == 200
        assert "headroom:generation_tokens_total" in reply.text
        assert "kv_blocks" not in reply.text
        check_error(await api.http.get("/v1/kv"), 503)


async def test_kv(words: Path) -> None:
    async with serving(words) as api:
        body = (await api.http.get("/v1/kv")).json()
        assert body["states"]["free"] == {"blocks": TOTAL, "bytes": TOTAL * BLOCK_BYTES}
        assert body["pool"]["backend"] == "fake"
        assert body["pool"]["backend_reason"] == "there is no model"
        page = (await api.http.get("/v1/kv/blocks", params={"offset": TOTAL - 3})).json()
        assert page["offset"] == TOTAL - 3
        assert page["state"] == ["free"] * 3
        assert len((await api.http.get("/v1/kv/blocks?limit=5")).json()["refcount"]) == 5
        for query in ("offset=-1", "limit=0", "limit=10001", "limit=x", "offset=1.5", f"offset={10**30}"):
            error = check_error(await api.http.get(f"/v1/kv/blocks?{query}"), 400)
            assert error["param"] == query.partition("=")[0]
            assert query.partition("=")[2] in error["message"]
        error = check_error(await api.http.get("/v1/kv?check=perhaps" + "s" * 1000), 400)
        assert "got 'perhapsss" in error["message"]


async def test_checks_are_shared_and_limited(words: Path) -> None:
    service = FakeService(check_seconds=0.2)
    async with serving(words, service, check_seconds=0.5) as api:
        replies = await asyncio.gather(*(api.http.get("/v1/kv?check=true") for _ in range(5)))
        assert [reply.status_code for reply in replies] == [200] * 5
        assert service.checks == 1
        reply = await api.http.get("/v1/kv?check=true")
        assert check_error(reply, 429)["code"] == "too_many_checks"
        assert int(reply.headers["retry-after"]) >= 1
        assert (await api.http.get("/v1/kv")).status_code == 200
        await asyncio.sleep(0.5)
        assert (await api.http.get("/v1/kv?check=true")).status_code == 200
        assert service.checks == 2


async def test_a_check_that_fails(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(check: bool = False) -> None:
        raise CacheError("block 5 is free and held")

    async with serving(words) as api:
        monkeypatch.setattr(api.service, "report", report)
        error = check_error(await api.http.get("/v1/kv?check=true"), 500)
        assert error["code"] == "cache_check_failed"
        assert "block 5 is free and held" in error["message"]


async def test_the_document_is_true(words: Path) -> None:
    """Every route is described with its body, and no answer is promised that is never sent."""
    async with serving(words) as api:
        document = (await api.http.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        paths = {
            ("get", "/health"), ("get", "/version"), ("get", "/metrics"), ("get", "/v1/models"),
            ("get", "/v1/models/{model}"), ("get", "/v1/kv"), ("get", "/v1/kv/blocks"), ("post", "/tokenize"),
            ("post", "/detokenize"), ("post", "/v1/completions"), ("post", "/v1/chat/completions"),
        }  # fmt: skip
        assert {(method, path) for path, methods in document["paths"].items() for method in methods} == paths
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                assert operation["responses"].keys() == {"200", "default"}, path
                assert operation["summary"]
                if method == "post":
                    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                    assert reference.rpartition("/")[2] in schemas
        assert {"temperature", "seed", "stop", "prompt", "stream_options"} <= schemas["CompletionBody"][
            "properties"
        ].keys()
        assert schemas["CompletionBody"]["required"] == ["prompt"]
        assert schemas["ChatBody"]["required"] == ["messages"]
        assert not any("Validation" in name for name in schemas)
        text = json.dumps(document)
        for reference in {
            part.partition('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]
        }:
            assert reference in schemas
