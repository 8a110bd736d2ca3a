"""The load test's parts, and `make load` as a whole; G1 and G3 of the known failures test what it tells."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.prompts import Prompts
from loadtest.run import quantile
from loadtest.stream import StreamError, read_stream
from tests.support import checkpoints
from tests.support.locust import needs_locust

ROOT = Path(__file__).resolve().parents[2]


def event(text: str | None = None, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    choices = [] if text is None else [choice]
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n"


def test_empty_text_is_no_first_token() -> None:
    ticks = iter([1.0, 2.0, 3.5, 4.0, 5.0, 6.0])
    lines = [
        event(""),  # at 1 s
        b"\n",
        b": a comment\n",
        event("a"),  # at 2 s
        event("b"),  # at 3.5 s
        event("", finish="stop"),
        event(usage={"completion_tokens": 4}),
        b"data: [DONE]\n",  # at 6 s
    ]
    times = read_stream(lines, lambda: next(ticks), started=0.5)
    assert times.ttft == 1500.0
    assert times.gaps == [1500.0]
    assert times.output_tokens == 4
    assert times.rate == pytest.approx(3 / 1.5)
    assert times.total == 5500.0


def test_a_stream_of_no_text_has_no_ttft() -> None:
    times = read_stream([event(usage={"completion_tokens": 1}), b"data: [DONE]\n"], lambda: 1.0, started=0.0)
    assert times.ttft is None
    assert times.rate is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([event("a")], "without"),
        ([event("a", finish="stop"), b"data: [DONE]\n"], "usage"),
        ([event("a"), event(usage={"completion_tokens": 1}), b"data: [DONE]\n"], "without a finish reason"),
        ([event("a", finish="error"), event(usage={}), b"data: [DONE]\n"], "for the reason 'error'"),
        ([b'data: {"error": {"message": "boom"}}\n', b"data: [DONE]\n"], "boom"),
        ([b"data: {oops\n"], "JSON"),
    ],
)
def test_what_a_stream_must_not_do(lines: list[bytes], says: str) -> None:
    with pytest.raises(StreamError, match=says):
        read_stream(lines, lambda: 1.0, started=0.0)


def test_a_seed_gives_the_same_prompts() -> None:
    first, again, other = Prompts(7, 0), Prompts(7, 0), Prompts(7, 1)
    asked = [first.chat() for _ in range(20)]
    assert asked == [again.chat() for _ in range(20)]
    assert asked != [other.chat() for _ in range(20)]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model to serve whose context holds every prompt of the load test. Read only."""
    folder = tmp_path_factory.mktemp("roomy")
    checkpoints.make_checkpoint(folder, vocab=checkpoints.BPE_VOCAB, std=0.3, max_position_embeddings=8192)
    return checkpoints.add_byte_bpe(folder)


LISTENING = re.compile(r"against (http://127\.0\.0\.1:(\d+))")


def run_command(model: Path | str, *more: str) -> list[str]:
    serve = "--kv-memory 64MiB --dtype float32"
    return [
        sys.executable,
        "-m",
        "loadtest.run",
        "--model",
        str(model),
        "--users",
        "2",
        "--serve",
        serve,
        *more,
    ]


def nobody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@needs_locust
def test_make_load_reports_latency_and_cache_and_leaves_no_server(roomy: Path) -> None:
    done = subprocess.run(
        run_command(roomy, "--seconds", "3"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Listening on" in done.stdout, "what the server says is shown"
    for row in ("first text (TTFT)", "between texts (ITL)", "whole stream", "output rate", "refused (429)"):
        assert row in done.stdout
    peak = re.search(r"peak live cache[^\d]*([\d.]+) MiB", done.stdout)
    assert peak is not None
    assert float(peak[1]) > 0
    found = LISTENING.search(done.stdout)
    assert found is not None
    assert nobody_listens(int(found[2]))


@pytest.mark.slow
@needs_locust
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_load_that_is_ended_stops_its_server(roomy: Path, told: signal.Signals) -> None:
    command = run_command(roomy, "--seconds", "60")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        found = next(match for line in running.stdout if (match := LISTENING.search(line)))
        assert not nobody_listens(int(found[2]))
        running.send_signal(told)
        assert running.wait(45) == 128 + told
    assert nobody_listens(int(found[2]))


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([3.0, 1.0, 2.0], 0.5, 2.0), ([1.0], 0.99, 1.0), (list(range(1, 101)), 0.99, 99)],
)
def test_quantiles_are_values_that_were_measured(values: list[float], q: float, expected: float) -> None:
    assert quantile(values, q) == expected
