"""What the grammar library would read otherwise than a schema says: told so that it is right, or refused.

The library is asked about whole texts, over a vocabulary of bytes; Python's `re` and arithmetic say what is
right.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from server.text.errors import RequestError
from server.text.grammar_ask import read_grammar
from server.text.grammar_build import GrammarError, make_matcher, make_tokenizer, to_lark
from server.text.grammar_schema import told, without_nul

BYTES = make_tokenizer([bytes([byte]) for byte in range(256)])


@pytest.mark.parametrize("named", [r"\p{Cc}", r"\pC", r"[[:cntrl:]]", r"[a\p{Control}]", r"\P{Cc}"])
def test_control_characters_by_name_are_refused(named: str) -> None:
    for schema in ({"type": "string", "pattern": f"^{named}$"}, {"patternProperties": {named: {}}}):
        with pytest.raises(RequestError, match="is not supported; write") as refused:
            read_grammar(None, {"json": schema})
        assert refused.value.code == "invalid_grammar"
    assert fits({"type": "string", "pattern": r"^\\pC$"}, r'"\\pC"')  # a backslash and two letters


def fits(schema: dict[str, Any], text: str) -> bool:
    """Whether an answer that fits `schema` may be `text`."""
    ask = read_grammar(None, {"json": schema})
    assert ask is not None
    matcher = make_matcher(BYTES, to_lark(ask.kind, ask.source))
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]$',
        r'^[^"\\]$',
        r"^[^\\]$",
        r'^[^/\\:*?"<>|]$',
        r'^[^\n"]$',
        r'^[^\s"]$',
        r"^[\x00-!]$",
        r"^[\x00-\x1f]$",
        r"^[\u0000-!#-\[\]-\uffff]$",
        r'^(?:[^"]|x)$',
        r'^\\?[^^"]$',
        r'^[^\]"]$',
        r"^[^-a]$",
        r'^[^a"-]$',
        r'^[\^"]$',
        r"^\[\^$",
        r"^\W$",
        r"^.$",
        r"^[\s\S]$",
    ],
)
def test_classes_of_characters_are_those_of_the_pattern(pattern: str) -> None:
    """Quote and backslash too, which JSON escapes; U+0000 alone may be missing."""
    schema = {"type": "string", "pattern": pattern}
    named = {
        "type": "object",
        "patternProperties": {pattern: {"type": "null"}},
        "additionalProperties": False,
    }
    for text in (
        '"',
        "\\",
        "\n",
        "\t",
        "\x01",
        "\x02",
        "a",
        "-",
        "^",
        "]",
        "1",
        "é",
        "🦙",
        "[^",
        '\\"',
    ):
        right = re.search(pattern, text, re.ASCII) is not None  # as ECMAScript reads \W
        assert fits(schema, json.dumps(text, ensure_ascii=False)) is right, text
        assert fits(named, f"{{{json.dumps(text, ensure_ascii=False)}: null}}") is right, text


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("[a]", "[a]"),
        ("[^a]", r"[^[\x00]a]"),
        ("[^]a]", r"[^[\x00]\]a]"),
        (r"\[^a]", r"\[^a]"),
        (r"\\[^a]", r"\\[^[\x00]a]"),
        (r"[\x00-a]", r"[\x01-a]"),
        (r"[\\x00-a]", r"[\\x00-a]"),
        ("\\", "\\"),
        ("[", "["),
    ],
)
def test_how_patterns_are_told(pattern: str, written: str) -> None:
    assert without_nul(pattern) == written


BIG = 2**53 + 1  # no float


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": BIG},
        {"maximum": BIG + 2},
        {"exclusiveMinimum": BIG},
        {"exclusiveMaximum": BIG},
        {"minimum": -BIG},
        {"maximum": -BIG},
        {"maximum": 2**63 - 1},
        {"maximum": 2**64 - 1},
        {"minimum": -(2**63)},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": -(10**30), "maximum": 10**30},
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_let_nothing_in_that_is_beyond_them(kind: str, bounds: dict[str, int]) -> None:
    schema = {"type": kind, **bounds}
    low = max(bounds.get("minimum", -(10**40)), bounds.get("exclusiveMinimum", -(10**40)) + 1)
    high = min(bounds.get("maximum", 10**40), bounds.get("exclusiveMaximum", 10**40) - 1)
    near = {bound + step for bound in bounds.values() for step in range(-3, 4)}
    for number in near | {2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1}:
        if not low <= number <= high:
            assert not fits(schema, str(number)), number
    middle = 2**54 if min(bounds.values()) > 0 else -(2**54)
    assert fits(schema, str(middle if low <= middle <= high else 0))


def refused(schema: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        read_grammar(None, {"json": schema})
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "structured_outputs.json")
    return caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2**63},
        {"type": "integer", "minimum": 1e30},
        {"properties": {"a": {"items": {"exclusiveMaximum": -(10**20)}}}},
    ],
)
def test_bounds_that_nothing_could_meet(schema: dict[str, Any]) -> None:
    assert "64 bits" in refused(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": BIG},
        {"enum": ["a", 2**64 + 1]},
        {"properties": {"const": {"const": {"a": [1, -BIG]}}}},
        {"anyOf": [{"type": "null"}, {"enum": [1234567890123456789]}]},
    ],
)
def test_whole_numbers_that_would_become_others(schema: dict[str, Any]) -> None:
    assert "2^53" in refused(schema)


def test_numbers_that_are_kept() -> None:
    for number in (2**53, -(2**53), 0, 0.1, 1e-7, True):
        assert told({"const": number, "minimum": number}) == {"const": number, "minimum": number}
        if not isinstance(number, float):
            assert fits({"const": number}, json.dumps(number))


def test_unique_items_false_asks_for_nothing() -> None:
    of = {"type": "array", "items": {"type": "null"}}
    assert fits({**of, "uniqueItems": False}, "[null, null]")
    with pytest.raises(GrammarError, match="uniqueItems"):
        fits({**of, "uniqueItems": True}, "[]")
    assert told({"properties": {"uniqueItems": False}}) == {"properties": {"uniqueItems": False}}


def test_names_and_data_are_no_keywords() -> None:
    schema = {
        "properties": {"pattern": {"pattern": "[^a]"}, "minimum": {"const": {"pattern": "[^a]"}}},
        "default": {"minimum": 2**60},
        "required": ["pattern"],
        "anyOf": [{"patternProperties": {"[^b]": True}}],
    }
    right = json.loads(json.dumps(schema))
    right["properties"]["pattern"]["pattern"] = r"[^[\x00]a]"
    right["anyOf"][0]["patternProperties"] = {r"[^[\x00]b]": True}
    assert told(schema) == right
