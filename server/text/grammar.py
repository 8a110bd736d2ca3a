"""Structured output: what a request asks for, compiled once and kept, or a RequestError.

A grammar is first compiled in a process that can be killed (`server.text.grammar_worker`), and what that
lets in once more here, on a thread: the library's compiled form cannot be sent. The engine takes copies.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from server.engine.request import Constraint
from server.text.errors import RequestError
from server.text.grammar_ask import INVALID, GrammarAsk
from server.text.grammar_build import GrammarError, GrammarTimeout
from server.text.grammar_matcher import Compiled, GrammarSource, write_constraint
from server.text.grammar_process import GrammarLimits, GrammarProcess

_KEPT, _KEPT_BYTES = 256, 256 * 2**20  # grammars, and the memory of all of them together
_WAITING = 32  # grammars that wait for the worker; each may take it a second


@dataclass(frozen=True, slots=True)
class Held:
    """A request's grammar. `compiled` is held so that it stays known while the request is answered."""

    constraint: Constraint
    compiled: Compiled


@dataclass(slots=True)
class _Compilation:
    """One that is to be made. Until the worker has `begun` it, it is dropped when nobody waits any more."""

    task: asyncio.Task[Compiled | str]
    waiting: int = 0
    begun: bool = False


class Grammars:
    """Compiles what requests ask for; the same text only once. Only the event loop's thread touches it."""

    def __init__(self, source: GrammarSource, limits: GrammarLimits | None = None) -> None:
        self._source = source
        self._process = GrammarProcess(source.pieces, limits or GrammarLimits())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headroom-grammar")
        self._kept: OrderedDict[bytes, Compiled | str] = OrderedDict()  # or why it is refused
        self._running: dict[bytes, _Compilation] = {}
        self._turn = asyncio.Lock()  # one after the other, in the order of their coming
        self.compilations = 0

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None while none runs."""
        return self._process.pid

    async def hold(self, ask: GrammarAsk, ends: Iterable[int]) -> Held:
        """The grammar of `ask` for an answer that one of `ends` ends. Raises RequestError (400; 503 where too
        many wait to be compiled)."""
        try:
            found = await self._find(ask)
        except GrammarTimeout as error:
            found = str(error)
        if isinstance(found, str):
            raise RequestError(f"{ask.param}: {found}.", ask.param, INVALID)
        return Held(write_constraint(ends, found.lark), found)

    async def close(self) -> None:
        """Ends the worker and the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._process.close()

    async def _find(self, ask: GrammarAsk) -> Compiled | str:
        key = hashlib.sha256(f"{ask.kind}\n{ask.source}".encode()).digest()
        kept = self._kept.get(key)
        if kept is not None and not (isinstance(kept, Compiled) and kept.worn):
            self._kept.move_to_end(key)
            return kept
        return await self._result(key, ask)

    async def _result(self, key: bytes, ask: GrammarAsk) -> Compiled | str:
        """Of a task of its own: a client that leaves must not end what others wait for."""
        one = self._running.get(key)
        if one is None:
            if len(self._running) >= _WAITING:
                message = f"{ask.param}: {_WAITING} grammars wait to be compiled already; try again soon."
                raise RequestError(message, ask.param, "too_many_grammars", status=503)
            one = self._running[key] = _Compilation(asyncio.create_task(self._compile(key, ask)))
        one.waiting += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiting -= 1
            if not one.waiting and not one.begun:
                self._running.pop(key, None)
                one.task.cancel()

    async def _compile(self, key: bytes, ask: GrammarAsk) -> Compiled | str:
        async with self._turn:
            one = self._running[key]
            one.begun = True
            try:
                found = await self._made(ask)
                self._keep(key, found)
                return found
            finally:
                del self._running[key]

    async def _made(self, ask: GrammarAsk) -> Compiled | str:
        self.compilations += 1
        try:
            approved = await self._process.compile(ask.kind, ask.source)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._pool, self._source.compile, approved.lark, approved.nbytes
            )
        except GrammarTimeout:
            raise  # not kept
        except GrammarError as error:
            return str(error).removesuffix(".")

    def _keep(self, key: bytes, found: Compiled | str) -> None:
        """The least recently used go first; those that answers still hold stay known to the source."""
        self._kept[key] = found
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._size() > _KEPT_BYTES):
            self._kept.popitem(last=False)

    def _size(self) -> int:
        return sum(found.nbytes for found in self._kept.values() if isinstance(found, Compiled))
