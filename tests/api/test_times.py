"""The histograms of latencies say what the library's own would."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.metrics import Times, TokenClock

BOUNDS = (0.01, 0.025, 1.0, 30.0)
NAME, TEXT = "headroom:seconds", "Some."


def shown(registry: CollectorRegistry) -> list[str]:
    """All but when it was made, which only the library tells."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_the_same_text_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = Times(NAME, TEXT, BOUNDS)
    ours.register(times)
    histogram = Histogram(NAME, TEXT, buckets=BOUNDS, registry=theirs)
    assert shown(ours) == shown(theirs), "empty"
    draw = random.Random(1)
    seconds = [0.0, *BOUNDS, 31.0, *(2 ** draw.randint(-9, 6) for _ in range(200))]
    for one in seconds:
        times.observe(one)
        histogram.observe(one)
    times.observe(0.5, 3)
    for _ in range(3):
        histogram.observe(0.5)
    assert shown(ours) == shown(theirs)
    with pytest.raises(ValueError, match="Duplicated"):
        ours.register(Times(NAME, TEXT, BOUNDS))


def test_tokens_that_come_together_share_their_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.5, 101.5, 103.5])
    monkeypatch.setattr("server.metrics.time.perf_counter", lambda: next(now))
    first, gaps = CollectorRegistry(), CollectorRegistry()
    ttft, itl = Times(NAME, TEXT, (0.5, 1.0)), Times(NAME, TEXT, (0.5, 1.0))
    first.register(ttft)
    gaps.register(itl)
    clock = TokenClock(ttft, itl)
    clock.tokens(0, 1)
    clock.tokens(0, 0)
    clock.tokens(0, 4)  # a quarter of a second each
    clock.tokens(0, 2)  # and a second
    assert first.get_sample_value(f"{NAME}_sum") == 0.5 and first.get_sample_value(f"{NAME}_count") == 1
    assert gaps.get_sample_value(f"{NAME}_bucket", {"le": "0.5"}) == 4
    assert gaps.get_sample_value(f"{NAME}_bucket", {"le": "1.0"}) == 6
    assert gaps.get_sample_value(f"{NAME}_sum") == 3.0
