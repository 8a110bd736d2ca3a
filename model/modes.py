"""Attention modes by name: which numbers of KV heads a checkpoint can run with, and how each is spelled.

A mode is its number of KV heads. It must divide the query heads, so that every KV head has as many readers,
and be a multiple of the checkpoint's own KV heads (each is repeated) or a divisor (groups are merged).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from model.errors import ModelError

_GQA = re.compile(r"gqa([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Heads:
    """A checkpoint's query heads (Hq) and its own KV heads (Hkv)."""

    q_heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Mode:
    """One attention mode; `name` is canonical: native for the checkpoint's own, else mqa, mha or gqaK."""

    name: str
    kv_heads: int
    lossy: bool  # fewer KV heads than the checkpoint has


def valid_modes(heads: Heads) -> tuple[Mode, ...]:
    """Every mode that the checkpoint can run in, from the fewest KV heads to the most."""
    counts = _divisors(heads.q_heads)
    return tuple(_mode(count, heads) for count in counts if _fault(count, heads) is None)


def parse_mode(text: str, heads: Heads) -> Mode:
    """The mode that `text` spells. Raises ModelError with what is wrong and the valid values."""
    text = text.strip()
    fixed = {"native": heads.kv_heads, "mha": heads.q_heads, "mqa": 1}
    match = _GQA.fullmatch(text)
    if text not in fixed and match is None:
        named = repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
        raise ModelError(f"attention mode {named} is not known; {_choices(heads)}")
    count = fixed[text] if match is None else int(match[1])
    fault = _fault(count, heads)
    if fault is not None:
        raise ModelError(f"attention mode {text}: {fault}; {_choices(heads)}")
    return _mode(count, heads)


def parse_modes(texts: Iterable[str], heads: Heads) -> tuple[Mode, ...]:
    """The modes in the order given. Raises ModelError for a bad one, and for one named twice."""
    found: dict[int, str] = {}
    modes = []
    for text in texts:
        mode = parse_mode(text, heads)
        if mode.kv_heads in found:
            raise ModelError(
                f"attention modes {found[mode.kv_heads]} and {text.strip()} are the same here "
                f"({counted(mode.kv_heads)}); name it once"
            )
        found[mode.kv_heads] = text.strip()
        modes.append(mode)
    return tuple(modes)


def spellings(mode: Mode, heads: Heads) -> tuple[str, ...]:
    """Every way to write the mode, the canonical one first."""
    fixed = {"native": heads.kv_heads, "mqa": 1, "mha": heads.q_heads, f"gqa{mode.kv_heads}": mode.kv_heads}
    same = [name for name, count in fixed.items() if count == mode.kv_heads]
    return tuple(dict.fromkeys([mode.name, *same]))


def _divisors(number: int) -> list[int]:
    """In order; found by their square root, as a config may claim billions of heads."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def _mode(count: int, heads: Heads) -> Mode:
    names = {heads.q_heads: "mha", 1: "mqa", heads.kv_heads: "native"}  # later ones win
    return Mode(names.get(count, f"gqa{count}"), count, count < heads.kv_heads)


def _fault(count: int, heads: Heads) -> str | None:
    """Why the checkpoint cannot have `count` KV heads."""
    if heads.q_heads % count:
        return f"{counted(count)} cannot share {heads.q_heads} query heads equally"
    if count % heads.kv_heads and heads.kv_heads % count:
        return f"{count} is neither a multiple nor a divisor of the checkpoint's {counted(heads.kv_heads)}"
    return None


def _choices(heads: Heads) -> str:
    modes = ", ".join(f"{mode.name} ({mode.kv_heads})" for mode in valid_modes(heads))
    return f"with its KV heads, the checkpoint's modes are {modes}"


def counted(heads: int) -> str:
    """`1 KV head`, `3 KV heads`."""
    return f"{heads} KV head{'' if heads == 1 else 's'}"
