"""A server that streams made-up tokens at a known pace, and misbehaves on request.

What it does is chosen by the `model` of the request, so that a client's timing and its view of a
broken stream can be tested without an engine.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVENTS = 20  # texts in a whole stream
PACE = 0.05  # seconds before each
TOKENS_PER_EVENT = 2  # so that counting chunks for tokens shows
# What `each` does in turn, over and over, ten times as fast. The last is a whole stream.
EACH = ("error", "cut", "endless", "no-finish", "bad-finish", "no-usage", "busy", "steady")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode, pace = body["model"], PACE
        if mode == "each":
            mode, pace = EACH[next(self.server.turns) % len(EACH)], PACE / 10  # type: ignore[attr-defined]
        if mode in ("busy", "unknown"):
            self._refuse(429 if mode == "busy" else 404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = self.path.endswith("/chat/completions")
        if chat:
            self._event(_choice(chat, "", role="assistant"))
        for number in range(EVENTS):
            time.sleep(pace)
            if number == EVENTS // 2:
                if mode == "cut":
                    self.close_connection = True
                    return
                if mode == "error":
                    self._event({"error": {"message": "the engine gave up", "type": "server_error"}})
                    break
                if mode == "endless":
                    self._chunk(b"")
                    return
            self._event(_choice(chat, f"t{number} "))
            self._event(_choice(chat, ""))
        if mode != "no-finish":
            self._event(_choice(chat, "", finish="error" if mode == "bad-finish" else "stop"))
        if mode != "no-usage":
            self._event({"choices": [], "usage": {"completion_tokens": EVENTS * TOKENS_PER_EVENT}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _refuse(self, status: int) -> None:
        data = b'{"error": {"message": "not now, not here"}}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Silent."""


def _choice(chat: bool, text: str, role: str | None = None, finish: str | None = None) -> dict[str, Any]:
    ending = {"index": 0, "finish_reason": finish}
    if not chat:
        return {"choices": [ending | {"text": text}]}
    delta = {"content": text} | ({"role": role} if role else {})
    return {"choices": [ending | {"delta": delta}]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    turns: itertools.count[int]  # requests of the model `each`


@contextmanager
def fake_sse() -> Iterator[str]:
    """Run the server on a free port of this machine; yields its base URL."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.turns = itertools.count()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
