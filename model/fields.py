"""Typed reads from a `config.json` object, with errors that name the file, the key and the value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from model.errors import ModelError

_MOST = 2**31 - 1  # of tokens, heads, layers, rows: more is a mistake, or an attack


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and where it came from. `null` counts as absent unless a method says otherwise."""

    values: Mapping[str, object]
    where: str

    def has(self, name: str) -> bool:
        """Whether the key is there, even with null."""
        return name in self.values

    def raw(self, name: str) -> object:
        """The value as parsed, None when absent."""
        return self.values.get(name)

    def fail(self, message: str) -> ModelError:
        """A ModelError whose message starts with where the object came from."""
        return ModelError(f"{self.where}: {message}")

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MOST
    ) -> int:
        """A whole number from `minimum` to `maximum`; without a default the key must be there."""
        value = self.optional_integer(name, minimum=minimum, maximum=maximum)
        if value is not None:
            return value
        if default is None:
            raise self.fail(f"{name} is missing; it must be a whole number of at least {minimum}")
        return default

    def optional_integer(self, name: str, *, minimum: int = 1, maximum: int = _MOST) -> int | None:
        """A whole number from `minimum` to `maximum`, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(f"{name} is {value!r}; it must be a whole number of at least {minimum}")
        if value > maximum:
            digits = str(value)
            told = digits if len(digits) <= 20 else f"a number of {len(digits)} digits"
            raise self.fail(f"{name} is {told}; it must be at most {maximum}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above zero; without a default the key must be there."""
        value = self.optional_positive(name)
        if value is not None:
            return value
        if default is None:
            raise self.fail(f"{name} is missing; it must be a number above 0")
        return default

    def optional_positive(self, name: str) -> float | None:
        """A finite number above zero, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.fail(f"{name} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{name} is {value!r}; it must be true or false")
        return value
