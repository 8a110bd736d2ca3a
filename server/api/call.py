"""What one call of a generating route has beside its body."""

from __future__ import annotations

from dataclasses import dataclass

from server.api.deadline import Deadline
from server.api.identity import Identity
from server.metrics import TokenClock


@dataclass(frozen=True, slots=True)
class Call:
    """Its names, when it came, and when it must be over."""

    identity: Identity
    clock: TokenClock
    deadline: Deadline
