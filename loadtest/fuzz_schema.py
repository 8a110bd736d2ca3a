"""Requests that schemathesis makes up from the server's own OpenAPI document: right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from loadtest.fuzz_wire import Call

HOST = "http://127.0.0.1"
_SET_BY_US = {
    "x-schemathesis-testcaseid", "content-length", "connection", "accept-encoding", "transfer-encoding",
}  # fmt: skip


def schema_calls(document: dict[str, Any], start: int, count: int) -> list[Call]:
    """At most about `count` calls, the same for the same `start`: every edge that schemathesis lists for each
    operation, then random ones, those with bodies most."""
    schema = schemathesis.openapi.from_dict(document)
    found: list[Any] = list(schema.get_all_operations())
    operations = [operation.ok() for operation in found]  # our own document has none that is wrong
    calls = [call for operation in operations for call in _edges(schema, operation)]
    if len(calls) > count:
        return calls[:: -(-len(calls) // count)]
    bodies = [operation for operation in operations if operation.method.lower() == "post"]
    each = -(-(count - len(calls)) // (2 * len(bodies) + 1))
    for operation in operations:
        wanted = each if operation in bodies else max(1, each // len(operations))
        for mode in GenerationMode:
            calls += _random(operation, mode, start, wanted)
    return calls


def _edges(schema: Any, operation: Any) -> Iterator[Call]:
    """One value of each kind for each parameter and field, missing ones, and methods that are not there."""
    cases = schema.iter_coverage_cases(
        operation, generation_modes=list(GenerationMode), generation_config=schema.config.generation
    )
    for case in cases:
        call = _call(case, f"{operation.label}, an edge")
        if call is not None:
            yield call


def _random(operation: Any, mode: GenerationMode, start: int, count: int) -> list[Call]:
    calls: list[Call] = []
    try:
        strategy = operation.as_strategy(generation_mode=mode)

        def take(case: Any) -> None:
            call = _call(case, f"{operation.label}, {mode.value}")
            if call is not None:
                calls.append(call)

        steady = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        steady(seed(start)(given(case=strategy)(take)))()
    except Unsatisfiable:
        return calls  # nothing can be wrong with a route that takes nothing
    return calls[:count]


def _call(case: Any, note: str) -> Call | None:
    """The case as bytes; None for what `requests` itself refuses to send."""
    try:
        words = {
            name: value
            for name, value in case.as_transport_kwargs(base_url=HOST).items()
            if name in ("method", "url", "headers", "params", "data", "json", "cookies", "files")
        }
        ready = requests.Request(**words).prepare()
        body: Any = ready.body if ready.body is not None else b""
        body = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    except (ValueError, TypeError, requests.RequestException, json.JSONDecodeError):
        return None
    headers = tuple(
        (_text(name), _text(value)) for name, value in ready.headers.items() if name.lower() not in _SET_BY_US
    )
    return Call("schemathesis", note, ready.method or "GET", str(ready.path_url), headers, body)


def _text(value: str | bytes) -> str:
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    return text.replace("\r", "").replace("\n", "")
