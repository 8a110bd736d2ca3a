"""Random JSON schemas that bound the answer: every text that fits one is short."""

from __future__ import annotations

from random import Random
from typing import Any

_PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{2}-[0-9]{1,3}$", "^(yes|no|maybe)$", "^#[0-9a-f]{4}$")
_WORDS = ("red", "green", "blue", "naïve", 'a "b"', "\\", "x y", "日本")
_NAMES = ("name", "age", "id", "tags", "größe", "a b", "x")


def random_schema(rng: Random) -> dict[str, Any]:
    """An object with `$defs` that some of its parts refer to."""
    defs = {f"d{index}": _leaf(rng) for index in range(2)}
    return {"$defs": defs, **_object(rng, 2)}


def _any(rng: Random, depth: int) -> dict[str, Any]:
    kinds = [_leaf, _leaf, _leaf]
    if depth > 0:
        deeper = depth - 1
        kinds += [
            lambda r: _object(r, deeper),
            lambda r: _array(r, deeper),
            lambda r: _one_of_several(r, deeper),
        ]
    return rng.choice(kinds)(rng)


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    properties = {name: _any(rng, depth) for name in names}
    if rng.random() < 0.4:
        properties[names[0]] = {"$ref": f"#/$defs/d{rng.randrange(2)}"}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _one_of_several(rng: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _leaf(rng: Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    match rng.randrange(8):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 1, 7, 1000))}
        case 1:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12, "multipleOf": 3}
        case 2:
            return {"type": "number", "minimum": low / 4, "maximum": low / 4 + 2.5}
        case 3:
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}
        case 4:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 5:
            return {"enum": rng.sample([*_WORDS, 1, None, True, {"k": [1, "v"]}], 3)}
        case 6:
            return {"const": rng.choice([*_WORDS, 7, False, [1, 2], {"a": None}])}
        case _:
            return {"type": rng.choice(["boolean", "null"])}
