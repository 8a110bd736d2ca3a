"""Amounts as people write and read them."""

from __future__ import annotations

import re

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

_MOST = 2**60  # bytes


def parse_size(text: str) -> int:
    """Bytes from `2GiB`, `512MB`, `1.5g` or a plain number; ValueError says what is accepted.

    K, M, G, T are powers of 1000 and Ki, Mi, Gi, Ti powers of 1024 (IEC 80000-13); the B is optional.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 2GiB, 512MB or a number of bytes")
    value = float(match[1]) * _UNITS[match[2] or ""]
    if value > _MOST:
        raise ValueError(f"{text!r} is more than any machine has; give at most {exact_size(_MOST)}")
    return int(value)


def exact_size(count: int) -> str:
    """`count` bytes in the largest binary unit that keeps it whole, for `parse_size`: `360KiB`."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count and count % 2**power == 0:
            return f"{count >> power}{unit}"
    return str(count)


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


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 token`, `2 tokens`; `many` where an s does not make it."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"
