"""What the soak asks: a fixed catalogue of requests that between them use everything a request may say.

Each kind is asked of each attention mode. Most answers are short, so that sequences come and go all the time;
prompts share beginnings, so that blocks are shared, copied and given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.prompts import FILLER, SUBJECTS, SYSTEM, TASKS

MODES = ("native", "mha", "mqa")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PREFIX = " ".join(FILLER)  # about a hundred tokens that many prompts begin with

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the catalogue. `exact` says that tokens are chosen by the model's own scores, so that a
    greedy one's ties can be shown by them. Penalties, biases and grammars choose by other scores."""

    name: str
    path: str
    body: Mapping[str, Any]
    exact: bool

    @property
    def whole(self) -> bool:
        """Whether it can only be asked for whole: a stream has no place for a prompt's scores."""
        return "prompt_logprobs" in self.body


def _line(number: int) -> str:
    return FILLER[number % len(FILLER)]


def _question(number: int) -> str:
    return TASKS[number % len(TASKS)].format(SUBJECTS[number % len(SUBJECTS)])


def _completion(number: int, **more: Any) -> Fields:
    return {"prompt": _line(number), "max_tokens": 16 + number % 3 * 8, "temperature": 0} | more


def _shared(number: int, **more: Any) -> Fields:
    return _completion(number, prompt=f"{PREFIX} {_line(number)}", **more)


def _chat(number: int, **more: Any) -> Fields:
    words = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _question(number)}]
    return {"messages": words, "max_tokens": 12 + number % 3 * 8, "temperature": 0} | more


def _drawn(number: int, **more: Any) -> Fields:
    """Seeded, of all tokens where nothing else is said."""
    return {"temperature": 0.8, "seed": 1000 + number} | more


def _bound(schema: Any) -> Fields:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "whole": {"type": "boolean"},
    },
    "required": ["name", "count", "whole"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3}

# Each makes the body of one kind; its name, and whether its tokens are exact (see Ask).
KINDS: tuple[tuple[str, bool, Callable[[int], Fields]], ...] = (
    ("greedy", True, lambda i: _completion(i)),
    ("greedy chat", True, lambda i: _chat(i)),
    ("shared prefix", True, lambda i: _shared(i)),
    ("long prompt", True, lambda i: _completion(i, prompt=f"{PREFIX} {PREFIX} {_line(i)}", max_tokens=80)),
    ("two prompts", True, lambda i: _completion(i, prompt=[_line(i), _line(i + 1)])),
    ("prompt of ids", True, lambda i: _completion(i, prompt=[5 + i, 60, 61, 62, 63, 64, 65])),
    ("seed", True, lambda i: _completion(i, **_drawn(i, max_tokens=80))),
    ("seed, top_k", True, lambda i: _chat(i, **_drawn(i, top_k=40))),
    ("seed, top_p, top_k", True, lambda i: _chat(i, **_drawn(i, top_p=0.9, top_k=200))),
    ("seed, min_p", True, lambda i: _shared(i, **_drawn(i, temperature=1.2, min_p=0.05))),
    ("three choices", True, lambda i: _chat(i, **_drawn(i, n=3))),
    ("four choices of a shared prefix", True, lambda i: _shared(i, **_drawn(i, temperature=1, n=4))),
    ("stop strings", True, lambda i: _shared(i, stop=[" the", "\n\n"], max_tokens=32)),
    ("stop strings, shown", True, lambda i: _chat(
        i, **_drawn(i, stop=["e", "a t"], min_tokens=4, include_stop_str_in_output=True))),
    ("no early end", True, lambda i: _chat(i, ignore_eos=True, max_tokens=80)),
    ("penalties", False, lambda i: _completion(
        i, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=40)),
    ("bias", False, lambda i: _completion(i, **_drawn(i, logit_bias={"10": -100, "20": 3, "30": 1.5}))),
    ("scores", True, lambda i: _completion(i, logprobs=3)),
    ("scores of a chat", True, lambda i: _chat(i, **_drawn(i, logprobs=True, top_logprobs=2))),
    ("echo", True, lambda i: _shared(i, echo=True, max_tokens=8)),
    ("echo with scores", True, lambda i: _completion(i, echo=True, logprobs=1, max_tokens=8)),
    ("scores of a prompt", True, lambda i: _completion(i, prompt_logprobs=1)),
    ("JSON schema", False, lambda i: _chat(i, max_tokens=48, **_bound(CARD))),
    ("JSON schema, two choices", False, lambda i: _chat(i, **_drawn(i, n=2, max_tokens=48, **_bound(LIST)))),
    ("regular expression", False, lambda i: _completion(
        i, **_drawn(i, structured_outputs={"regex": "[a-f]{3}-[0-9]{2,4}"}))),
    ("choice", False, lambda i: _completion(i, structured_outputs={"choice": ["yes", "no", "perhaps"]})),
)  # fmt: skip


def catalogue(model: str) -> list[Ask]:
    """Every kind in every mode of `model`, as the server names it; always the same."""
    asks = []
    for number, (name, exact, make) in enumerate(KINDS):
        for offset, mode in enumerate(MODES):
            fields = make(number + 7 * offset)
            path = CHAT if "messages" in fields else COMPLETIONS
            asks.append(Ask(f"{name}, {mode}", path, {"model": f"{model}@{mode}", **fields}, exact))
    return asks
