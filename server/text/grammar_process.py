"""The parent's side of the grammar worker: start it when first needed, ask it, end it when it hangs.

Only the event loop's thread touches it. A worker that was ended is replaced at the next request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server.text.grammar_build import GrammarError, GrammarTimeout
from server.text.worker import Worker

_LOG = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("grammar_worker.py")
_ROOT = Path(__file__).parents[2]  # where the package `server` lies


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """`cpu_seconds` of processor time and `memory_bytes` beside the vocabulary for one grammar, enforced by
    the kernel; `wall_seconds` is the parent's patience, for a machine so busy that a second takes long."""

    cpu_seconds: float = 1.0
    memory_bytes: int = 256 * 2**20
    wall_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Approved:
    """A grammar that compiles within the limits, in the library's words, and about its size in memory."""

    lark: str
    nbytes: int


class GrammarProcess:
    """One worker for one vocabulary; grammars queue up behind each other."""

    def __init__(self, pieces: Callable[[], Sequence[bytes | None]], limits: GrammarLimits) -> None:
        """`pieces()` gives the bytes of each token (None: of none), off the loop; asked at every start."""
        self._pieces = pieces
        self._limits = limits
        self._worker = Worker(_WORKER)
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self._worker.pid

    async def compile(self, kind: str, source: str) -> Approved:
        """Raises GrammarError with the library's or the limit's words. Not to be cancelled: the answer would
        be read as the next one's, so a cancelled call ends the worker."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._limits.wall_seconds):
                    answer = await self._ask({"kind": kind, "source": source})
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                await self._worker.end()
                _LOG.warning("the grammar worker was ended: it gave no answer")
                raise GrammarTimeout("compiling it took too long and was given up; try again") from None
            except BaseException:
                self._worker.drop()
                raise
        if "error" in answer:
            raise GrammarError(answer["error"])
        return Approved(answer["ok"], answer["bytes"])

    async def close(self) -> None:
        """Ends the worker and waits for its end."""
        async with self._lock:
            await self._worker.end()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """One message there and back; a worker that somebody has killed is replaced once."""
        body = json.dumps(message).encode()
        await self._start()
        try:
            return await self._worker.exchange(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._worker.end()
        await self._start()
        return await self._worker.exchange(body)

    async def _start(self) -> None:
        """Unless it runs already."""
        if self._worker.runs():
            return
        first = await asyncio.to_thread(self._first_message)
        await self._worker.start()
        await self._worker.exchange(json.dumps(first).encode())

    def _first_message(self) -> dict[str, Any]:
        spec = find_spec("llguidance")
        assert spec is not None and spec.origin is not None  # it is imported above
        return {
            "paths": [str(_ROOT), str(Path(spec.origin).parent.parent)],
            "pieces": [None if piece is None else piece.decode("latin-1") for piece in self._pieces()],
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
        }
