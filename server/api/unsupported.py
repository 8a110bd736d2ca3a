"""Fields that OpenAI or vLLM define and this server lacks: refused, so that no answer silently differs.

A field is accepted as null or with the value that asks for nothing (its default).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.api.errors import ApiError

Harmless = Mapping[str, tuple[Any, ...]]  # field -> values, beside null, that ask for nothing

# Of both routes. One refuses the other's fields too: who sends `tools` to completions means something by it.
_SHARED: Harmless = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (),  # but as many as n: all of them
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "repetition_min_count": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
COMPLETION: Harmless = {
    **_SHARED,
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
    "messages": (),
    "top_logprobs": (0,),
}
CHAT: Harmless = {
    **_SHARED,
    "add_special_tokens": (False,),
    "echo": (False,),
    "prompt": (),
}
TOKENIZE: Harmless = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "return_token_strs": (False,),
    "tools": ([],),
}
STREAM_OPTIONS: Harmless = {"continuous_usage_stats": (False,)}


def refuse(body: Mapping[str, Any], fields: Harmless, inside: str = "") -> None:
    """Raises ApiError 400 for the first of `fields` that `body` sets; `inside` prefixes its name."""
    for name in fields:
        value, harmless = body.get(name), fields[name]
        if name == "best_of":
            harmless = (1 if body.get("n") is None else body["n"],)
        if value is not None and not any(_same(value, nothing) for nothing in harmless):
            path = inside + name
            raise ApiError(
                400, f"{path}: not supported by this server; leave it out.", path, "unsupported_parameter"
            )


def refuse_in_streams(body: Mapping[str, Any]) -> None:
    """The same for the object in `stream_options`; that object without a stream, and what a stream has no
    place for."""
    options = body.get("stream_options")
    if options is not None and body.get("stream") is not True:
        raise ApiError(
            400, "stream_options: allowed only with `stream` true.", "stream_options", "invalid_value"
        )
    if body.get("prompt_logprobs") is not None and body.get("stream") is True:
        raise ApiError(
            400,
            "prompt_logprobs: not allowed with `stream` true; a stream has no place for them.",
            "prompt_logprobs",
            "invalid_value",
        )
    if isinstance(options, dict):
        refuse(options, STREAM_OPTIONS, "stream_options.")


def _same(value: Any, harmless: Any) -> bool:
    """Equal in JSON: 0 and 0.0 are, 0 and false are not."""
    return isinstance(value, bool) == isinstance(harmless, bool) and bool(value == harmless)
