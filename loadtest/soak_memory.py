"""Whether a server's memory is flat: bytes a request, after warm-up, by two measures that noise moves
differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LIMIT = 20_000  # bytes a request
FEWEST = 1000  # requests after warm-up; fewer say nothing about a slope
WARM_UP = 0.25  # of the requests


@dataclass(frozen=True, slots=True)
class Sample:
    """So many bytes when so many requests had been answered or left."""

    requests: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """After warm-up: bytes a request by least squares, and from the first quarter's mean to the last's."""

    requests: int
    slope: float
    quarters: float
    first_bytes: int
    last_bytes: int

    @property
    def judged(self) -> bool:
        """Whether there were requests enough to judge."""
        return self.requests >= FEWEST

    @property
    def flat(self) -> bool:
        """Both measures are below the limit, or there is too little to judge."""
        return not self.judged or max(self.slope, self.quarters) < LIMIT


def growth(samples: Sequence[Sample]) -> Growth:
    """How memory grew after the first quarter of the requests; at least 2 samples."""
    if len(samples) < 2:
        raise ValueError("memory was sampled less than twice")
    begin = samples[-1].requests * WARM_UP
    warm = [sample for sample in samples if sample.requests >= begin]
    if len(warm) < 2:
        warm = list(samples[-2:])
    counts, sizes = [float(s.requests) for s in warm], [float(s.bytes) for s in warm]
    middle, mean = fmean(counts), fmean(sizes)
    spread = sum((count - middle) ** 2 for count in counts)
    product = sum((count - middle) * (size - mean) for count, size in zip(counts, sizes, strict=True))
    quarter = max(1, len(warm) // 4)
    between = fmean(counts[-quarter:]) - fmean(counts[:quarter])
    return Growth(
        requests=warm[-1].requests - warm[0].requests,
        slope=product / spread if spread else 0.0,
        quarters=(fmean(sizes[-quarter:]) - fmean(sizes[:quarter])) / between if between else 0.0,
        first_bytes=warm[0].bytes,
        last_bytes=warm[-1].bytes,
    )
