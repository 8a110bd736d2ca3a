"""A `headroom serve` process to try things on: started on a free port of 127.0.0.1, always stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from loadtest.command import ROOT

START_SECONDS = 600.0  # the first start may fetch the model
STOP_SECONDS = 60.0
POLL_SECONDS = 0.02  # benchmarks measure how long the start takes
CHECKS_APART = 1.1  # seconds; /v1/kv?check=true is rationed


class ServerFault(Exception):
    """The server did what no server may: it ended, hung, or its books do not balance."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server at 127.0.0.1:`port`, its process, the file that takes what it writes, and the seconds from the
    command to its first answer."""

    port: int
    process: subprocess.Popen[bytes]
    log_path: Path
    ready_s: float = 0.0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """Everything that it has written so far; nothing of a server that writes to the terminal."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def tracebacks(self) -> int:
        """How many exceptions it has logged; user input must never cause one."""
        return self.log().count("Traceback (most recent call last)")

    def memory(self) -> int:
        """Bytes of its own memory, in RAM or swapped out (RssAnon + VmSwap); ServerFault if it has ended."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise ServerFault(f"the server has ended: {error}") from None
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if "RssAnon" not in fields:
            raise ServerFault(f"the server has ended with code {self.process.poll()}")
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))

    def get(self, path: str) -> Any:
        """The JSON of a GET, or its text where it is none; ServerFault if there is no 200."""
        return self._answer(urllib.request.Request(f"{self.url}{path}"), f"GET {path}", 60.0)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The same of a POST."""
        given = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), given)
        return self._answer(request, f"POST {path} {body}", 300.0)

    def _answer(self, request: urllib.request.Request, said: str, seconds: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                text = reply.read().decode()
                return json.loads(text) if "json" in reply.headers["content-type"] else text
        except urllib.error.HTTPError as error:
            raise ServerFault(f"{said}: {error.code} {error.read()[:300]!r}") from None
        except OSError as error:
            raise ServerFault(f"{said}: {error}") from None

    def checked(self) -> dict[str, Any]:
        """`/v1/kv?check=true`: every block recounted. ServerFault if the books do not balance."""
        time.sleep(CHECKS_APART)  # another may have asked a moment ago
        report: dict[str, Any] = self.get("/v1/kv?check=true")
        return report

    def wait_idle(self, seconds: float) -> float:
        """Wait till nothing runs, waits or holds a block; the seconds it took, ServerFault past `seconds`."""
        begin = time.monotonic()
        while True:
            health, live = self.get("/health"), self.get("/v1/kv")["states"]["live"]["blocks"]
            waited = time.monotonic() - begin
            if health["running"] == health["waiting"] == live == 0:
                return waited
            if waited > seconds:
                raise ServerFault(f"not idle after {waited:.0f} s: {live} live blocks, {health}")
            time.sleep(0.1)

    def counter(self, name: str) -> int:
        """A counter of /metrics, summed over its labels."""
        lines = self.get("/metrics").splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        if not found:
            raise ServerFault(f"/metrics has no {name}")
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))


@contextmanager
def own_server(model: str, flags: Sequence[str], shown: bool = False) -> Iterator[OwnServer]:
    """`headroom serve model flags`, as `running` has it."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", model, "--port", str(port), *flags]
    with running(command, port, shown=shown) as server:
        yield server


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], port: int, more: Mapping[str, str] | None = None, shown: bool = False
) -> Iterator[OwnServer]:
    """A server that answers /health on `port`, with `more` in its environment, ready on entry. It and the
    processes that it started are ended in any case. What it writes goes to its log, or to the terminal if it
    is `shown`. SystemExit with its last words if it is never ready."""
    with tempfile.TemporaryDirectory(prefix="headroom-server-") as folder:
        log = Path(folder) / "log.txt"
        begin = time.perf_counter()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(more or {})
        environment.pop("HEADROOM_API_KEY", None)
        with log.open("wb") as file:
            out = None if shown else file
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        server = OwnServer(port, process, log)
        try:
            _wait_ready(server)
            yield replace(server, ready_s=time.perf_counter() - begin)
        finally:
            _stop(process)


def _wait_ready(server: OwnServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            code = server.process.returncode
            raise SystemExit(f"the server ended with code {code} before it was ready\n{server.log()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(POLL_SECONDS)
    raise SystemExit(f"the server was not ready after {START_SECONDS:.0f} s\n{server.log()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):  # workers that it left
        os.killpg(process.pid, signal.SIGKILL)


def leave_when_told() -> None:
    """A SIGTERM, or a terminal that is closed, leaves through every `finally`, so that the server is stopped:
    it has a session of its own."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for told in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(told, leave)
