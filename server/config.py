"""What the command line asked for, before any room is loaded (no torch here: `--help` must be quick)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from server.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to load and how; `threads` for CPU arithmetic, None is one for each core; `compiler` for
    the operators in C++ as `CXX` spells it, None is the system's. A request's
    sampling is by default what the checkpoint's generation_config.json says, or with `generation_config`
    "none" what OpenAI's API says."""

    model: str
    cache_dir: Path
    served_name: str | None = None
    threads: int | None = None
    hub_endpoint: str | None = None
    generation_config: str = "auto"
    compiler: str | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """A server around a model. Seconds: `request_timeout` from a request to the end of its answer, 0 without
    end; `grace` is how long running answers may go on after SIGTERM."""

    model: ModelOptions
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queued: int = 256
    request_timeout: float = 6 * 3600.0
    grace: float = 30.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How a terminal command draws tokens; None leaves a value to the checkpoint's own."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
