"""How slow work tells its caller how far it is, without knowing who draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One phase at a time: `start` begins the next, `update` moves it. Never two calls at the same time."""

    def start(self, label: str, total: int | None) -> None:
        """Begin a phase. `total`: its size in bytes, or in steps of any kind; None if unknown."""
        ...

    def update(self, done: int) -> None:
        """How much of the current phase is done, in the units of its total; never a difference."""
        ...


class Silent:
    """A Progress that draws nothing."""

    def start(self, label: str, total: int | None) -> None:
        """Nothing."""

    def update(self, done: int) -> None:
        """Nothing."""
