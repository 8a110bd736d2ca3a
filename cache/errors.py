"""What the cache raises."""

from __future__ import annotations


class CacheError(RuntimeError):
    """A caller broke the cache's rules, or `check()` found its books wrong; the message names the rule."""
