"""Values of the fields that take a whole language or a table: schemas, expressions, grammars, biases, scores.

Each is (field, its value as JSON text). Some are right, most are not, and some are made to take forever.
"""

from __future__ import annotations

import json
from typing import Any

_DEEP: Any = {"type": "string"}
for _ in range(30):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}, "required": ["a"]}

_SCHEMAS: tuple[Any, ...] = (
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"enum": ["yes", "no"]},
    {"type": "boolean"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"$ref": "#/nowhere"},
    {"type": "nonsense"},
    {"type": 7},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "^(a+)+$"},
    {"type": "string", "minLength": 10, "maxLength": 2},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "minItems": 10**6, "items": {"type": "null"}},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "number", "multipleOf": 1e-300},
    {"enum": []},
    {"enum": [f"value {i}" for i in range(3000)]},
    {"anyOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    {"type": "object", "required": ["x"], "properties": {}, "additionalProperties": False},
    _DEEP,
    *(True, False, None, [], "x"),
)
_REGEXES = (
    "[a-c]{2,4}", "yes|no", "(", "[", "(a+)+b", "(a|a)*{2}", "a{1,100000}", "(a{1,300}){1,300}", "(?=a)b",
    "\\1", "(?P<x>a)",
    "", ".*", "\\p{L}+", "[^\\x00-\\uffff]", "^$", "$^", "\\", "a**", "(?i)a", "\ud83d\ude00+", "[z-a]",
    "((((((((((a))))))))))",
)  # fmt: skip
_GRAMMARS = (
    'start: "a" | "b"', "start: start", 'start: x\nx: y\ny: x', "", "root ::= [a-z]+", 'start: "a"{1,100000}',
    "start: /(/",
    'start: "' + "a" * 5000 + '"', "%import common.WORD", "start: undefined", "\x00",
    'start: ("a" | "a")* start',
)  # fmt: skip
_CHOICES: tuple[Any, ...] = (
    ["yes", "no"], [], [""], ["a", 1], "yes", [f"c{i}" for i in range(2000)], ["a", "a"], [["a"]], None,
)  # fmt: skip
_FORMATS: tuple[Any, ...] = (
    {"type": "text"}, {"type": "json_object"}, {"type": "nonsense"}, {"type": None},
    {"type": ["json_object"]}, {}, [], "json",
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": None},
    {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
    {"type": "json_object", "json_schema": {"schema": 1}},
)  # fmt: skip
_BIASES: tuple[Any, ...] = (
    {"5": 100}, {"5": -100}, {"5": 101}, {"-1": 1}, {"384": 1}, {"999999999999999999999": 1}, {"5": None},
    {"5": "1"},
    {"5.0": 1}, {" 5": 1}, {"05": 1}, {"": 1}, {"x": 1}, {str(i): -100 for i in range(384)},
    {str(i): 1 for i in range(2000)},
    [[5, 1]], {"٥": 1},
)  # fmt: skip

_VALUES: tuple[tuple[str, Any], ...] = (
    *(
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": one}})
        for one in _SCHEMAS
    ),
    *(("response_format", one) for one in _FORMATS),
    *(("structured_outputs", {"json": one}) for one in _SCHEMAS),
    *(("structured_outputs", {"regex": one}) for one in _REGEXES),
    *(("structured_outputs", {"grammar": one}) for one in _GRAMMARS),
    *(("structured_outputs", {"choice": one}) for one in _CHOICES),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": '{"type": "integer"}'}),
    *(("logit_bias", one) for one in _BIASES),
    *(("logprobs", one) for one in (0, 1, 5, 20, 21, -1, 2**31, True, False, 1.5, "1")),
    *(("top_logprobs", one) for one in (0, 20, 21, -1)),
    *(("prompt_logprobs", one) for one in (0, 1, 20, 21, -1, 2**40)),
    *(("repetition_penalty", one) for one in (0, 1e-30, 1e30, 0.5, 2, -1)),
    *(("presence_penalty", one) for one in (-2, 2, 2.01, -2.01)),
    *(("frequency_penalty", one) for one in (-2, 2, 2.01, 1e300)),
    *(("stop_token_ids", one) for one in ([0], [383], [384], [-1], list(range(384)), [2**70])),
    *(("stop", one) for one in (["a"] * 16, ["a"] * 17, [""], "", ["\u0000"], ["<|im_end|>"])),
    *(("priority", one) for one in (-(2**31), 2**31 - 1, 2**31, 1.5, "high")),
    *(("n", one) for one in (0, 1, 20, 128, 129, -1, 2**63)),
    *(("max_tokens", one) for one in (0, 1, 2**31, 2**63, -1)),
    *(("min_tokens", one) for one in (0, 8, 9, -1, 2**63)),
)

HOSTILE: tuple[tuple[str, str], ...] = tuple((name, json.dumps(value)) for name, value in _VALUES)
