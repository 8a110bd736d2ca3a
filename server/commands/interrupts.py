"""How Ctrl-C and SIGTERM end a command: at once while modules are imported, by an exception from then on.

An exception in the middle of an import may be lost, leave half of a module behind, or end the process in the
C++ that imports for torch and numpy; and there is nothing yet that it would have to clean up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once(*, silently: bool = False) -> None:
    """From here on a signal ends the process where it stands, with 128 + its number."""
    for number in _SIGNALS:
        _handle(number, _exit if silently else _say_and_exit)


def raise_them() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, and SIGTERM SystemExit(143)."""
    _handle(signal.SIGINT, signal.default_int_handler)
    _handle(signal.SIGTERM, _terminated)


@contextmanager
def importing() -> Iterator[None]:
    """Signals end the process at once meanwhile, and do what they did before when it is over."""
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    end_at_once()
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def ignore_them() -> None:
    """All is done; a Ctrl-C now would only make Python print what it broke off."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle(number: signal.Signals, handler: signal._HANDLER) -> None:
    """But for what our parent ignores on our behalf, as a shell does for what it runs in the background.

    Without a handler, the first process of a container would ignore SIGTERM.
    """
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def _say_and_exit(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGINT:
        with suppress(OSError):  # a terminal that is gone
            os.write(2, b"\nheadroom: interrupted\n")
    os._exit(128 + number)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
