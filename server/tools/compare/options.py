"""What a user may ask of `headroom compare`. No torch here: `--help` shows these defaults, quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODES = ("native", "mha", "mqa")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`attention` empty: DEFAULT_MODES, each number of KV heads once. `head_map` None: aligned, or mean where
    the weights are random. `context` is a user's prompt and answer together, in tokens; `users` share the
    fixed work, and as many of the widest mode fill the fixed pool. `layers` cuts random weights; None is all.
    `text` is a file to measure quality on instead of the shipped text. `compiler` makes the operators in C++,
    as `CXX` spells it; None is the system's."""

    attention: tuple[str, ...] = ()
    head_map: str | None = None
    context: int = 512
    users: int = 4
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    threads: int | None = None
    kernels: str = "auto"
    weights: str = "none"
    compiler: str | None = None
    random_weights: bool = False
    layers: int | None = None
    text: Path | None = None
    quality: bool = True


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, beside the table on the terminal."""

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None
