"""Whether the arena is as large as the formula says, by three witnesses that know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.errors import CacheError
from cache.layout import KVLayout
from cache.pool import KVPool


@dataclass(frozen=True, slots=True)
class Audit:
    """One size in bytes by the formula, by the arena's storage and by the device itself (None where it cannot
    be asked); the scratch block is counted.

    A device that hands out whole pages reports the size rounded up to `device_page_bytes`; 1 means that it
    is exact. `agrees`: they say the same. `resident_bytes` is another matter: the part of the arena whose
    pages are in memory now (None where that is all of it, or cannot be asked).
    """

    predicted_bytes: int
    arena_bytes: int
    device_bytes: int | None
    device_page_bytes: int = 1
    resident_bytes: int | None = None
    agrees: bool = field(init=False)

    def __post_init__(self) -> None:
        page = self.device_page_bytes
        expected = -(-self.predicted_bytes // page) * page
        agrees = self.predicted_bytes == self.arena_bytes and self.device_bytes in (None, expected)
        object.__setattr__(self, "agrees", agrees)


def audit(layout: KVLayout, pool: KVPool) -> Audit:
    """Asks the three, now. A millisecond on a CPU for an arena of 2 GiB."""
    return Audit(
        predicted_bytes=layout.arena_bytes(pool.total),
        arena_bytes=pool.nbytes,
        device_bytes=pool.device_bytes(),
        device_page_bytes=pool.device_page_bytes,
        resident_bytes=pool.resident_bytes(),
    )


def verify(found: Audit) -> None:
    """Raises `CacheError`, one line with all three numbers, unless they agree. A device that cannot be asked
    is no disagreement."""
    if found.agrees:
        return
    device = "cannot be asked" if found.device_bytes is None else f"reports {found.device_bytes:,}"
    unit = f" in pages of {found.device_page_bytes:,}" if found.device_page_bytes > 1 else ""
    raise CacheError(
        f"the KV cache is not as large as it should be: the formula gives {found.predicted_bytes:,} bytes, "
        f"the arena has {found.arena_bytes:,}, the device {device}{unit}; no number of this server can be "
        "trusted: please report this line"
    )


def summary(found: Audit) -> str:
    """An audit that agrees, in a few words for the start table."""
    if found.device_bytes is None:
        return f"{found.predicted_bytes:,} bytes by formula and arena; this device cannot be asked"
    return f"{found.predicted_bytes:,} bytes by formula, arena and device"
