"""`response_format` and `structured_outputs`: what each spelling asks for, and which are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.text.errors import RequestError
from server.text.grammar_ask import MAX_BYTES, GrammarAsk, read_grammar

SCHEMA = {"type": "object", "properties": {"minItems": {"type": "integer"}}}
ANY = '{"type": "object"}'
WRAPPED = {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"}


@pytest.mark.parametrize(
    ("format", "structured", "expected"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, ("response_format", "json", ANY)),
        ({"type": "json_object", "schema": {}, "json_schema": None}, None, ("response_format", "json", ANY)),
        (
            {"type": "json_schema", "json_schema": WRAPPED},
            None,
            ("response_format.json_schema.schema", "json", json.dumps(SCHEMA)),
        ),
        (None, {"json": SCHEMA}, ("structured_outputs.json", "json", json.dumps(SCHEMA))),
        (None, {"json": json.dumps(SCHEMA)}, ("structured_outputs.json", "json", json.dumps(SCHEMA))),
        (None, {"regex": "a+", "json": None}, ("structured_outputs.regex", "regex", "a+")),
        (None, {"choice": ["é", "b"]}, ("structured_outputs.choice", "choice", '["é", "b"]')),
        (None, {"grammar": "start: X"}, ("structured_outputs.grammar", "grammar", "start: X")),
        (None, {"json_object": True}, ("structured_outputs.json_object", "json", ANY)),
        ({"type": "text"}, {"regex": "a"}, ("structured_outputs.regex", "regex", "a")),
        (None, {"regex": "a", "disable_any_whitespace": True, "whitespace_pattern": None},
         ("structured_outputs.regex", "regex", "a")),
        (None, {"regex": "a", "disable_any_whitespace": False, "disable_fallback": False, "foo": 1,
                "disable_additional_properties": False, "structural_tag": None},  # vLLM's defaults
         ("structured_outputs.regex", "regex", "a")),
    ],
)  # fmt: skip
def test_what_is_asked_for(format: Any, structured: Any, expected: tuple[str, str, str] | None) -> None:
    assert read_grammar(format, structured) == (None if expected is None else GrammarAsk(*expected))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("structured", "param", "says"),
    [
        ({}, "", "exactly one of json, regex, choice, grammar, json_object"),
        ({"json": None}, "", "exactly one"),
        ({"json": {}, "regex": "a"}, "", "exactly one"),
        ({"regex": "a", "structural_tag": "x"}, ".structural_tag", "not supported"),
        ({"json": {}, "whitespace_pattern": " *"}, ".whitespace_pattern", "not supported"),
        ({"json": {}, "disable_any_whitespace": 1}, ".disable_any_whitespace", "not supported"),
        ({"json": {}, "disable_additional_properties": True}, ".disable_additional_properties", "not sup"),
        ({"foo": 1}, "", "exactly one of json"),
        ({"regex": 3}, ".regex", "must be a string"),
        ({"regex": ""}, ".regex", "must not be empty"),
        ({"grammar": " \n"}, ".grammar", "must not be empty"),
        ({"regex": "\ud800"}, ".regex", "surrogate"),
        ({"json_object": False}, ".json_object", "must be true"),
        ({"choice": []}, ".choice", "at least one"),
        ({"choice": "yes"}, ".choice", "must be a list"),
        ({"choice": ["a", ""]}, ".choice", "choice[1]: an alternative must not be empty"),
        ({"choice": ["a", 3]}, ".choice[1]", "must be a string"),
        ({"choice": [f"c{i}" for i in range(100_000)]}, ".choice", str(MAX_BYTES)),
        ({"regex": "a" * (MAX_BYTES + 1)}, ".regex", str(MAX_BYTES)),
        ({"grammar": "é" * (MAX_BYTES // 2 + 1)}, ".grammar", str(MAX_BYTES)),
        ({"json": {"const": "a" * MAX_BYTES}}, ".json", str(MAX_BYTES)),
        ({"json": [1]}, ".json", "must be a JSON schema"),
        ({"json": True}, ".json", "must be a JSON schema"),
        ({"json": "{"}, ".json", "not JSON"),
        ({"json": "[" * 50_000}, ".json", "not JSON (nested too deeply)"),
        ({"json": '{"minimum": NaN}'}, ".json", "not JSON (NaN is not a number"),
        ({"json": '{"minimum": 1e999}'}, ".json", "not JSON (1e999 is not a number"),
        ({"json": f'{{"minimum": {"9" * 5000}}}'}, ".json", "not JSON (a number has too many digits)"),
        ({"json": '"text"'}, ".json", "must be a JSON schema"),
        ({"json": nested(65)}, ".json", "64 deep"),
        ({"json": json.dumps(nested(65))}, ".json", "64 deep"),
        ({"json": {"x-guidance": {"lenient": True}}}, ".json", "x-guidance"),
        ({"json": {"minItems": 10**9}}, ".json", "minItems must be at most 100000, got 1000000000"),
        ({"json": {"properties": {"a": {"minLength": 10**40}}}}, ".json", "minLength must be at most"),
        ({"json": {"$defs": {"a": {"anyOf": [{"minProperties": 1e6}]}}}}, ".json", "minProperties must be"),
    ],
)  # fmt: skip
def test_what_is_refused(structured: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_grammar(None, structured)
    assert (caught.value.param, caught.value.status) == (f"structured_outputs{param}", 400)
    assert says in caught.value.message and len(caught.value.message) < 300


@pytest.mark.parametrize("structured", [{"json": {"items": [0] * 2**19}}, {"choice": ["ab"] * 2**19}])
def test_what_is_far_too_large_is_refused_at_once(structured: Any) -> None:
    """A million values are walked through in a second and more, in which nobody else is answered."""
    quick = min(timed(lambda: json.dumps(structured)) for _ in range(3))
    took = min(timed(lambda: refused(structured)) for _ in range(3))
    assert took < 3 * quick


def refused(structured: Any) -> None:
    with pytest.raises(RequestError, match=str(MAX_BYTES)):
        read_grammar(None, structured)


def timed(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": None}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_object", "json_schema": WRAPPED}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": WRAPPED | {"name": 3}}, "response_format.json_schema.name"),
        (
            {"type": "json_schema", "json_schema": WRAPPED | {"strict": 1}},
            "response_format.json_schema.strict",
        ),
    ],
)
def test_response_formats_that_are_refused(format: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_grammar(format, None)
    assert caught.value.param == param


def test_only_one_of_the_two() -> None:
    with pytest.raises(RequestError, match="not allowed beside a response_format"):
        read_grammar({"type": "json_object"}, {"regex": "a"})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"minItems": {"type": "integer"}}, "required": ["minItems"]},
        {"const": {"minItems": 10**9}},
        {"enum": [{"minLength": 10**9}], "default": {"minItems": 10**9}},
        {"maxLength": 2**31, "maxItems": 10**9},
        nested(64),
    ],
)
def test_names_data_and_upper_bounds_are_no_lower_bounds(schema: dict[str, Any]) -> None:
    assert read_grammar(None, {"json": schema}) is not None
