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
_HELD_BYTES = 2**30  # of these and all that answers still need, of which one may take 256 MiB
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


class _Busy(Exception):
    """Another time it may be compiled; the message is for the client."""


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
        many wait to be compiled or are in use)."""
        try:
            found = await self._find(ask)
        except GrammarTimeout as error:
            found = str(error)
        except _Busy as error:
            told = f"{ask.param}: {error}; try again soon."
            raise RequestError(told, ask.param, "too_many_grammars", status=503) from None
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
                raise _Busy(f"{_WAITING} grammars wait to be compiled already")
            one = self._running[key] = _Compilation(asyncio.create_task(self._compile(key, ask)))
            one.task.add_done_callback(_seen)
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
            self._evict()  # what is kept has grown since it was
            if self._source.nbytes + approved.nbytes > _HELD_BYTES:
                raise _Busy(f"the grammars in use take {_HELD_BYTES // 2**20} MiB already")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._pool, self._source.compile, approved.lark, approved.nbytes
            )
        except GrammarTimeout:
            raise  # not kept
        except GrammarError as error:
            return str(error).removesuffix(".")

    def _keep(self, key: bytes, found: Compiled | str) -> None:
        self._kept[key] = found
        self._kept.move_to_end(key)
        self._evict()

    def _evict(self) -> None:
        """The least recently used go first; those that answers still hold stay known to the source."""
        while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._size() > _KEPT_BYTES):
            self._kept.popitem(last=False)

    def _size(self) -> int:
        return sum(found.nbytes for found in self._kept.values() if isinstance(found, Compiled))


def _seen(task: asyncio.Task[Compiled | str]) -> None:
    """An error that nobody waits for any more is nothing for the log."""
    if not task.cancelled():
        task.exception()
