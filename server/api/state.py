"""What the routes are built from: the rooms behind them, as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.engine.request import KVPeak
from server.text.served import ServedModel

if TYPE_CHECKING:
    from server.engine.service import EngineService
    from server.metrics import Metrics
    from server.text.prepare import Preparer
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Who may call, and how much patience each gets.

    `host` is the address that the server is bound to; `allowed_hosts` are further names a Host header may
    hold (`*` = any). Seconds: `body_seconds` without a byte of a body, `stall_seconds` without a reader for
    a stream, `keep_alive_seconds` without a word to who waits for one, `check_seconds` between two
    reconciliations of the cache; `request_seconds` from a request to the end of its answer, 0 without end.
    `max_body` is in bytes, `max_bodies` for all large ones that are being read or prepared at once.
    """

    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 16 * 2**20
    max_bodies: int = 512 * 2**20
    body_seconds: float = 30.0
    stall_seconds: float = 30.0
    keep_alive_seconds: float = 10.0
    request_seconds: float = 0.0
    check_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models: a served name and the arithmetic of its attention mode.

    `group` is how many query heads read one KV head; `bytes_per_token` counts the cache of all layers;
    `head_map` is what makes the KV heads: native, repeat, or a lossy mode's kind.
    """

    id: str
    variant: str
    created: int
    max_model_len: int
    kv_heads: int
    group: int
    bytes_per_token: int
    lossy: bool
    head_map: str


@dataclass(frozen=True, slots=True)
class ApiState:
    """One served model. `kv_usage(variant, peak)` gives the fields of `usage.kv_cache`; `backend` is what
    computes attention, and why that one."""

    version: str
    served: ServedModel
    cards: tuple[ModelCard, ...]
    service: EngineService
    preparer: Preparer
    tokenizer: Tokenizer
    backend: str
    backend_reason: str
    kv_usage: Callable[[str, KVPeak], Mapping[str, Any]]
    metrics: Metrics
    settings: ApiSettings

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: names the weights."""
        return f"fp_{self.served.fingerprint[:12]}"
