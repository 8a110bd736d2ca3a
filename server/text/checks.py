"""How one value of a client is checked: by type and by range, in errors that name parameter, limit and value.

A bool is no integer and a whole float is none either, so the checks hold whoever builds the ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.text.errors import RequestError, shown


def refuse(param: str, value: object, rule: str, code: str | None = None) -> RequestError:
    """The error of one parameter: `temperature: must be a number from 0 to 2, got 3.`"""
    return RequestError(f"{param}: {rule}, got {shown(value)}.", param, code)


def integer(param: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` itself if it is an integer of the range."""
    rule = (
        f"must be an integer of at least {low}"
        if high is None
        else f"must be an integer from {low} to {high}"
    )
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(param, value, rule)
    if value < low or (high is not None and value > high):
        raise refuse(param, value, rule)
    return value


def number(param: str, value: Any, low: float, high: float) -> float:
    """`value` as a float if it is a finite number of the range."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not good:  # NaN compares false
        raise refuse(param, value, f"must be a number from {low:g} to {high:g}")
    return float(value)


def flag(param: str, value: Any) -> bool:
    """`value` itself if it is a bool; null is false."""
    if value is not None and not isinstance(value, bool):
        raise refuse(param, value, "must be true or false")
    return bool(value)


def text(param: str, value: Any) -> str:
    """`value` itself if it is a string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise refuse(param, value, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param}: character {error.start} is half of a surrogate pair, which is not valid Unicode.",
            param,
            "invalid_unicode",
        ) from None
    return value


def is_list(value: Any) -> bool:
    """Whether `value` is what a JSON list becomes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
