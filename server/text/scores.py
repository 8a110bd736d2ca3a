"""Which log-probabilities an answer tells, checked: of the tokens it is made of, and of the prompt's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.text.checks import flag, integer, refuse
from server.text.errors import RequestError

MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 20
MAX_SCORES = 2**20
"""Log-probabilities in one answer at most; so many are some 100 MB of JSON."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How many of the likeliest tokens are told beside each token: of the answer, and in the field
    `prompt_logprobs`; None tells nothing, 0 the token alone. `name` is the field that asked for the first."""

    output: int | None = None
    prompt: int | None = None
    name: str = "logprobs"

    def of_prompt(self, echo: bool) -> int | None:
        """How many the engine must tell of each prompt token: an echoed prompt is a part of the answer."""
        wanted = [count for count in (self.prompt, self.output if echo else None) if count is not None]
        return max(wanted, default=None)

    def check_size(self, prompt_tokens: int, n: int, choices: int, max_tokens: int, echo: bool) -> None:
        """Raises RequestError if the answer could hold more than MAX_SCORES. `prompt_tokens` are those of all
        prompts, `max_tokens` those of a choice."""
        prompt, output = self.prompt, self.output
        told = 0 if prompt is None else prompt_tokens * n * (prompt + 1)
        if output is not None:
            told += (choices * max_tokens + (prompt_tokens * n if echo else 0)) * (output + 1)
        if told > MAX_SCORES:
            name = self.name if output is not None else "prompt_logprobs"
            raise RequestError(
                f"{name}: the answer could hold {told} log-probabilities; the limit is {MAX_SCORES}. Ask for "
                "fewer beside each token, fewer choices, or fewer tokens.",
                name,
            )


def completion_scores(logprobs: Any, prompt_logprobs: Any) -> Scores:
    """Of /v1/completions, where `logprobs` is a number. Raises RequestError."""
    output = None if logprobs is None else integer("logprobs", logprobs, 0, MAX_COMPLETION_LOGPROBS)
    return Scores(output, _prompt(prompt_logprobs))


def chat_scores(logprobs: Any, top_logprobs: Any, prompt_logprobs: Any) -> Scores:
    """Of /v1/chat/completions, where `logprobs` turns them on and `top_logprobs` is the number. Raises
    RequestError."""
    top = 0 if top_logprobs is None else integer("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS)
    wanted = flag("logprobs", logprobs)
    if top and not wanted:
        raise refuse("top_logprobs", top, "is allowed only with `logprobs` true")
    return Scores(top if wanted else None, _prompt(prompt_logprobs), "top_logprobs")


def _prompt(value: Any) -> int | None:
    return None if value is None else integer("prompt_logprobs", value, 0, MAX_PROMPT_LOGPROBS)
