"""Completions asked of a server, one after another or all at once, and what transformers says to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.server import Served

Body = Mapping[str, Any]


def choice_of(server: Served, **body: Any) -> dict[str, Any]:
    """The first choice of a completion that must succeed; it runs to its end, whatever it draws."""
    fields = {"ignore_eos": True} | body
    reply = server.http.post("/v1/completions", json=fields)
    assert reply.status_code == 200, (fields, reply.text)
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def text_of(server: Served, **body: Any) -> str:
    """Its text."""
    return str(choice_of(server, **body)["text"])


def texts_together(server: Served, bodies: Sequence[Body]) -> list[str]:
    """The texts of completions that are asked for at the same moment."""
    return all_at_once([lambda body=body: text_of(server, **body) for body in bodies])


def all_at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.result() for call in [pool.submit(call) for call in calls]]


def greedy_text(folder: Path, ids: Sequence[int], tokens: int) -> str:
    """transformers' greedy continuation of `ids`, no end mark ending it."""
    return decode(folder, load_reference(folder).greedy(ids, tokens))


def decode(folder: Path, ids: Sequence[int]) -> str:
    """As transformers writes an answer."""
    return str(load_reference_tokenizer(folder).decode(ids, skip_special_tokens=True))
