"""The fields that say how a token is drawn, checked: temperature and its kin, penalties, biases, the seed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from server.engine.request import SamplingParams
from server.text.asks import SamplingAsk
from server.text.checks import integer, number, refuse
from server.text.defaults import MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION, SamplingDefaults

MAX_PENALTY = 2.0
"""Of presence and frequency, both ways."""
MAX_BIAS = 100.0
MAX_BIASES = 1024
SEED_LOW, SEED_HIGH = -(2**63), 2**64 - 1


def read_sampling(ask: SamplingAsk, defaults: SamplingDefaults, vocab_rows: int) -> SamplingParams:
    """What is left out comes from `defaults`, and the seed is drawn here. top_p 0 keeps only the likeliest
    token, so it is greedy; top_k 0, -1 and more than the vocabulary mean all; seeds are taken modulo 2^64.
    Raises RequestError."""
    top_p = number("top_p", _given(ask.top_p, defaults.top_p), 0, 1)
    top_k = integer("top_k", _given(ask.top_k, defaults.top_k), -1)
    temperature = number("temperature", _given(ask.temperature, defaults.temperature), 0, MAX_TEMPERATURE)
    repetition = _given(ask.repetition_penalty, defaults.repetition_penalty)
    if ask.seed is None:
        seed = secrets.randbits(64)
    else:
        seed = integer("seed", ask.seed, SEED_LOW, SEED_HIGH) % 2**64
    return SamplingParams(
        temperature=temperature if top_p > 0 else 0.0,
        top_p=top_p or 1.0,
        top_k=top_k if 0 < top_k < vocab_rows else 0,
        min_p=number("min_p", _given(ask.min_p, defaults.min_p), 0, 1),
        seed=seed,
        repetition_penalty=number("repetition_penalty", repetition, MIN_REPETITION, MAX_REPETITION),
        presence_penalty=_penalty("presence_penalty", ask.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", ask.frequency_penalty),
        logit_bias=_biases(ask.logit_bias, vocab_rows),
    )


def _given(asked: Any, default: float) -> Any:
    return default if asked is None else asked


def _penalty(param: str, value: Any) -> float:
    return 0.0 if value is None else number(param, value, -MAX_PENALTY, MAX_PENALTY)


def _biases(value: Any, vocab_rows: int) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs in the order of the ids. A key must be the id as JSON would print it, so that no two
    keys mean the same id; ids without a bias (0) are left out."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", value, "must be an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise refuse("logit_bias", len(value), f"at most {MAX_BIASES} biases are allowed")
    pairs = []
    for key, bias in value.items():
        if not (isinstance(key, str) and _is_id(key, vocab_rows)):
            raise refuse("logit_bias", key, f"each key must be a token id from 0 to {vocab_rows - 1}")
        pairs.append((int(key), number(f"logit_bias[{key}]", bias, -MAX_BIAS, MAX_BIAS)))
    return tuple(sorted(pair for pair in pairs if pair[1]))


def _is_id(key: str, vocab_rows: int) -> bool:
    """Digits alone, without a sign, a space, or a zero in front."""
    digits = key.isascii() and key.isdecimal() and len(key) <= 18
    return digits and str(int(key)) == key and int(key) < vocab_rows
