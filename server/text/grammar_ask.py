"""`response_format` and `structured_outputs` of a request, checked as far as it goes without compiling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from server.text.checks import is_list, refuse, text
from server.text.errors import RequestError, shown
from server.text.grammar_build import MAX_AT_LEAST
from server.text.grammar_schema import DATA, NAMED, told

MAX_BYTES = 64 * 2**10
"""Of a schema, a pattern or a grammar, as UTF-8."""
MAX_DEPTH = 64
INVALID = "invalid_grammar"

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# What else vLLM has there, with the values that ask for nothing: its defaults, and what is so here anyway.
_UNSUPPORTED: Mapping[str, tuple[bool, ...]] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False, True),
    "disable_fallback": (False, True),
    "disable_additional_properties": (False,),
}
_AT_LEAST = ("minItems", "minLength", "minProperties")


@dataclass(frozen=True, slots=True)
class GrammarAsk:
    """What an answer must look like: `kind` is json (a schema), regex, choice (a JSON list) or grammar, and
    `source` its text; `param` is what errors call it."""

    param: str
    kind: str
    source: str


def read_grammar(response_format: Any, structured_outputs: Any) -> GrammarAsk | None:
    """None if the answer is free. Raises RequestError."""
    formatted = None if response_format is None else _response_format(response_format)
    structured = None if structured_outputs is None else _structured_outputs(structured_outputs)
    if formatted is not None and structured is not None:
        raise RequestError(
            "structured_outputs: not allowed beside a response_format; send one of them.",
            "structured_outputs",
            "invalid_value",
        )
    return formatted or structured


def _response_format(value: Any) -> GrammarAsk | None:
    param = "response_format"
    match _object(param, value).get("type"):
        case "text":
            return None
        case "json_object":
            _no_schema_beside(value)
            return _any_object(param)
        case "json_schema":
            pass
        case other:
            raise refuse(f"{param}.type", other, "must be text, json_object or json_schema")
    param = "response_format.json_schema"
    inner = _object(param, value.get("json_schema"))
    if inner.get("name") is not None:
        text(f"{param}.name", inner["name"])
    if inner.get("strict") is not None and not isinstance(inner["strict"], bool):
        raise refuse(f"{param}.strict", inner["strict"], "must be true or false")
    return _schema(f"{param}.schema", inner.get("schema"))


def _structured_outputs(value: Any) -> GrammarAsk | None:
    param = "structured_outputs"
    given = {name: entry for name, entry in _object(param, value).items() if entry is not None}
    for name, entry in given.items():
        if name in _UNSUPPORTED and not any(entry is harmless for harmless in _UNSUPPORTED[name]):
            path = f"{param}.{name}"
            raise RequestError(
                f"{path}: not supported by this server; leave it out.", path, "unsupported_parameter"
            )
    kinds = [name for name in _KINDS if name in given]
    if len(kinds) != 1:
        raise refuse(param, value, f"must have exactly one of {', '.join(_KINDS)}")
    path = f"{param}.{kinds[0]}"
    asked = given[kinds[0]]
    match kinds[0]:
        case "json":
            return _schema(path, asked)
        case "choice":
            return _choice(path, asked)
        case "json_object":
            if asked is not True:
                raise refuse(path, asked, "must be true")
            return _any_object(path)
        case kind:
            source = text(path, asked)
            if not (source if kind == "regex" else source.strip()):
                raise RequestError(f"{path}: must not be empty.", path, INVALID)
            return _bounded(path, kind, source)


def _no_schema_beside(value: Mapping[str, Any]) -> None:
    """Some servers take a schema for `json_object`; to leave it out of account would be another answer."""
    for name in ("schema", "json_schema"):
        if value.get(name) not in (None, {}):
            path = f"response_format.{name}"
            raise RequestError(
                f"{path}: not allowed with the type json_object; a schema goes with the type json_schema, as "
                '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}.',
                path,
                INVALID,
            )


def _any_object(param: str) -> GrammarAsk:
    return GrammarAsk(param, "json", '{"type": "object"}')


def _object(param: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(param, value, "must be an object", "invalid_type")
    return value


def _bounded(param: str, kind: str, source: str) -> GrammarAsk:
    if len(source.encode()) > MAX_BYTES:
        raise refuse(param, len(source.encode()), f"at most {MAX_BYTES} bytes are allowed", INVALID)
    return GrammarAsk(param, kind, source)


def _choice(param: str, value: Any) -> GrammarAsk:
    if not is_list(value) or not value:
        raise refuse(param, value, "must be a list of at least one string", INVALID)
    if len(value) > MAX_BYTES:
        message = f"{param}: {len(value)} strings have more than {MAX_BYTES} bytes, the most allowed."
        raise RequestError(message, param, INVALID)
    for index, alternative in enumerate(value):
        if not text(f"{param}[{index}]", alternative):
            raise RequestError(f"{param}[{index}]: an alternative must not be empty.", param, INVALID)
    return _bounded(param, "choice", json.dumps(list(value), ensure_ascii=False))


def _schema(param: str, value: Any) -> GrammarAsk:
    """A schema, as an object or as its text."""
    if isinstance(value, str):
        if len(value) > MAX_BYTES:
            raise refuse(param, len(value), f"at most {MAX_BYTES} bytes are allowed", INVALID)
        value = _parsed(param, value)
    if not isinstance(value, Mapping):
        raise refuse(param, value, "must be a JSON schema (an object)", INVALID)
    if "x-guidance" in value:
        raise RequestError(f"{param}.x-guidance: not supported by this server.", param, INVALID)
    _bounded(param, "json", json.dumps(value))  # before it is walked through, which would take seconds
    _check_schema(param, value)
    try:
        value = told(value)
    except ValueError as error:
        raise RequestError(f"{param}: {error}.", param, INVALID) from None
    return _bounded(param, "json", json.dumps(value, sort_keys=False))


def _parsed(param: str, source: str) -> Any:
    try:
        return json.loads(source, parse_constant=_no_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except _NoNumber as error:
        why = f"{error} is not a number it can hold"
    except RecursionError:
        why = "nested too deeply"
    except ValueError:  # Python's own limit on the digits of an integer
        why = "a number has too many digits"
    raise RequestError(f"{param}: not JSON ({why}).", param, INVALID)


class _NoNumber(ValueError):
    """The words of the text that stand for one."""


def _no_number(name: str) -> NoReturn:
    raise _NoNumber(name)


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise _NoNumber(digits[:30])
    return value


def _check_schema(param: str, schema: Mapping[str, Any]) -> None:
    """Refuses what is nested too deep, and lower bounds that no answer could meet."""
    stack: list[tuple[Any, int, bool]] = [(schema, 1, True)]  # value, depth, whether it is a schema
    while stack:
        value, depth, is_schema = stack.pop()
        if depth > MAX_DEPTH and isinstance(value, Mapping | list):
            raise RequestError(f"{param}: nested more than {MAX_DEPTH} deep.", param, INVALID)
        if isinstance(value, Mapping):
            for name, entry in value.items():
                if is_schema and name in DATA:
                    continue
                if is_schema and name in _AT_LEAST:
                    _check_bound(param, name, entry)
                stack.append((entry, depth + 1, not (is_schema and name in NAMED)))
        elif isinstance(value, list):
            stack.extend((entry, depth + 1, True) for entry in value)


def _check_bound(param: str, name: str, bound: Any) -> None:
    if isinstance(bound, int | float) and bound > MAX_AT_LEAST:
        raise RequestError(
            f"{param}: {name} must be at most {MAX_AT_LEAST}, got {shown(bound)}: no answer is so long.",
            param,
            INVALID,
        )
