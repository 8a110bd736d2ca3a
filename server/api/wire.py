"""What a client may send: strict wire models, documented once, here and in the OpenAPI document.

Only types are checked here; ranges, and what depends on the model, are `server.text`'s to check. Names that
neither OpenAI nor vLLM define are ignored; names that they define and we lack are in `unsupported`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from server.api.errors import ApiError
from server.text.asks import SamplingAsk
from server.text.errors import shown

_IDS = {"type": "array", "items": {"type": "integer"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
}


def _prompt(value: Any) -> Any:
    """A string, strings, ids, or lists of ids. Works on sets of types: a prompt may hold millions of ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {str} or kinds <= {int}:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise ValueError("a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _stop(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and set(map(type, value)) <= {str}:
        return value
    raise ValueError("a string, a list of strings, or null")


def _ids(value: Any) -> Any:
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value
    raise ValueError("a list of token ids (integers)")


def _optional_ids(value: Any) -> Any:
    return None if value is None else _ids(value)


def _biases(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("an object with token ids for names and numbers for values, or null")


def _messages(value: Any) -> Any:
    if isinstance(value, list) and set(map(type, value)) <= {dict}:
        return value
    raise ValueError("a list of messages, each an object with `role` and `content`")


Prompt = Annotated[
    Any,
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}),
]
Stop = Annotated[
    Any, PlainValidator(_stop), WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})
]
Ids = Annotated[list[int], PlainValidator(_ids), WithJsonSchema(_IDS)]
OptionalIds = Annotated[
    Any, PlainValidator(_optional_ids), WithJsonSchema({"anyOf": [_IDS, {"type": "null"}]})
]
Biases = Annotated[
    Any,
    PlainValidator(_biases),
    WithJsonSchema(
        {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
    ),
]
Messages = Annotated[
    list[dict[str, Any]], PlainValidator(_messages), WithJsonSchema({"type": "array", "items": _MESSAGE})
]


class Wire(BaseModel):
    """No conversions: `"0.5"` is not a number and `true` is not an integer. Unknown names are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Wire):
    """How a stream reports its usage."""

    include_usage: bool | None = Field(
        None, description="Send one more chunk before [DONE], with empty `choices` and the usage."
    )


class SamplingBody(Wire):
    """Fields that completions and chat share; null means the default."""

    model: str | None = Field(None, description="A name of /v1/models; left out, the default of the server.")
    temperature: float | None = Field(None, description="0 is greedy; default: the checkpoint's, else 1.")
    top_p: float | None = Field(
        None, description="Keep the likeliest tokens of this mass; default: the checkpoint's, else 1."
    )
    top_k: int | None = Field(
        None, description="Keep the k likeliest; 0, -1: all; default: the checkpoint's, else all."
    )
    min_p: float | None = Field(
        None, description="Drop below this share of the likeliest; default: the checkpoint's, else 0."
    )
    repetition_penalty: float | None = Field(
        None,
        description="Divides the logits of tokens in prompt or output (multiplies them, if negative); "
        "default: the checkpoint's, else 1.",
    )
    presence_penalty: float | None = Field(
        None, description="Subtracted from the logits of tokens in the output; -2 to 2, default 0."
    )
    frequency_penalty: float | None = Field(
        None, description="The same for each time that a token is in the output; -2 to 2, default 0."
    )
    logit_bias: Biases = Field(None, description="Added to logits, by token id; -100 to 100.")
    max_tokens: int | None = Field(None, description="The most tokens a choice may have.")
    n: int | None = Field(None, description="Choices for each prompt; default 1.")
    seed: int | None = Field(None, description="The same seed gives the same answer, whoever else is served.")
    stop: Stop = Field(None, description="Strings that end a choice; they are not part of its text.")
    stop_token_ids: OptionalIds = Field(None, description="Further token ids that end a choice.")
    include_stop_str_in_output: bool | None = Field(
        None, description="The string of `stop`, or the text of the stop id, is a part of the answer."
    )
    ignore_eos: bool | None = Field(None, description="Do not end at end-of-sequence tokens.")
    min_tokens: int | None = Field(None, description="No end before this many tokens; default 0.")
    prompt_logprobs: int | None = Field(
        None, description="Log-probabilities of the prompt's tokens, and of 0 to 20 likeliest beside each."
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="`text`, `json_object`, or `json_schema` with `json_schema.schema`: then it is JSON "
        "that fits the schema.",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of `json` (a schema), `regex`, `choice`, `grammar`, `json_object`."
    )
    stream: bool | None = Field(None, description="Answer as server-sent events, the last one [DONE].")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    priority: int | None = Field(None, description="Lower runs first; -2^31 to 2^31 - 1, default 0.")
    user: str | None = Field(None, description="Accepted and not used.")
    cache_salt: str | None = Field(
        None, description="Requests share cached prefixes only with requests of the same salt."
    )

    def sampling(self) -> SamplingAsk:
        """The shared fields, as the words take them."""
        return SamplingAsk(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            n=self.n,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            priority=self.priority,
            response_format=self.response_format,
            structured_outputs=self.structured_outputs,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt = Field(description="Text or token ids; a list of prompts gets a choice (or n) for each.")
    echo: bool | None = Field(None, description="Begin each text with its prompt.")
    logprobs: int | None = Field(
        None, description="Log-probabilities of the tokens, and of 0 to 5 likeliest beside each."
    )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages = Field(description="The conversation so far; text only.")
    max_completion_tokens: int | None = Field(None, description="Newer name of max_tokens; wins over it.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None, description="With `logprobs`: those of 0 to 20 likeliest tokens beside each too."
    )


class TokenizeBody(Wire):
    """POST /tokenize: a `prompt`, or `messages` as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        PlainValidator(lambda value: None if value is None else _messages(value)),
        WithJsonSchema({"anyOf": [{"type": "array", "items": _MESSAGE}, {"type": "null"}]}),
    ] = None
    add_special_tokens: bool | None = Field(
        None,
        description="Whether a prompt gets the tokens (such as BOS) that completions give it; default true. "
        "A conversation has those of its template, so true is an error there.",
    )


class DetokenizeBody(Wire):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids = Field(description="Token ids.")


Body = TypeVar("Body", bound=Wire)

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "an object",
    "dict_type": "an object",
}


def validate(kind: type[Body], value: dict[str, Any]) -> Body:
    """`value` as a wire model; ApiError 400 names the field, what it must be and what it is."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        raise ApiError(400, f"{path}: this field is needed.", path, "missing_field")
    if first["type"] == "value_error":
        expected = str(first["ctx"]["error"])
    else:
        expected = _EXPECTED.get(first["type"], first["msg"])
    raise ApiError(400, f"{path}: must be {expected}, got {shown(first['input'])}.", path, "invalid_type")
