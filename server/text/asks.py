"""What a client asked, in plain Python values, exactly as the API received them (not yet checked)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingAsk:
    """The fields both endpoints share; None means that the client left the field out or sent null.

    Units and limits are checked by `server.text.params`, so any JSON value of the right type may stand here.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """POST /v1/completions. `prompt` is a string, strings, token ids, or lists of token ids.

    `request_id` names the request in the engine and the answer; `key_id` keeps one API key's prefix cache
    from answering another's (empty when the server has no keys).
    """

    request_id: str
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
    model: str | None = None
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    sampling: SamplingAsk = field(default_factory=SamplingAsk)
    cache_salt: str | None = None
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """POST /v1/chat/completions. `messages` are the decoded JSON objects: role, content and whatever else.

    `max_completion_tokens` wins over `max_tokens` where both are given.
    """

    request_id: str
    messages: Sequence[Mapping[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    sampling: SamplingAsk = field(default_factory=SamplingAsk)
    cache_salt: str | None = None
    key_id: str = ""
