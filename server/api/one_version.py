"""Clients of another HTTP: an offer to upgrade is declined, and HTTP/1.0 gets no chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_FRAMING = (b"content-length", b"transfer-encoding")


class OneVersion(HttpToolsProtocol):
    """uvicorn's protocol, which of itself drops the body of a request that offers an upgrade.

    Java's own client offers one (`Upgrade: h2c`) with every request. A server that does not take the offer
    answers as if it were not there (RFC 9110, 7.8); but httptools' parser stops at the end of such a head. So
    another parser is told how the body is framed, and reads on where the first has stopped.
    """

    _retold = False  # the parser reads a head again, of which everything is known

    def data_received(self, data: bytes) -> None:
        """Bytes of one or several requests, or of parts of them."""
        self._unset_keepalive_if_required()
        try:
            while (unread := self._fed(data)) is not None:
                self._decline()
                data = unread
        except httptools.HttpParserError:
            self.send_400_response("")

    def _fed(self, data: bytes) -> bytes | None:
        """What follows a head that offers an upgrade; None if all was read."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return data[offer.args[0] :]
        return None

    def _decline(self) -> None:
        """Makes the parser one that stands at the start of this request's body."""
        framing = [b"%s: %s" % header for header in self.headers if header[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._retold = True
        self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
        self._retold = False

    def on_message_begin(self) -> None:
        """A head begins."""
        if not self._retold:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if not self._retold:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if not self._retold:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole, and its request is begun."""
        if not self._retold:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is whole; not so where the parser has only stopped for an upgrade."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.request_ended()

    def request_ended(self) -> None:
        """For those that build on this one: what comes next is a head."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _to_the_end(cycle, app) if old else app)


def _to_the_end(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """`app` for a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): a body of unknown length goes to
    the end of the connection."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        sized = True

        async def unchunked(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if sized else False
            elif not sized:  # each piece is all that uvicorn expects
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unchunked)

    return answer
