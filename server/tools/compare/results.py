"""What was measured, as plain data. Sizes in bytes, times in seconds unless a name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from server.tools.quality import QualityRow


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 99th percentile (numpy's linear rule), in milliseconds."""

    p50: float
    p99: float

    @staticmethod
    def of(seconds: list[float]) -> Spread:
        """Of at least one duration in seconds."""
        p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
        return Spread(float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class FixedWork:
    """Experiment A in one mode. `peak_live_bytes` were counted by the allocator in the real run,
    `predicted_peak_bytes` in the dry one; `device_bytes` is what the device says of the arena (`pool_bytes`
    and one block for padding), None where it cannot be asked."""

    mode: str
    peak_live_bytes: int
    predicted_peak_bytes: int
    pool_bytes: int
    device_bytes: int | None
    weight_bytes: int
    map_bytes: int
    ttft_ms: Spread
    itl_ms: Spread
    output_tokens: int  # of one round
    rounds: tuple[float, ...]  # output tokens per second of each
    output_tokens_per_second: float  # the median of them


@dataclass(frozen=True, slots=True)
class Point:
    """So many users decoding together near the full context, and the tokens they get between them."""

    users: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class FixedPool:
    """Experiment B in one mode: `users` fill their context at once; with one more, somebody `next_user`: was
    preempted, or waited for room."""

    mode: str
    pool_bytes: int
    users: int
    next_user: str
    curve: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class ModeFacts:
    """What is known of a mode without running it; `run_bytes_per_token` counts the layers that are run."""

    mode: str
    kv_heads: int
    group: int
    lossy: bool
    head_map: str
    bytes_per_token: int
    run_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran."""

    cpu: str
    cores: int  # that this process may use
    threads: int  # that torch uses
    memory_bytes: int | None
    gpu: str | None
    system: str
    python: str
    torch: str


@dataclass(frozen=True, slots=True)
class Setup:
    """What was asked for, and what that came to."""

    model: str
    family: str
    layers: int
    run_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    random_weights: bool
    device: str
    dtype: str
    head_map: str
    block_size: int
    block_bytes: int
    context: int
    users: int
    rounds: int
    prompt_tokens: int  # of a user in A
    output_tokens: int
    pool_bytes: int  # of B
    quality: bool  # whether it was asked for
    weights: str = "none"  # or int8 or int4


@dataclass(slots=True)
class Comparison:
    """Everything so far; each part is filled in as it is done, by mode."""

    headroom: str
    commit: str | None
    date: str
    machine: Machine
    setup: Setup
    modes: tuple[ModeFacts, ...]
    fixed_work: dict[str, FixedWork]
    fixed_pool: dict[str, FixedPool]
    quality: dict[str, QualityRow]
    notes: list[str]
    seconds: float = 0.0
    complete: bool = False

    @property
    def measured(self) -> bool:
        """Whether anything is done."""
        return bool(self.fixed_work or self.fixed_pool or self.quality)
