"""One model in this process, asked from a terminal: no HTTP between."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from server.app import Loaded, kv_usage
from server.config import SamplingChoice
from server.engine.request import FinishReason
from server.engine.service import EngineService
from server.engine.units import format_bytes, plural
from server.text.asks import ChatAsk, CompletionAsk, SamplingAsk
from server.text.generate import ChoiceDelta, Done, generate
from server.text.prepare import Prepared, Preparer

# A model may write escape sequences; a terminal should not act on them.
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


@dataclass
class Reply:
    """What has come of an answer so far; `done` and `finish` are set at its end."""

    text: str = ""
    seconds: float = 0.0
    finish: FinishReason | None = None
    done: Done | None = None


class Session:
    """Runs one engine and one event loop, which turns only while an answer is awaited."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._runner = asyncio.Runner()
        self._preparer = Preparer(loaded.served, loaded.tokenizer, loaded.chat, loaded.grammars)
        self._service = EngineService(loaded.engine)

    def __enter__(self) -> Session:
        self._runner.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._stop())
        self._runner.close()

    @property
    def name(self) -> str:
        """What the model is called."""
        return self._loaded.name

    def complete(self, prompt: str, choice: SamplingChoice, reply: Reply) -> None:
        """Print the continuation of `prompt` as it comes, and note it in `reply`. Raises RequestError;
        KeyboardInterrupt ends the answer, and `reply` has what came before."""
        ask = CompletionAsk(_new_id(), prompt, max_tokens=choice.max_tokens, sampling=_sampling(choice))
        self._runner.run(self._say(self._preparer.completion(ask), reply))

    def answer(self, messages: Sequence[Mapping[str, str]], choice: SamplingChoice, reply: Reply) -> None:
        """The same for the next turn of a conversation."""
        ask = ChatAsk(_new_id(), messages, max_tokens=choice.max_tokens, sampling=_sampling(choice))
        self._runner.run(self._say(self._preparer.chat(ask), reply))

    def summary(self, reply: Reply) -> str:
        """One line: tokens, speed, and what the answer's cache took beside plain MHA."""
        if reply.done is None:
            return ""
        tokens = reply.done.completion_tokens
        usage = kv_usage(self._loaded, self._loaded.facts.variants[0].name, reply.done.kv)
        held, as_mha = format_bytes(usage["bytes_peak"]), format_bytes(usage["mha_equivalent_bytes"])
        return (
            f"{plural(tokens, 'token')} in {reply.seconds:.1f} s, "
            f"{tokens / max(reply.seconds, 1e-9):.0f} a second; KV cache {held}, as MHA {as_mha}"
        )

    async def _start(self) -> None:
        self._service.start()

    async def _stop(self) -> None:
        await self._service.stop()
        await self._preparer.close()

    async def _say(self, preparing: Awaitable[Prepared], reply: Reply) -> None:
        prepared = await preparing
        begin = time.perf_counter()
        generation = await generate(self._service, prepared, self._loaded.tokenizer)
        try:
            async for item in generation:
                reply.seconds = time.perf_counter() - begin
                if isinstance(item, ChoiceDelta):
                    reply.finish = item.finish_reason or reply.finish
                    reply.text += item.text
                    _show(item.text)
                else:
                    reply.done = item
        finally:
            await generation.aclose()


def _show(text: str) -> None:
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _new_id() -> str:
    return f"terminal-{uuid.uuid4().hex}"


def _sampling(choice: SamplingChoice) -> SamplingAsk:
    return SamplingAsk(
        temperature=choice.temperature, top_p=choice.top_p, top_k=choice.top_k, seed=choice.seed
    )
