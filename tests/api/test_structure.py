"""How much a JSON text holds is known before it is parsed, whatever stands in its strings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from server.api import structure as structures
from server.api.body import parse_object
from server.api.errors import ApiError
from server.api.structure import MAX_OBJECTS, MAX_VALUES, Structure, structure
from tests.api.test_bodies import check_error
from tests.support.api import serving

TEXTS = (",", "[{:,", 'a"b', "\\", '\\"', "\\\\", '"', "\n,", "é,🦙", "")


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5 if depth else 3)
    if kind == 3:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice(TEXTS) + str(i): random_value(rng, depth - 1) for i in range(rng.randrange(4))}
    return rng.choice([rng.choice(TEXTS) + rng.choice(TEXTS), 5, 1.5, None])


def counted(value: Any) -> tuple[int, int]:
    """Commas, and lists, objects and names, by walking what was parsed."""
    if not isinstance(value, (dict, list)):
        return 0, 0
    parts = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    commas = max(len(value) - 1, 0) + sum(part[0] for part in parts)
    return commas, 1 + (len(value) if isinstance(value, dict) else 0) + sum(part[1] for part in parts)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_counts_are_exact(monkeypatch: pytest.MonkeyPatch, ascii_only: bool) -> None:
    """With limits of 0 whatever holds anything is counted closely."""
    monkeypatch.setattr(structures, "MAX_VALUES", 0)
    monkeypatch.setattr(structures, "MAX_OBJECTS", 0)
    rng = random.Random(0)
    for _ in range(500):
        value = random_value(rng, 4)
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert structure(body) == Structure(*counted(value)), body


def test_text_is_no_structure() -> None:
    text = ',[{:\\"' * MAX_VALUES
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("item", "most"),
    [("1", MAX_VALUES), ('""', MAX_VALUES), ("[]", MAX_OBJECTS - 3), ('{"":[]}', (MAX_OBJECTS - 3) // 3)],
)
def test_the_most_that_is_parsed(item: str, most: int) -> None:
    """`{"x":[...]}` is two more of the dear ones, and a name."""
    parse_object(f'{{"x":[{",".join([item] * most)}]}}'.encode())
    with pytest.raises(ApiError) as caught:
        parse_object(f'{{"x":[{",".join([item] * (most + 2))}]}}'.encode())
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
    assert str(MAX_VALUES) in caught.value.message
    assert str(MAX_OBJECTS) in caught.value.message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_of_too_many_things(words: Path, path: str) -> None:
    body = b'{"prompt":[' + b"[]," * MAX_OBJECTS + b"[]]}"
    async with serving(words) as api:
        reply = await api.http.post(path, content=body, headers={"content-type": "application/json"})
        assert check_error(reply, 413)["code"] == "body_too_large"
