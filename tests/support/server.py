"""Servers to test against, on free ports of 127.0.0.1, always stopped.

`running` starts the real thing as a process. `inside` serves the same application from a thread of this
process: it starts in a moment, but takes no signals and prints no start table.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 60.0
STOP_SECONDS = 20.0


@dataclass
class Served:
    """A server that answers at `url`; `http` is a client of it. `engine` is there where it runs in this
    process, for faults on purpose."""

    url: str
    http: httpx.Client
    engine: Any = None

    def openai(self, **options: Any) -> Any:
        """The official client, pointed here; it never retries by itself."""
        import openai

        defaults = {"api_key": "none", "max_retries": 0}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(defaults | options))

    def async_openai(self, **options: Any) -> Any:
        import openai

        defaults = {"api_key": "none", "max_retries": 0}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **(defaults | options))

    def async_http(self, timeout: float = 60.0) -> httpx.AsyncClient:
        """A client of its own for one event loop, with no limit on connections."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, trust_env=False, limits=limits)

    def kv(self, check: bool = False) -> dict[str, Any]:
        """`GET /v1/kv`; checks are rationed, so a refused one waits for its turn."""
        params = {"check": "true"} if check else {}
        reply = self.http.get("/v1/kv", params=params)
        while reply.status_code == 429:
            time.sleep(0.1)
            reply = self.http.get("/v1/kv", params=params)
        assert reply.status_code == 200, reply.text
        body = reply.json()
        assert isinstance(body, dict)
        return body

    def metric(self, name: str) -> int:
        """What `GET /metrics` says of `headroom:name`, over all its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((f"headroom:{name} ", f"headroom:{name}{{"))]
        assert found, f"/metrics says nothing of {name}"
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))

    def preemptions(self) -> int:
        """How many sequences were pushed out so far."""
        return self.metric("num_preemptions_total")

    def live_blocks(self) -> int:
        """Physical blocks held by running or waiting sequences."""
        return int(self.kv()["states"]["live"]["blocks"])

    def wait_idle(self, seconds: float) -> float:
        """Wait until no block is live, at most `seconds`; returns the seconds it took."""
        begin = time.monotonic()
        while (live := self.live_blocks()) > 0:
            waited = time.monotonic() - begin
            assert waited < seconds, f"{live} blocks are still live after {waited:.1f} s"
            time.sleep(0.02)
        return time.monotonic() - begin


@dataclass
class RunningServer(Served):
    """A server process; `log()` is what it has written so far."""

    process: subprocess.Popen[bytes] = field(kw_only=True)
    log_path: Path = field(kw_only=True)

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """The exit code; TimeoutExpired if the process is still there after `timeout` seconds."""
        return self.process.wait(timeout)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(
    folder: Path | str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    threads: int = 1,
    files: int | None = None,
) -> RunningServer:
    """`headroom serve folder flags`, healthy on return; RuntimeError with its log if it never is. `files` is
    how many it may have open at once (`ulimit -n`)."""
    port = free_port()
    log = Path(tempfile.mkstemp(prefix="headroom-test-", suffix=".log")[1])
    command = [sys.executable, "-m", "server.cli", "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **(env or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=settings,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    server = RunningServer(url, _client(url), process=process, log_path=log)
    try:
        _wait_healthy(server)
    except BaseException:
        stop(server)
        raise
    return server


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60.0, trust_env=False)


def _wait_healthy(server: RunningServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.process.returncode}:\n{server.log()}")
        with contextlib.suppress(httpx.TransportError):
            if server.http.get("/health", timeout=2.0).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the server was not healthy after {START_SECONDS:.0f} s:\n{server.log()}")


def stop(server: RunningServer) -> None:
    """End the process: politely first, then not."""
    server.http.close()
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    server.log_path.unlink(missing_ok=True)


@contextlib.contextmanager
def running(
    folder: Path | str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    threads: int = 1,
    files: int | None = None,
) -> Iterator[RunningServer]:
    """`start`, and `stop` whatever happens; a failing test shows the server's log."""
    server = start(folder, *flags, env=env, threads=threads, files=files)
    try:
        yield server
    except BaseException:
        print(f"--- server log\n{server.log()}\n---")
        raise
    finally:
        stop(server)


@contextlib.contextmanager
def inside(
    folder: Path,
    max_queued: int = 256,
    served_name: str | None = None,
    cache_dir: Path | None = None,
    generation_config: str = "auto",
    **options: Any,
) -> Iterator[Served]:
    """The application over `folder`, in fp32; `options` are fields of `EngineOptions`. What it calibrates is
    kept in `cache_dir`."""
    from server.app import load
    from server.config import ModelOptions
    from server.engine.options import EngineOptions

    engine = EngineOptions(**{"dtype": "float32", "kv_memory": 8 << 20} | options)
    model = ModelOptions(
        str(folder), cache_dir or folder, served_name, generation_config=generation_config, engine=engine
    )
    loaded = load(model, folder)
    started: Future[tuple[str, Callable[[], None]]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve_inside(loaded, max_queued, started)))
    thread.start()
    url, leave = started.result(START_SECONDS)
    try:
        with _client(url) as http:
            yield Served(url, http, loaded.engine)
    finally:
        leave()
        thread.join(STOP_SECONDS)
        _forget_routes()


def _forget_routes() -> None:
    """FastAPI keeps the last 4,096 route functions it has seen, and each of ours holds on to its engine."""
    from fastapi.dependencies import models

    for found in tuple(vars(models).values()):
        if hasattr(found, "cache_clear"):
            found.cache_clear()
    gc.collect()  # an engine goes with its application, in a cycle


async def _serve_inside(
    loaded: Any, max_queued: int, started: Future[tuple[str, Callable[[], None]]]
) -> None:
    """Serve until told to leave; tells `started` where, and how to."""
    import uvicorn

    from server.api.connections import BoundedServer
    from server.api.protocol import BoundedHttp
    from server.app import create_app
    from server.config import ServeOptions
    from server.engine.service import EngineService
    from server.text.prepare import Preparer

    service = EngineService(loaded.engine, max_queued=max_queued)
    preparer = Preparer(loaded.served, loaded.tokenizer, loaded.chat, loaded.grammars)
    application = create_app(loaded, service, preparer, ServeOptions(model=loaded))
    server = BoundedServer(
        uvicorn.Config(
            application, http=BoundedHttp, lifespan="off", ws="none", log_config=None, access_log=False,
            timeout_graceful_shutdown=2,
        )
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service.start()
        await preparer.start()

        def leave() -> None:
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)

        started.set_result((f"http://127.0.0.1:{listener.getsockname()[1]}", leave))
        try:
            await server._serve([listener])  # `serve` would take the process's signals
        finally:
            await service.stop()
            await preparer.close()
