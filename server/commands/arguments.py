"""How words of the command line are read: one line of complaint, and values that name what they want."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable
from typing import NoReturn

from server.engine.units import parse_size

Group = argparse._ArgumentGroup  # what `add_argument_group` returns; argparse has no public name for it


class _Help(argparse.HelpFormatter):
    """As wide as the terminal, up to a readable limit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(100, shutil.get_terminal_size().columns - 2))


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes flags before, between and after the other words."""

    def __init__(self, command: str, usage: str, text: str) -> None:
        super().__init__(
            prog=f"headroom {command}",
            usage=f"headroom {command} {usage}",
            description=text,
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """One line on standard error; exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def size(text: str) -> int:
    """Bytes: see `parse_size`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from `low` to `high`."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse(text: str) -> int:
        if not (
            text.isascii() and text.isdecimal() and len(text) < 19 and low <= int(text) <= (high or 10**18)
        ):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return parse


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Reads a number from `low` (or above it) to `high`; NaN is none."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            wanted = f"above {low} and at most {high}" if above else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return parse


def names(text: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def modes(text: str) -> tuple[str, ...]:
    """Attention modes with commas between, at least one; the checkpoint knows which there are."""
    found = names(text)
    if not found:
        raise argparse.ArgumentTypeError("name at least one mode, as native or native,mqa")
    return found


def name(text: str) -> str:
    """A word to show people."""
    if not text.strip() or not text.isprintable() or len(text) > 200:
        raise argparse.ArgumentTypeError("a name has 1 to 200 printable characters")
    return text.strip()


def key(text: str) -> str:
    """A secret that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a key cannot be empty")
    return text.strip()
