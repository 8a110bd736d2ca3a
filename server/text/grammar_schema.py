"""A schema as the grammar library has to be told it, so that it allows nothing that the schema forbids.

What llguidance would get wrong is told in other words, or refused:

* Numbers are read as 64-bit floats, and whole ones are then kept in 64 bits: bounds beyond 2^53 may move
  outwards. They are moved inwards here, where that cannot make them say anything else; constants are refused.
* A class of characters that holds all control characters (`[^"]`) lets `"` and backslash in: the library then
  allows any escape. U+0000 is left out of such classes, so that it goes through the others one by one; the
  control characters by name are refused.
* `uniqueItems: false` asks for nothing, and is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Objects whose names are no keywords; what stands under them is a schema."""
DATA = ("const", "enum", "default", "examples", "example")
"""What stands there is no schema."""

_EXACT = 2**53
_MOST = 2.0**63 - 1024  # the last float below 2^63
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# A class's start in Rust's syntax, after pairs of an escape and what it escapes.
_NOT = re.compile(r"(?P<other>\\.|[^\\\[]+|\[(?!\^))|\[\^(?P<bracket>\]?)", re.DOTALL)
_CONTROLS = re.compile(
    r"(?<!\\)(?:\\\\)*(\\[pP](?:C|\{\^?(?:C|Cc|Other|Control|cntrl)\}))|(\[:\^?cntrl:\])", re.IGNORECASE
)
_FROM_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:x00|u0000|x\{0+\}|u\{0+\})-")


def told(schema: Any) -> Any:
    """The schema in the library's terms. Raises ValueError that says what cannot be told."""
    if isinstance(schema, list):
        return [told(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    return dict(entry for name, value in schema.items() for entry in _keyword(name, value))


def _keyword(name: str, value: Any) -> list[tuple[str, Any]]:
    if name in DATA:
        if name in ("const", "enum"):
            _check_data(name, value)
        return [(name, value)]
    if name == "uniqueItems" and value is False:
        return []
    if name == "pattern" and isinstance(value, str):
        return [(name, without_nul(value))]
    if name in _LOWER + _UPPER and isinstance(value, int | float) and not isinstance(value, bool):
        return [(name, _bound(name, value))]
    if name in NAMED and isinstance(value, Mapping):
        rename = without_nul if name == "patternProperties" else str
        return [(name, {rename(key): told(entry) for key, entry in value.items()})]
    return [(name, told(value))]


def without_nul(pattern: str) -> str:
    """The pattern, with U+0000 left out of negated classes and of ranges that begin there. Raises ValueError
    for what is not told in other words."""
    if named := _CONTROLS.search(pattern):
        raise ValueError(
            f"a pattern's class {named[1] or named[2]} is not supported; write [\\x01-\\x1f\\x7f] or so"
        )

    def opened(match: re.Match[str]) -> str:
        if match["other"] is not None:
            return match[0]
        return r"[^[\x00]" + (r"\]" if match["bracket"] else "")

    return _FROM_NUL.sub(r"\1\\x01-", _NOT.sub(opened, pattern))


def _bound(name: str, value: int | float) -> int | float:
    """The nearest bound within that a float holds. Raises ValueError where none does."""
    if abs(value) <= _EXACT:
        return value
    if value > _MOST if name in _LOWER else value < -_MOST:
        raise ValueError(f"{name} must be within 64 bits; no whole number beyond is written")
    near = float(min(max(value, -_MOST), _MOST))
    if name in _LOWER and near < value:
        near = math.nextafter(near, math.inf)
    elif name in _UPPER and near > value:
        near = math.nextafter(near, -math.inf)
    return int(near)


def _check_data(name: str, value: Any) -> None:
    """Refuses whole numbers that would become others. Raises ValueError."""
    stack = [value]
    while stack:
        entry = stack.pop()
        if isinstance(entry, Mapping):
            stack.extend(entry.values())
        elif isinstance(entry, list):
            stack.extend(entry)
        elif isinstance(entry, int) and abs(entry) > _EXACT:
            raise ValueError(f"{name} has a whole number beyond 2^53, which would not be kept exactly")
