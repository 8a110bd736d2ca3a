"""L5: a server that is told to stop: in mid-generation, twice, while it loads, as PID 1; and a taken port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.command import ROOT, check_one_line, headroom
from tests.support.dockerfile import read_dockerfile
from tests.support.processes import children, gone_within, within
from tests.support.scripted import HELLO, WORLD
from tests.support.server import RunningServer, free_port, running
from tests.support.sse import Streamed, read_stream

LOOP = (HELLO, WORLD, HELLO)  # "Hello world" for ever
LONG = {"prompt": [HELLO], "temperature": 0, "max_tokens": 8000, "ignore_eos": True}
FLAGS = ("--dtype", "float32", "--kv-memory", "256MiB")


@pytest.fixture(scope="module")
def folder(chain: Callable[..., Path]) -> Path:
    return chain(LOOP)


@contextlib.contextmanager
def told(server: RunningServer, streams: int, **fields: Any) -> Iterator[list[Streamed]]:
    """So many streams that have begun; all are read to their end when the context is left."""
    answers: list[Streamed] = []
    started = [threading.Event() for _ in range(streams)]
    body = LONG | fields
    threads = [threading.Thread(target=read_one, args=(server, body, s, answers)) for s in started]
    for thread in threads:
        thread.start()
    assert all(event.wait(20) for event in started)
    yield answers
    for thread in threads:
        thread.join(40)
    assert len(answers) == streams


def read_one(
    server: RunningServer, body: dict[str, Any], started: threading.Event, out: list[Streamed]
) -> None:
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}, timeout=60) as reply:

        def lines() -> Iterator[str]:
            for line in reply.iter_lines():
                started.set()
                yield line

        out.append(read_stream(lines()))


@pytest.mark.parametrize("sign", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_l5_told_to_stop_lets_streams_finish(folder: Path, sign: signal.Signals) -> None:
    """New work is refused at once, streams in flight end as they would have, the exit code is 0."""
    with running(folder, *FLAGS, "--grace", "30") as server:
        orphans = children(server.process.pid)
        with told(server, 4, max_tokens=400) as answers:
            server.process.send_signal(sign)
            assert within(10, lambda: refused(server))
            assert len(answers) < 4, "while they go on"
        assert [(a.finish, a.done, a.text) for a in answers] == [("length", True, " worldHello" * 200)] * 4
        assert server.wait() == 0
        assert gone_within(orphans, 5)
        assert "Traceback" not in server.log()


def refused(server: RunningServer) -> bool:
    """Whether a new request gets a 503 or no connection at all."""
    try:
        reply = httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 1}, trust_env=False)
    except (httpx.ConnectError, httpx.ReadError):  # not even accepted, or with the listener's last ones
        return True
    return reply.status_code == 503 and "error" in reply.json()


def test_l5_the_grace_ends(folder: Path) -> None:
    """What is still running when the grace is over ends with an event that says so; nothing hangs."""
    with running(folder, *FLAGS, "--grace", "0.5") as server:
        with told(server, 4) as answers:
            server.terminate()
            assert server.wait(10) == 0
        for answer in answers:
            assert answer.error is not None and answer.error["code"] == "aborted"
            assert answer.finish is None and answer.done


def test_l5_the_second_signal_does_not_wait(folder: Path) -> None:
    with running(folder, *FLAGS, "--grace", "60") as server:
        orphans = children(server.process.pid)
        with told(server, 4) as answers:
            server.terminate()
            server.terminate()  # at once, as `timeout` and `make` do: an echo of the first
            assert within(10, lambda: server.http.get("/health").status_code == 503)
            time.sleep(0.5)
            assert server.process.poll() is None
            assert "again" not in server.log()
            begin = time.monotonic()
            server.terminate()
        assert server.wait(10) == 143
        assert time.monotonic() - begin < 5
        assert [(a.done, a.finish, a.error is not None) for a in answers] == [(True, None, True)] * 4
        assert gone_within(orphans, 5)
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_l5_told_to_stop_with_requests_waiting(folder: Path) -> None:
    """A sibling: the queue is drained too, and a client that waits in it is told, not left."""
    with running(folder, *FLAGS, "--grace", "0.5", "--max-num-seqs", "1") as server:
        with told(server, 1) as answers:
            replies: list[httpx.Response] = []

            def wait() -> None:
                replies.append(httpx.post(f"{server.url}/v1/completions", json=LONG, trust_env=False))

            waiting = [threading.Thread(target=wait) for _ in range(3)]
            for thread in waiting:
                thread.start()
            assert within(10, lambda: server.metric("num_requests_waiting") == 3)
            server.terminate()
            assert server.wait(10) == 0
            for thread in waiting:
                thread.join(10)
        assert [reply.status_code for reply in replies] == [503] * 3
        assert all(reply.json()["error"]["code"] == "aborted" for reply in replies)
        assert answers[0].error is not None


@pytest.mark.parametrize("first_process", [False, True], ids=["as a command", "as PID 1"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_l5_told_to_stop_while_loading(
    tiny_served: Path, number: signal.Signals, code: int, first_process: bool
) -> None:
    """The kernel keeps from the first process of a container what it has no handler for."""
    words = [sys.executable, "-m", "server.cli", "serve", str(tiny_served), "--port", str(free_port())]
    if first_process:
        words = [*own_pids(), *words]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if first_process:
            assert within(10, lambda: bool(children(process.pid)))
        pid = children(process.pid)[0] if first_process else process.pid
        maps = Path(f"/proc/{pid}/maps")
        assert within(30, lambda: "libtorch_cpu" in maps.read_text())
        os.kill(pid, number)
        begin = time.monotonic()
        out, err = process.communicate(timeout=20)
        assert process.returncode == code, err
        assert time.monotonic() - begin < 10
        assert "Traceback" not in err
        assert out == ""
    finally:
        process.kill()
        process.wait()


def own_pids() -> list[str]:
    """The words that run a command as the first process of its own, as a container does; or a skip."""
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody have process ids of their own (unshare)")
    return words


@pytest.mark.slow
def test_l5_as_pid_1_it_drains_and_ends(folder: Path) -> None:
    """What `docker stop` does: TERM to the first process; its stream finishes, its code is 0."""
    port = free_port()
    words = [
        *own_pids(),
        sys.executable,
        "-m",
        "server.cli",
        "serve",
        str(folder),
        *FLAGS,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        assert within(60, lambda: healthy(url))
        (pid,) = [child for child in children(process.pid) if child_of(child) == process.pid]
        orphans = children(pid)
        body = LONG | {"max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGTERM)
            rest = "\n".join(lines)
        assert '"length"' in rest and rest.rstrip().endswith("data: [DONE]")
        assert process.wait(20) == 0
        assert gone_within(orphans, 5)
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_l5_the_image_starts_the_server_itself() -> None:
    """No shell as PID 1, which would keep the signal to itself."""
    stage = read_dockerfile(ROOT / "Dockerfile")[-1]
    (entrypoint,) = stage.of("ENTRYPOINT")
    assert entrypoint.exec_form()[:2] == ["headroom", "serve"]
    assert not stage.of("CMD")


@pytest.mark.parametrize("listens", [True, False], ids=["another server's", "bound only"])
def test_l5_a_taken_port(tiny_served: Path, listens: bool) -> None:
    """Told in one line, before a weight is read, and exit code 1."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if listens:
            holder.listen()
        port = holder.getsockname()[1]
        done = headroom("serve", str(tiny_served), "--port", str(port))
    assert done.returncode == 1
    check_one_line(done, f"port {port} of 127.0.0.1 is taken")
