"""Which tokens end an answer: the union of what the checkpoint's three files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.errors import ModelError
from server.text.files import read_object
from server.text.tokenizer import Tokenizer


def eos_ids(
    folder: Path, config_ids: frozenset[int], tokenizer: Tokenizer, vocab_rows: int
) -> frozenset[int]:
    """`config_ids` (config.json), `eos_token_id` of generation_config.json (a number or a list), and the
    tokenizer's eos_token. Ids beyond the embedding rows can never be drawn and are dropped. Raises
    ModelError for a value that is no id."""
    path = folder / "generation_config.json"
    declared: Any = read_object(path).get("eos_token_id")
    listed = [] if declared is None else declared if isinstance(declared, list) else [declared]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelError(f"{path}: eos_token_id is {declared!r}; an id or a list of ids is expected")
    union = config_ids | frozenset(listed) | tokenizer.eos_ids
    return frozenset(token for token in union if 0 <= token < vocab_rows)
