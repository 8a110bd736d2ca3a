"""What the load test reports is what happened: a server of known pace is measured by the real locust."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from loadtest.prompts import Prompts
from loadtest.run import quantile
from loadtest.stream import StreamError, read_stream
from tests.support import checkpoints
from tests.support.fake_sse import EVENTS, PACE, TOKENS_PER_EVENT, fake_sse

ROOT = Path(__file__).resolve().parents[2]

needs_locust = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is not installed (extra `load`)"
)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished locust run: its samples, failures and refusals, and locust's own rows by (type, name)."""

    samples: dict[str, list[float]]
    failures: dict[str, int]
    refused: int
    rows: dict[tuple[str, str], dict[str, float]]


def locust(model: str, folder: Path, users: str = "ChatUser", seconds: int = 2) -> Run:
    """Run the locustfile against the fake server; locust patches the process, so it gets its own."""
    samples = folder / "samples.json"
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", users]
    command += ["--headless", "--json", "--skip-log", "-u", "1", "-r", "1", "-t", f"{seconds}s"]
    command += ["--model", model, "--samples", str(samples)]
    with fake_sse() as url:
        done = subprocess.run(
            [*command, "--host", url], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert samples.is_file(), done.stderr
    rows = json.loads(done.stdout[done.stdout.index("[") :])
    kept = json.loads(samples.read_text())
    by_name = {(row["method"], row["name"]): row for row in rows}
    return Run(kept["values"], kept["failures"], kept["refused"], by_name)


@needs_locust
@pytest.mark.parametrize(
    ("users", "name"),
    [("ChatUser", "chat"), pytest.param("CompletionUser", "completion", marks=pytest.mark.slow)],
    ids=["chat", "completion"],
)
def test_times_are_those_of_the_stream(users: str, name: str, tmp_path: Path) -> None:
    run = locust("steady", tmp_path, users=users, seconds=3)
    streams = len(run.samples["total"])
    assert streams >= 1
    pace = PACE * 1000
    # Were the body read at once, the first text would seem to come with the last: EVENTS * pace.
    assert all(pace <= value < EVENTS * pace / 2 for value in run.samples["ttft"])
    assert len(run.samples["itl"]) == streams * (EVENTS - 1)
    assert median(run.samples["itl"]) == pytest.approx(pace, rel=0.2)
    assert all(value >= EVENTS * pace for value in run.samples["total"])
    assert set(run.samples["output_tokens"]) == {EVENTS * TOKENS_PER_EVENT}
    tokens_per_second = (EVENTS * TOKENS_PER_EVENT - 1) / ((EVENTS - 1) * PACE)
    assert median(run.samples["rate"]) == pytest.approx(tokens_per_second, rel=0.2)

    for kind in ("POST", "TTFT", "ITL", "output rate"):
        assert run.rows[kind, name]["num_failures"] == 0
    assert run.rows["POST", name]["num_requests"] == streams
    assert run.rows["POST", name]["min_response_time"] >= EVENTS * pace
    assert run.rows["TTFT", name]["max_response_time"] < EVENTS * pace / 2


@needs_locust
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("cut", "Error"),
        ("error", "the engine gave up"),
        pytest.param("endless", r"without \[DONE\]", marks=pytest.mark.slow),
        pytest.param("no-usage", "usage", marks=pytest.mark.slow),
    ],
    ids=["cut", "error", "endless", "no-usage"],
)
def test_a_broken_stream_is_a_failure(mode: str, says: str, tmp_path: Path) -> None:
    run = locust(mode, tmp_path)
    assert all(re.search(says, message) for message in run.failures)
    row = run.rows["POST", "chat"]
    assert row["num_requests"] == row["num_failures"] == sum(run.failures.values()) >= 1
    assert "ttft" not in run.samples  # a broken stream lends its times to no average
    assert set(run.rows) == {("POST", "chat")}


@needs_locust
def test_an_error_is_a_failure_that_says_what_the_server_said(tmp_path: Path) -> None:
    run = locust("unknown", tmp_path)
    assert list(run.failures) == ["HTTP 404: not now, not here"]
    assert run.rows["POST", "chat"]["num_failures"] == sum(run.failures.values()) >= 1


@needs_locust
def test_a_refusal_is_counted_apart(tmp_path: Path) -> None:
    run = locust("busy", tmp_path)
    assert set(run.rows) == {("POST", "chat refused: 429")}
    assert run.rows["POST", "chat refused: 429"]["num_failures"] == 0
    assert run.refused == run.rows["POST", "chat refused: 429"]["num_requests"] >= 1


def event(text: str | None = None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n"


def test_empty_text_is_no_first_token() -> None:
    ticks = iter([1.0, 2.0, 3.5, 4.0, 5.0, 6.0])
    lines = [
        event(""),  # at 1 s
        b"\n",
        b": a comment\n",
        event("a"),  # at 2 s
        event("b"),  # at 3.5 s
        event(""),
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
        ([event("a"), b"data: [DONE]\n"], "usage"),
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
def test_a_load_that_is_ended_stops_its_server(roomy: Path) -> None:
    command = run_command(roomy, "--seconds", "60")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        found = next(match for line in running.stdout if (match := LISTENING.search(line)))
        assert not nobody_listens(int(found[2]))
        running.terminate()
        assert running.wait(45) == 128 + signal.SIGTERM
    assert nobody_listens(int(found[2]))


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([3.0, 1.0, 2.0], 0.5, 2.0), ([1.0], 0.99, 1.0), (list(range(1, 101)), 0.99, 99)],
)
def test_quantiles_are_values_that_were_measured(values: list[float], q: float, expected: float) -> None:
    assert quantile(values, q) == expected
