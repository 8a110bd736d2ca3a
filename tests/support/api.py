"""The HTTP application over a fake service, on a real socket of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn

from cache.accounts import Peak
from cache.layout import KVLayout, LayerGroup
from cache.report import usage
from server.api.application import create_api
from server.api.connections import BoundedServer
from server.api.protocol import BoundedHttp
from server.api.state import ApiSettings, ApiState, ModelCard
from server.commands.listener import bind
from server.engine.request import KVPeak
from server.metrics import Metrics
from server.text.chat import ChatTemplate
from server.text.defaults import SamplingDefaults
from server.text.prepare import Preparer
from server.text.served import ServedModel, ServedVariant
from server.text.tokenizer import Tokenizer
from tests.support import fake_service
from tests.support.fake_service import FakeService

MAX_LEN = 4096


def kv_usage(variant: str, peak: KVPeak) -> dict[str, Any]:
    """As the fake service counts: one layer, fp32, head_dim 8 gives its block_bytes."""
    import torch

    layout = KVLayout((LayerGroup((0,), fake_service.KV_HEADS, 8),), fake_service.BLOCK_SIZE, torch.float32)
    assert layout.block_bytes == fake_service.BLOCK_BYTES
    held = Peak(peak.blocks, peak.exclusive, peak.tokens, peak.cached_tokens)
    return usage(held, layout, fake_service.KV_HEADS, fake_service.Q_HEADS).to_dict()


def make_state(folder: Path, service: FakeService, **settings: Any) -> ApiState:
    """A model called `tiny` with the tokenizer of `folder`."""
    tokenizer = Tokenizer.from_folder(folder)
    served = ServedModel(
        names={"tiny": "native", "tiny@native": "native"},
        variants={"native": ServedVariant("native", MAX_LEN)},
        vocab_rows=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        fingerprint="0123456789abcdef",
        kv_dtype="float32",
        defaults=SamplingDefaults(),
    )
    return ApiState(
        version="1.2.3",
        served=served,
        cards=(ModelCard("tiny", "native", 1, MAX_LEN, 2, 2, 128, False, "native"),),
        service=cast(Any, service),
        preparer=Preparer(served, tokenizer, ChatTemplate.from_folder(folder, tokenizer.special)),
        tokenizer=tokenizer,
        backend="fake",
        backend_reason="there is no model",
        kv_usage=kv_usage,
        metrics=Metrics(),
        settings=ApiSettings(**settings),
    )


@dataclass
class Api:
    """A served application and a client of it."""

    http: httpx.AsyncClient
    service: FakeService
    state: ApiState
    port: int

    async def idle(self, seconds: float) -> None:
        """Wait until nothing runs, at most `seconds`."""
        for _ in range(round(seconds / 0.01)):
            if self.service.running == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.service.running} choices still run after {seconds} s")


@contextlib.asynccontextmanager
async def serving(
    folder: Path, service: FakeService | None = None, *, connections: int | None = None, **settings: Any
) -> AsyncIterator[Api]:
    """The API on a free port, stopped at the end; `connections` may be open at once."""
    service = service or FakeService()
    state = make_state(folder, service, **settings)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_api(state),
        http=BoundedHttp,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = BoundedServer(config, connections)
    running = asyncio.get_running_loop().create_task(server._serve([listener]))  # leaves signals alone
    while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as http:
            yield Api(http, service, state, port)
    finally:
        server.should_exit = True
        await running
        await state.preparer.close()
