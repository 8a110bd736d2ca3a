"""Where the cache went: GET /v1/kv and GET /v1/kv/blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from server.api.describe import answers
from server.api.errors import ApiError, json_response
from server.api.state import ApiState

MAX_PAGE = 10_000


def routes(state: ApiState) -> APIRouter:
    """The routes that report the cache, as it is between two steps of the engine."""
    router = APIRouter()
    gate = CheckGate(lambda: state.service.report(check=True), state.settings.check_seconds)

    @router.get("/v1/kv", summary="Where the cache went", responses=answers("The report."))
    async def kv(
        check: Annotated[
            bool, Query(description="Reconcile every block first; at most once a second.")
        ] = False,
    ) -> Response:
        """Blocks and bytes by state, attention mode and request, as they are between two steps of the engine.

        429 for `check` within a second of the last one; 500 `cache_check_failed` if the books do not balance.
        """
        report = await (gate.report() if check else state.service.report())
        body = report.to_dict()
        body["pool"] |= {"backend": state.backend, "backend_reason": state.backend_reason}
        return json_response(body)

    @router.get("/v1/kv/blocks", summary="A page of the block table", responses=answers("Columns."))
    async def blocks(
        offset: Annotated[int, Query(ge=0, le=2**31, description="First block.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="At most this many blocks.")] = 1000,
    ) -> Response:
        """A list for each column; entry i is physical block `offset + i`, `tokens` its filled token slots."""
        page = await state.service.blocks(offset, limit)
        return json_response(page.to_dict())

    return router


class CheckGate:
    """One reconciliation at a time: who comes while it runs shares it, who comes too soon after gets 429."""

    def __init__(self, check: Callable[[], Awaitable[Any]], seconds: float) -> None:
        self._check = check
        self._seconds = seconds
        self._running: asyncio.Future[Any] | None = None
        self._ended = float("-inf")

    async def report(self) -> Any:
        """The checked report; ApiError 429 within `seconds` of the last one."""
        if self._running is None:
            if time.monotonic() - self._ended < self._seconds:
                retry = {"retry-after": str(max(1, round(self._seconds)))}
                raise ApiError(
                    429,
                    "The cache was checked a moment ago; try again soon.",
                    "check",
                    "too_many_checks",
                    retry,
                )
            self._running = asyncio.ensure_future(self._check())
            self._running.add_done_callback(self._end)
        # One caller that leaves must not take the check away from the others.
        return await asyncio.shield(self._running)

    def _end(self, task: asyncio.Future[Any]) -> None:
        self._running = None
        self._ended = time.monotonic()
        if not task.cancelled():
            task.exception()  # whoever waited has seen it; if all left, nobody needs to
