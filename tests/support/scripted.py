"""CHAIN served: the model says exactly what a test wrote, and each question is asked whole and streamed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import checkpoints
from tests.support.reference import load_reference_tokenizer
from tests.support.server import Served, inside
from tests.support.sse import Streamed, read_stream
from tests.support.standing import Known

HELLO, WORLD, BETA, GAMMA, NEWLINE, IM_START, EOS = 19556, 905, 17565, 16439, 198, 1, 2
LLAMA = (10813, 116, 243)  # 🦙, one character in three tokens
NI_HAO = (18645, 250, 48392, 138)  # 你好, two characters in four tokens

Serve = Callable[..., Served]


@contextlib.contextmanager
def chain_servers(folder: Callable[[], Path], tokenizer: Path) -> Iterator[Serve]:
    """`serve(*scripts)`: a running server that follows them, started once for each set of scripts.

    `folder` makes a new empty folder at each call; the tokenizer's files are copied from `tokenizer`.
    """
    with contextlib.ExitStack() as stack:
        servers: dict[Any, Served] = {}

        def get(*scripts: tuple[int, ...]) -> Served:
            if scripts not in servers:
                made = checkpoints.make_chain(folder(), *scripts)
                checkpoints.add_tokenizer(made, tokenizer)
                servers[scripts] = stack.enter_context(inside(made, max_model_len=256))
            return servers[scripts]

        yield get


def known_of(*scripts: tuple[int, ...], tokenizer: Path, eos: int = EOS) -> Known:
    """The start of the first script, and the text that follows it, as transformers decodes it."""
    follows = {before: after for script in scripts for before, after in itertools.pairwise(script)}
    ids = [scripts[0][0]]
    while len(ids) < 10 and ids[-1] in follows and follows[ids[-1]] != eos:
        ids.append(follows[ids[-1]])
    text = load_reference_tokenizer(tokenizer).decode(ids[1:], skip_special_tokens=True)
    return Known(ids[:1], str(text), max(1, len(ids) - 1))


def complete(server: Served, prompt: Any, **fields: Any) -> tuple[dict[str, Any], Streamed]:
    """The same greedy completion twice, whole and streamed; they must agree. `whole["text"]` and
    `whole["finish"]` are those of its one choice."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 9} | fields
    return _both(server, "/v1/completions", body, lambda choice: choice["text"])


def chat(server: Served, **fields: Any) -> tuple[dict[str, Any], Streamed]:
    """The same for a chat; its rendered prompt ends with a newline, so scripts start there."""
    body = {"messages": [{"role": "user", "content": "Say it."}], "temperature": 0, "max_tokens": 9} | fields
    return _both(server, "/v1/chat/completions", body, lambda choice: choice["message"]["content"])


def _both(
    server: Served, path: str, body: dict[str, Any], text: Callable[[dict[str, Any]], str]
) -> tuple[dict[str, Any], Streamed]:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", path, json=body | options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        streamed = read_stream(response.iter_lines())
    assert streamed.done and streamed.error is None
    (choice,) = whole["choices"]
    assert isinstance(text(choice), str)
    assert streamed.text == text(choice)
    assert streamed.finish == choice["finish_reason"]
    usage = streamed.chunks[-1]["usage"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == whole["usage"][count]
    whole["text"] = text(choice)
    whole["finish"] = choice["finish_reason"]
    return whole, streamed
