"""Whatever JSON a client sends, it gets an answer or a refusal in OpenAI's shape, never a 500."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.unsupported import CHAT, COMPLETION
from server.api.wire import ChatBody, CompletionBody
from tests.api.test_bodies import check_error
from tests.support.api import Api, serving

numbers = st.one_of(
    st.integers(-5, 300),
    st.sampled_from([2**31, -(2**63) - 1, 2**64, 10**30, 0.5, 1e-45, 5e-324, -0.0, 1e9, 1e300]),
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=5), st.sampled_from(["tiny", "a", "text", "user"])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "include_usage", "x"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
sane = {
    "prompt": st.sampled_from(["a", ["a", "b"], [67], [[67], [68, 69]]]),
    "messages": st.just([{"role": "user", "content": "a"}]),
    "max_tokens": st.integers(1, 3),
    "n": st.integers(1, 2),
}


def bodies(fields: list[str], needed: str) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly sane, so that something gets as far as an answer, with up to three fields of anything."""
    base = st.fixed_dictionaries(
        {needed: sane[needed], "max_tokens": sane["max_tokens"]}, optional={"n": sane["n"]}
    )
    return st.builds(
        lambda a, b: {**a, **b}, base, st.dictionaries(st.sampled_from(fields), values, max_size=3)
    )


completions = bodies([*CompletionBody.model_fields, *COMPLETION], "prompt").map(
    lambda body: ("/v1/completions", body)
)
chats = bodies([*ChatBody.model_fields, *CHAT], "messages").map(lambda body: ("/v1/chat/completions", body))
tokens = st.dictionaries(
    st.sampled_from(["prompt", "messages", "tokens", "model", "add_special_tokens"]), values
)
others = st.tuples(st.sampled_from(["/tokenize", "/detokenize"]), tokens)


async def ask_all(words: Path, asks: list[tuple[str, Any]]) -> set[int]:
    async with serving(words) as api:
        statuses = {await ask(api, path, body) for path, body in asks}
        await api.idle(2.0)
        return statuses


async def ask(api: Api, path: str, body: Any) -> int:
    text = json.dumps(body)
    reply = await api.http.post(path, content=text, headers={"content-type": "application/json"})
    if reply.status_code == 200:
        assert reply.text.endswith("data: [DONE]\n\n") or reply.json()
    else:
        assert reply.status_code in (400, 404), (path, text, reply.text)
        check_error(reply, reply.status_code)
    return reply.status_code


def test_any_json(words: Path) -> None:
    seen: set[int] = set()

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(completions, chats, others), min_size=20, max_size=40))
    def check(asks: list[tuple[str, Any]]) -> None:
        seen.update(asyncio.run(ask_all(words, asks)))

    check()
    assert {200, 400} <= seen <= {200, 400, 404}
