"""What a request that names no sampling gets: the checkpoint's own recommendation, else OpenAI's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ModelError
from server.text.files import read_object


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """OpenAI's defaults where nothing else is said: temperature 1 over the whole vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """`temperature`, `top_p`, `top_k` and `min_p` of generation_config.json, whichever it has.

    `"do_sample": false` is transformers' word for greedy, so it means temperature 0. Raises ModelError for
    a value outside the range that a request may ask for.
    """
    path = folder / "generation_config.json"
    declared = read_object(path)
    if declared.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    return SamplingDefaults(
        temperature=_number(path, declared, "temperature", 1.0, 2.0),
        top_p=_number(path, declared, "top_p", 1.0, 1.0),
        top_k=int(_number(path, declared, "top_k", 0, float("inf"))),
        min_p=_number(path, declared, "min_p", 0.0, 1.0),
    )


def _number(path: Path, declared: dict[str, Any], key: str, default: float, most: float) -> float:
    value = declared.get(key)
    if value is None:
        return default
    whole = key != "top_k" or isinstance(value, int)
    if isinstance(value, bool) or not isinstance(value, int | float) or not whole or not 0 <= value <= most:
        raise ModelError(
            f"{path}: {key} is {value!r}; it must be a number from 0 to {most:g}. Correct it or remove it"
        )
    return value
