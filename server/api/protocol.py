"""HTTP/1.1 itself, before ASGI: bounds on the head of a request, our error shape for what is no HTTP, and who
has left, whatever he sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.api.errors import ApiError
from server.api.identity import own_id
from server.api.one_version import OneVersion

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD = 64 * 2**10  # bytes of request line and headers together
MAX_WAITING = 64 * 2**10  # bytes of next requests that wait for an answer to end; the rest must be sent again
LINGER_SECONDS = 5.0  # after a refusal, in which the client may read it before the connection goes
HEAD_SECONDS = 30.0  # from a connection (or the first byte of a next request) to the end of its head


class BoundedHttp(OneVersion):
    """uvicorn's protocol, which of itself would wait for a head, and keep what came of it, without end.

    And which stops reading while a next request waits, so that it cannot see the client leave, and then tells
    only the last request of the connection, which is not the one that runs. Here reading goes on. Of too much
    that waits nothing is kept, and the connection ends with the answer that runs: a client has to send again
    what got no answer (RFC 9112, 9.3.2).
    """

    _in_head = True
    _head_ended = False  # during the data at hand
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None  # the request that runs; others wait in `pipeline`
    _waiting_bytes = 0
    _refused = False
    _quiet_since = 0.0  # the loop's time when it connected, or its last answer ended
    lost: Callable[[], None] = staticmethod(lambda: None)  # who counts connections sets it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects: the clock of its first head starts."""
        super().connection_made(transport)
        self._quiet_since = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    @property
    def idle_since(self) -> float | None:
        """Since when (the loop's time) no whole head has come and no answer runs; None if one does."""
        if self._answering is not None and not self._answering.response_complete:
            return None
        return self._quiet_since or None

    @property
    def was_served(self) -> bool:
        """Whether it has had an answer already, so that it is only kept for a next request."""
        return self._answering is not None

    def has_unread(self) -> bool:
        """Whether something has come that was only not read yet: this process may be late itself."""
        with contextlib.suppress(OSError, ValueError):
            look = select.poll()
            look.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
            return bool(look.poll(0))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it the clock; the request that runs is told."""
        self._stop_timer()
        if self._answering is not None and not self._answering.response_complete:
            _disconnect(self._answering)
        self.pipeline.clear()
        super().connection_lost(exc)
        self.lost()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head are counted and timed, those of a body passed on."""
        if self._refused:
            return
        if self._must_wait(len(data)) > MAX_WAITING and self._answering is not None:
            self._answering.keep_alive = False
            self.pipeline.clear()
            return
        if self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)
        still_in_head = self._in_head
        self._head_ended = False
        super().data_received(data)
        if self.pipeline:
            self.flow.resume_reading()
        if still_in_head and not self._head_ended:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                message = f"The request line and headers are larger than {MAX_HEAD} bytes."
                self._refuse(ApiError(431, message, code="head_too_large"))

    def _must_wait(self, count: int) -> int:
        """How many bytes wait for an answer to end, with `count` more; 0 if none runs."""
        answering = self._answering
        if answering is None or answering.response_complete or answering.more_body:
            return 0
        self._waiting_bytes += count
        return self._waiting_bytes

    def on_headers_complete(self) -> None:
        """The parser has a whole head: counting and clock stop."""
        self._in_head, self._head_ended, self._head_bytes = False, True, 0
        self._stop_timer()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        if not self.pipeline:
            self._waiting_bytes = 0
        super()._start_asgi_task(cycle, app)

    def request_ended(self) -> None:
        """The parser has a whole request; what comes next is a head."""
        self._stop_timer()
        self._in_head = True

    def on_response_complete(self) -> None:
        """An answer has gone out. What it did not read of a body is thrown away, but not for ever."""
        answered = self._answering
        self._quiet_since = self.loop.time()
        super().on_response_complete()
        if answered is not None and answered.more_body and not self.transport.is_closing():
            self._stop_timer()
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets our error shape; `msg`, the parser's own words, is dropped."""
        self._refuse(ApiError(400, "This is not a valid HTTP request.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without ASGI, and close, but not at once: a connection that is closed with bytes unread
        is reset, and the answer may be lost on its way. What else the client sends is thrown away.

        An answer that runs is not spoilt by what comes behind its request: it is the last of the connection.
        """
        if self.transport.is_closing() or self._refused:
            return
        self._refused = True
        self._stop_timer()
        self.pipeline.clear()
        running = self._answering
        if running is not None and not running.response_complete:
            if not running.more_body:
                running.keep_alive = False
                return
            _disconnect(running)  # what is wrong is its own body
            if running.response_started:
                self.transport.close()
                return
        self.transport.write(raw_answer(error))
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _give_up(self) -> None:
        self._head_timer = None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:  # else stray bytes came during an answer
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def raw_answer(error: ApiError) -> bytes:
    """The whole answer of an error that no application gives; the connection ends with it."""
    body = json.dumps(error.body(), separators=(",", ":")).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": own_id(),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Its application is told that the client has left, and what it still sends is dropped."""
    cycle.disconnected = True
    cycle.message_event.set()
