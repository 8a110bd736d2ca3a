"""What Prometheus reads: vLLM's names under our prefix where they mean the same, and the cache by variant.

One registry for each app, so that two servers in one process do not share numbers. Engine numbers are read
from a snapshot when somebody asks; only what the engine cannot know (latencies as clients see them, refusals)
is counted here.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cache.report import CacheReport
from server.engine.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)

# How a call ended, as clients saw it. The label takes no other value.
OUTCOMES = ("ok", "invalid", "queue_full", "unavailable", "client_gone", "timeout", "error")


class Metrics:
    """The numbers of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "headroom:requests",
            "Generation calls by outcome, as the client saw it.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in OUTCOMES:
            self._calls.labels(outcome)
        self._ttft = Times(
            "headroom:time_to_first_token_seconds", "From the arrival of a call to its first token.", _TTFT
        )
        self._itl = Times("headroom:inter_token_latency_seconds", "Between two tokens of a choice.", _ITL)
        self.registry.register(self._ttft)
        self.registry.register(self._itl)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def outcome(self, outcome: str) -> None:
        """Count one generation call; `outcome` is one of OUTCOMES."""
        self._calls.labels(outcome).inc()

    def clock(self) -> TokenClock:
        """Starts timing one call, now."""
        return TokenClock(self._ttft, self._itl)

    def render(self, stats: EngineStats, report: CacheReport | None) -> bytes:
        """The text format of Prometheus; `report` is None where the engine can no longer give one."""
        self._engine.snapshot = (stats, report)
        return generate_latest(self.registry)


class TokenClock:
    """Times the tokens of one call: the first of all, then the gaps within each choice (seconds)."""

    def __init__(self, ttft: Times, itl: Times) -> None:
        self._ttft = ttft
        self._itl = itl
        self._begin = time.perf_counter()
        self._last: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        """`count` tokens of choice `index` have just come; several at once share their gap evenly."""
        if count == 0:
            return
        now = time.perf_counter()
        if not self._last:
            self._ttft.observe(now - self._begin)
        last = self._last.get(index)
        self._last[index] = now
        if last is not None:
            self._itl.observe((now - last) / count, count)


class Times(Collector):
    """A histogram of seconds that one thread fills. Every token is observed, so there is no lock."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the buckets, ascending, each a part of its bucket; one more bucket
        has no bound."""
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """The same so many times."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry."""
        return [HistogramMetricFamily(self._name, self._text)]

    def collect(self) -> Iterator[Metric]:
        """Buckets hold what is in those before them too."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _EngineCollector(Collector):
    """Turns the last snapshot into metrics; nothing is kept up to date between two scrapes."""

    def __init__(self) -> None:
        self.snapshot: tuple[EngineStats, CacheReport | None] | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is None:
            return
        stats, report = self.snapshot
        yield _gauge("headroom:num_requests_running", "Choices that run.", stats.running)
        yield _gauge("headroom:num_requests_waiting", "Choices that wait.", stats.waiting)
        yield _counter(
            "headroom:prompt_tokens", "Prompt tokens admitted, cached ones included.", stats.prompt_tokens
        )
        yield _counter("headroom:generation_tokens", "Tokens generated.", stats.output_tokens)
        yield _counter("headroom:prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens)
        yield _counter("headroom:prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens)
        yield _counter("headroom:num_preemptions", "Sequences stopped to be recomputed.", stats.preemptions)
        yield from _speculation(stats)
        finished = CounterMetricFamily(
            "headroom:request_success", "Choices that ended, by reason.", labels=["finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], getattr(stats, f"finished_{reason}"))
        yield finished
        if report is not None:
            yield from _cache(report)


def _speculation(stats: EngineStats) -> Iterator[Metric]:
    """All 0 without --speculate. Accepted by drafted is the acceptance rate."""
    yield _counter("headroom:spec_decode_num_drafts", "Runs of a choice that had drafts.", stats.drafts)
    yield _counter("headroom:spec_decode_num_draft_tokens", "Tokens drafted.", stats.draft_tokens)
    yield _counter(
        "headroom:spec_decode_num_accepted_tokens", "Drafted tokens that were right.", stats.accepted_tokens
    )


def _cache(report: CacheReport) -> Iterator[Metric]:
    states = report.states
    total = max(1, report.pool.blocks)
    yield _gauge(
        "headroom:kv_cache_usage_perc",
        "Share of the pool that is live; 1 is all.",
        states.live.blocks / total,
    )
    blocks = GaugeMetricFamily("headroom:kv_blocks", "Physical blocks by state.", labels=["state"])
    for state, amount in (("live", states.live), ("cached", states.cached), ("free", states.free)):
        blocks.add_metric([state], amount.blocks)
    yield blocks
    live = GaugeMetricFamily(
        "headroom:kv_live_bytes", "Live bytes of cache by attention mode.", labels=["variant"]
    )
    for variant in report.variants:
        live.add_metric([variant.name], variant.live_bytes)
    yield live


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
