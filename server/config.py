"""What the command line asked for, before any room is loaded (no torch here: `--help` must be quick)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from server.engine.options import EngineOptions

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to load and how; `threads` for CPU arithmetic, None is one for each core."""

    model: str
    cache_dir: Path
    served_name: str | None = None
    threads: int | None = None
    hub_endpoint: str | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """A server around a model; `grace` is how long running answers may go on after SIGTERM (seconds)."""

    model: ModelOptions
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queued: int = 256
    grace: float = 30.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How a terminal command draws tokens; None leaves a value to the server's defaults."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


def parse_size(text: str) -> int:
    """Bytes from `2GiB`, `512MB`, `1.5g` or a plain number; ValueError says what is accepted.

    K, M, G, T are powers of 1000 and Ki, Mi, Gi, Ti powers of 1024 (IEC 80000-13); the B is optional.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 2GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_bytes(count: int) -> str:
    """`count` bytes for people: three significant digits and a binary unit, whole numbers below 1 KiB."""
    if count < 2**10:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    value = count / 2 ** (10 * power)
    if value >= 999.5 and power < 4:
        power, value = power + 1, value / 1024
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
