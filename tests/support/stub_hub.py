"""A Hugging Face hub on 127.0.0.1 that serves a few files: what `snapshot_download` asks for, nothing more.

Endpoints: `GET /api/models/{id}/revision/main`, `GET /api/models/{id}/tree/{sha}`, and `HEAD` and `GET
/{id}/resolve/{sha}/{file}`; refusals carry the hub's `X-Error-Code`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class StubHub:
    """`repositories`: id -> file name -> content. `refusals`: id -> (status, X-Error-Code) of each answer."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    broken_files: set[str] = field(default_factory=set)  # these break off in the middle
    url: str = ""
    downloaded: list[str] = field(default_factory=list)  # names of files sent, in order
    asked: list[str] = field(default_factory=list)  # "METHOD path"

    @contextmanager
    def running(self) -> Iterator[StubHub]:
        """Serve until the block ends; a free port each time."""
        hub = self

        class Handler(_Handler):
            stub = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: StubHub
    protocol_version = "HTTP/1.0"  # one request a connection: a hub that stops is gone at once

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        self.stub.asked.append(f"{self.command} {self.path}")
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        if repo in self.stub.refusals:
            status, code = self.stub.refusals[repo]
            return self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, body)
        files = self.stub.repositories.get(repo)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if api and rest[0] == "revision":
            return self._json(
                {"id": repo, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}, body
            )
        if api and rest[0] == "tree":
            return self._json([_entry(name, content) for name, content in files.items()], body)
        name = "/".join(rest[2:])
        if rest[0] != "resolve" or name not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
        return self._file(name, files[name], body)

    def _file(self, name: str, content: bytes, body: bool) -> None:
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{_oid(content)}"'}
        if body:
            self.stub.downloaded.append(name)
        if body and name in self.stub.broken_files:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return
        self._send(200, content, headers, body)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
