"""Log-probabilities as OpenAI and vLLM show them: natural logarithms, of the model's raw output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from server.engine.request import TokenScore
from server.text.generate import ChoiceDelta, PromptScores
from server.text.prepare import Prepared
from server.text.tokenizer import Tokenizer, TokenText

FLOOR = -9999.0
"""What stands for minus infinity, which JSON cannot say; OpenAI's choice."""

_Logprobs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of an answer with its score (None: the first of a prompt, which nothing comes before), the
    likeliest tokens in its place from high to low, and where it begins in the text."""

    text: TokenText
    logprob: float | None
    top: tuple[tuple[TokenText, float], ...]
    offset: int


def scored(prepared: Prepared, tokenizer: Tokenizer, news: ChoiceDelta) -> Iterator[Scored] | None:
    """The tokens that `news` brings, those of an echoed prompt first, one at a time; None if there are none
    to tell of."""
    best, echo = prepared.scores.output, prepared.echo_of(news.index)
    if best is None:
        return None
    written = zip(news.tokens, news.scores, news.offsets, strict=True)
    if echo is None or news.prompt_scores is None:
        return _all_scored(tokenizer, written, best) if news.scores else None
    prompt = prepared.prompts[news.index // prepared.n]
    read = zip(prompt, news.prompt_scores, echo.offsets, strict=True)
    return _all_scored(tokenizer, chain(read, written), best)


def chat_logprobs(tokens: Iterable[Scored]) -> _Logprobs:
    """`logprobs` of a chat's choice, or of what a chunk adds to it; the list is an iterator, as a million
    small objects would be in everybody's way."""
    content = (
        {
            **_entry(token.text, FLOOR if token.logprob is None else token.logprob),
            "top_logprobs": [_entry(text, logprob) for text, logprob in token.top],
        }
        for token in tokens
    )
    return {"content": content, "refusal": None}


def completion_logprobs(of: Iterable[Scored]) -> _Logprobs:
    """`logprobs` of a completion's choice, or of what a chunk adds to it: lists in step with each other.

    The likeliest are an object by token, which the token itself always belongs to. As there is no room for
    bytes beside a token, one that is not whole text is spelled by them.
    """
    tokens = list(of)
    return {
        "tokens": [_spelled(token.text) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _floored(token.logprob) for token in tokens],
        "top_logprobs": [_by_token(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(
    ids: Sequence[int], scores: PromptScores, best: int, tokenizer: Tokenizer
) -> Iterator[_Logprobs | None]:
    """vLLM's field: for each prompt token an object by id, of the token itself and the `best` likeliest; the
    first is null. `rank` counts from 1, and is null where the token is not among the likeliest."""
    for token, score in zip(ids, scores, strict=True):
        yield None if score is None else _by_id(token, score, best, tokenizer)


def _all_scored(
    tokenizer: Tokenizer, rows: Iterable[tuple[int, TokenScore | None, int]], best: int
) -> Iterator[Scored]:
    for token, score, offset in rows:
        yield _scored(tokenizer, token, score, offset, best)


def _scored(tokenizer: Tokenizer, token: int, score: TokenScore | None, offset: int, best: int) -> Scored:
    text = tokenizer.token_text(token)
    if score is None:
        return Scored(text, None, (), offset)
    top = tuple((tokenizer.token_text(other), logprob) for other, logprob in score.top[:best])
    return Scored(text, score.logprob, top, offset)


def _entry(text: TokenText, logprob: float) -> _Logprobs:
    return {"token": text.name, "logprob": _floored(logprob), "bytes": list(text.raw)}


def _by_token(token: Scored) -> dict[str, float] | None:
    """Of two tokens that are spelled the same, the likelier; the token itself before any."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in token.top:
        found.setdefault(_spelled(text), _floored(logprob))
    return found | {_spelled(token.text): _floored(token.logprob)}


def _by_id(token: int, score: TokenScore, best: int, tokenizer: Tokenizer) -> dict[str, _Logprobs]:
    ranks: dict[int, int | None] = {token: None}
    logprobs = {token: score.logprob}
    for rank, (other, logprob) in enumerate(score.top[:best], 1):
        ranks[other], logprobs[other] = rank, logprob
    return {
        str(other): {
            "logprob": _floored(logprobs[other]),
            "rank": rank,
            "decoded_token": tokenizer.token_text(other).name,
        }
        for other, rank in ranks.items()
    }


def _spelled(text: TokenText) -> str:
    """The name; of a part of a character its bytes, as OpenAI spells them: `bytes:\\xf0\\x9f`."""
    if text.whole or not text.raw:
        return text.name
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.raw)


def _floored(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # also where it is no number
