"""G1, G3: the load test measures what happened, and calls a failure what is one; the real locust runs."""

from __future__ import annotations

import io
import re
from pathlib import Path
from statistics import median

import pytest
from rich.console import Console

from loadtest.run import Measured, report
from tests.support.fake_sse import EACH, EVENTS, PACE, TOKENS_PER_EVENT
from tests.support.locust import locust, needs_locust

WHOLE = EVENTS * PACE * 1000  # ms, 1 s


@needs_locust
@pytest.mark.parametrize(
    ("users", "name"),
    [("ChatUser", "chat"), pytest.param("CompletionUser", "completion", marks=pytest.mark.slow)],
    ids=["chat", "completion"],
)
def test_g1_one_user_sees_the_streams_own_times(users: str, name: str, tmp_path: Path) -> None:
    run = locust("steady", tmp_path, users=users, seconds=3)
    streams = len(run.samples["total"])
    assert streams >= 1 and not run.failures
    pace = PACE * 1000
    # Were the body read at once, the first text would seem to come with the last.
    assert all(pace <= value < WHOLE / 2 for value in run.samples["ttft"])
    assert len(run.samples["itl"]) == streams * (EVENTS - 1)
    assert median(run.samples["itl"]) == pytest.approx(pace, rel=0.2)
    assert all(value >= WHOLE for value in run.samples["total"])
    tokens_per_second = (EVENTS * TOKENS_PER_EVENT - 1) / ((EVENTS - 1) * PACE)
    assert median(run.samples["rate"]) == pytest.approx(tokens_per_second, rel=0.2)

    for kind in ("POST", "TTFT", "ITL", "output rate"):
        assert run.rows[kind, name]["num_failures"] == 0
    assert run.rows["POST", name]["num_requests"] == streams
    assert run.rows["POST", name]["min_response_time"] >= WHOLE
    assert run.rows["TTFT", name]["max_response_time"] < WHOLE / 2


@needs_locust
def test_g1_fifty_users_see_the_same(tmp_path: Path) -> None:
    """Sockets that waited one for another would let one stream through a second, and the first text of the
    last user come after fifty."""
    run = locust("steady", tmp_path, seconds=5, count=50)
    assert not run.failures
    assert len(run.samples["total"]) >= 100
    assert median(run.samples["ttft"]) == pytest.approx(PACE * 1000, abs=50)
    assert median(run.samples["itl"]) == pytest.approx(PACE * 1000, rel=0.3)
    assert WHOLE <= median(run.samples["total"]) < 1.6 * WHOLE


BROKEN = {
    "error": "the engine gave up",
    "cut": "Error",
    "endless": r"without \[DONE\]",
    "no-finish": "choice 0 ended without a finish reason",
    "bad-finish": "choice 0 ended for the reason 'error'",
    "no-usage": "without usage",
}


@needs_locust
def test_g3_what_counts_as_a_failure_and_what_apart(tmp_path: Path) -> None:
    """One user meets each kind of bad end in turn, a 429, and a whole stream."""
    run = locust("each", tmp_path, seconds=4)
    for kind, says in BROKEN.items():
        assert [m for m in run.failures if re.search(says, m)], (kind, run.failures)
    assert len(run.failures) == len(BROKEN) == len(EACH) - 2
    row = run.rows["POST", "chat"]
    whole = len(run.samples["total"])
    assert row["num_failures"] == sum(run.failures.values())
    assert row["num_requests"] - row["num_failures"] == whole >= 1
    refused = run.rows["POST", "chat refused: 429"]
    assert run.refused == refused["num_requests"] >= 1 and refused["num_failures"] == 0
    assert len(run.samples["ttft"]) == whole, "a broken stream lends its times to no average"
    assert 0 <= run.asked - whole - run.refused - sum(run.failures.values()) <= 1, (
        "one was cut off by the end"
    )
    # Chunks are not tokens: each text is two, and every other event is empty.
    assert set(run.samples["output_tokens"]) == {EVENTS * TOKENS_PER_EVENT}
    assert len(run.samples["itl"]) == whole * (EVENTS - 1)


@needs_locust
def test_g3_an_error_is_a_failure_that_says_what_the_server_said(tmp_path: Path) -> None:
    run = locust("unknown", tmp_path)
    assert list(run.failures) == ["HTTP 404: not now, not here"]
    assert run.rows["POST", "chat"]["num_failures"] == sum(run.failures.values()) >= 1


@needs_locust
def test_g3_a_rate_is_offered_and_what_was_sent_is_told(tmp_path: Path) -> None:
    """Five users, a second a stream: three a second are sent as they are due."""
    run = locust("steady", tmp_path, seconds=4, count=5, rate=3.0)
    assert 9 <= run.asked <= 13
    assert not run.failures
    assert run.cpu and all(0 <= share < 2 for share in run.cpu)


def said(measured: Measured) -> tuple[str, bool]:
    out = io.StringIO()
    good = report(measured, None, Console(file=out, width=200))
    return out.getvalue(), good


def test_g3_the_report_tells_rates_and_how_busy_the_client_was() -> None:
    text, good = said(Measured({"total": [900.0] * 80}, {}, 3, 10.0, 95, 9.6, (0.2, 0.5, 0.3)))
    assert "9.6 offered, 9.5 sent, 8.0 answered whole" in text
    assert "33% busy, 50% in its busiest second" in text
    assert "warning" not in text and good


def test_g3_a_saturated_client_is_warned_of() -> None:
    text, _ = said(Measured({"total": [900.0] * 80}, {}, 0, 10.0, 95, None, (0.2, 0.97)))
    assert "warning: the client's one core was 97% busy at times" in text
    text, _ = said(Measured({"total": [900.0] * 80}, {}, 0, 10.0, 80, 20.0, (0.2,)))
    assert "warning: only 8.0 of 20.0 requests a second could be sent" in text


@needs_locust
@pytest.mark.slow
def test_g3_five_hundred_users(tmp_path: Path) -> None:
    """Ten thousand events a second are more than one core of Python reads: the figures say so."""
    run = locust("steady", tmp_path, seconds=15, count=500)
    whole = len(run.samples["total"])
    assert whole > 500
    text, _ = said(Measured(run.samples, run.failures, run.refused, 15.0, run.asked, None, tuple(run.cpu)))
    busy = max(run.cpu)
    assert ("warning: the client's one core" in text) is (busy >= 0.9)
    assert busy > 0.5
