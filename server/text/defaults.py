"""What a request that names no sampling gets: the checkpoint's own recommendation, else OpenAI's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ModelError
from server.text.files import read_object

MAX_TEMPERATURE = 2.0
MIN_REPETITION, MAX_REPETITION = 0.01, 10.0
"""Of `repetition_penalty`: logits are divided by it, so next to 0 they would be no numbers."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """OpenAI's defaults where nothing else is said: temperature 1 over the whole vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """`temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` of generation_config.json, whichever
    it has.

    `"do_sample": false` is transformers' word for greedy, so it means temperature 0. Raises ModelError for
    a value outside the range that a request may ask for.
    """
    path = folder / "generation_config.json"
    declared = read_object(path)
    repetition = _number(path, declared, "repetition_penalty", 1.0, MAX_REPETITION, MIN_REPETITION)
    if declared.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0, repetition_penalty=repetition)
    return SamplingDefaults(
        temperature=_number(path, declared, "temperature", 1.0, MAX_TEMPERATURE),
        top_p=_number(path, declared, "top_p", 1.0, 1.0),
        top_k=max(0, int(_number(path, declared, "top_k", 0, float("inf"), -1))),  # -1 is 0: all
        min_p=_number(path, declared, "min_p", 0.0, 1.0),
        repetition_penalty=repetition,
    )


def _number(
    path: Path, declared: dict[str, Any], key: str, default: float, most: float, least: float = 0.0
) -> float:
    value = declared.get(key)
    if value is None:
        return default
    whole = key != "top_k" or isinstance(value, int)
    good = isinstance(value, int | float) and not isinstance(value, bool) and whole
    if not good or not least <= value <= most:
        rule = f"it must be a number from {least:g} to {most:g}"
        raise ModelError(f"{path}: {key} is {value!r}; {rule}. Correct it or remove it")
    return float(value)
