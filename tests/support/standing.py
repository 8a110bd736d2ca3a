"""The standing check after every known failure: the server lives, says what it should, and holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.server import Served


@dataclass(frozen=True, slots=True)
class Known:
    """A greedy completion whose text is known beforehand: from a script, or from transformers."""

    prompt: Any
    text: str
    max_tokens: int


def assert_stands(server: Served, known: Known, seconds: float = 10.0) -> None:
    """`/health` is 200, `known` is answered as ever, no block is live afterwards and none is missing.

    For a server that nobody else talks to; waits up to `seconds` for what still runs to be let go.
    """
    health = server.http.get("/health")
    assert health.status_code == 200, health.text
    server.wait_idle(seconds)
    body = {"prompt": known.prompt, "temperature": 0, "max_tokens": known.max_tokens}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == known.text
    server.wait_idle(seconds)
    report = server.kv()
    blocks = {state: entry["blocks"] for state, entry in report["states"].items()}
    assert blocks["live"] == 0
    assert sum(blocks.values()) == report["pool"]["blocks"], blocks


def known_from_reference(folder: Path, prompt: str, tokens: int, eos: Sequence[int] = (2,)) -> Known:
    """What transformers says after `prompt` on the same folder, as the text that follows it."""
    from tests.support.reference import load_reference, load_reference_tokenizer

    tokenizer = load_reference_tokenizer(folder)
    ids = tokenizer(prompt).input_ids
    answer = load_reference(folder).greedy(ids, tokens, eos=eos)
    before = tokenizer.decode(ids, skip_special_tokens=True)
    text = str(tokenizer.decode([*ids, *answer], skip_special_tokens=True))
    if not text.startswith(before):
        raise ValueError(f"the prompt does not come back: {before!r}, {text!r}")
    return Known(prompt, text[len(before) :], tokens)
