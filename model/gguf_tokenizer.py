"""The tokenizer that a GGUF file describes, as `tokenizer.json` and `tokenizer_config.json`.

Only the byte-level BPE of SmolLM2 (`tokenizer.ggml.model` gpt2, `pre` smollm) is known here: digits stand
alone, the rest is split as GPT-2 does, and nothing is added before or after a text.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from model.errors import ModelError

_CONTROL = 3  # tokenizer.ggml.token_type of a special token

Lookup = Callable[[str], Any]
"""A metadata value by its GGUF key, None if the file has none."""


def write_tokenizer(get: Lookup, context_length: int, folder: Path) -> None:
    """Write the tokenizer and the chat template of a GGUF file's metadata into `folder`."""
    kind = (get("tokenizer.ggml.model"), get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"the GGUF file's tokenizer is {kind}; only ('gpt2', 'smollm') can be converted")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type")
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    _build(tokens, get("tokenizer.ggml.merges"), control).save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": bool(get("tokenizer.ggml.add_bos_token")),
        "add_prefix_space": False,
        "additional_special_tokens": control,
        "bos_token": tokens[get("tokenizer.ggml.bos_token_id")],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[get("tokenizer.ggml.eos_token_id")],
        "model_max_length": context_length,
        "pad_token": tokens[get("tokenizer.ggml.padding_token_id")],
        # The plain class takes tokenizer.json as it is; GPT2Tokenizer would rebuild it without the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[get("tokenizer.ggml.unknown_token_id")],
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template: str | None = get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _build(tokens: list[str], merges: list[str], control: list[str]) -> Tokenizer:
    """Byte-level BPE over `tokens` (id = index) and `merges` (`left right`, best first)."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer
