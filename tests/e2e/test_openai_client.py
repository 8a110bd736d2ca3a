"""The official client against a running server: what a user's program sees, with every number checked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.engines import on_batches
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.server import RunningServer, inside, running

# tiny_served: 2 layers, 4 query and 2 KV heads of 16, fp32, blocks of 16 tokens.
BLOCK = 16
BLOCK_BYTES = 2 * 2 * BLOCK * 16 * 4
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "The old clockmaker mends seven small lanterns."}]
PROMPT = "A patient gardener counts the broken letters by the"


@pytest.fixture(scope="module")
def server(tiny_served: Path) -> Iterator[RunningServer]:
    flags = ("--served-model-name", MODEL, "--dtype", "float32", "--kv-memory", "8MiB")
    with running(tiny_served, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return server.openai()


def expected(folder: Path, ids: list[int], tokens: int) -> tuple[str, int, str]:
    """transformers' greedy text, its length in tokens, and why it ends."""
    answer = load_reference(folder).greedy(ids, tokens, eos=[2])
    text = load_reference_tokenizer(folder).decode(answer, skip_special_tokens=True)
    return text, len(answer), "stop" if answer[-1] == 2 else "length"


def chat_ids(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    tokenizer = load_reference_tokenizer(folder)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)


def expected_kv(prompt: int, output: int, cached: int = 0) -> dict[str, float]:
    """By arithmetic: the last token is never written, blocks are whole, two query heads read a KV head."""
    tokens = prompt + max(output, 1) - 1
    blocks = -(-tokens // BLOCK) * 2
    held = blocks * BLOCK_BYTES
    return {
        "bytes_per_token": TOKEN_BYTES,
        "blocks": blocks,
        "bytes_peak": held,
        "bytes_exclusive": held,
        "tail_waste_bytes": held - tokens * TOKEN_BYTES,
        "cached_tokens": cached,
        "mha_equivalent_bytes": 2 * held,
        "saved_ratio": 0.5,
    }


def check_usage(usage: Any, prompt: int, output: int, cached: int = 0) -> None:
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, output)
    assert usage.total_tokens == prompt + output
    assert usage.prompt_tokens_details.cached_tokens == cached
    assert usage.kv_cache == expected_kv(prompt, output, cached)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert model.max_model_len == 512


@pytest.mark.parametrize("tokens", [1, 40])
def test_chat(client: Any, tiny_served: Path, tokens: int) -> None:
    ids = chat_ids(tiny_served, MESSAGES)
    text, count, finish = expected(tiny_served, ids, tokens)
    reply = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=tokens,
        extra_body={"cache_salt": f"chat{tokens}"},
    )
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert (choice.index, choice.finish_reason) == (0, finish)
    assert (reply.object, reply.model) == ("chat.completion", MODEL)
    check_usage(reply.usage, len(ids), count)


def test_chat_stream(client: Any, tiny_served: Path) -> None:
    ids = chat_ids(tiny_served, MESSAGES)
    text, count, finish = expected(tiny_served, ids, 40)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=40, stream=True,
        stream_options={"include_usage": True}, extra_body={"cache_salt": "stream"},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {(chunk.id, chunk.created, chunk.model) for chunk in [*chunks, last]} == {
        (last.id, last.created, MODEL)
    }
    assert last.choices == []
    check_usage(last.usage, len(ids), count)


def test_each_token_is_sent_at_once(tiny_served: Path) -> None:
    """The engine takes its next step when the client has had the token before, or after a while."""
    with inside(tiny_served, served_name=MODEL) as server, server.openai() as client:
        heard = threading.Semaphore(1)
        on_batches(server.engine, lambda batch: heard.acquire(timeout=0.2))
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=40, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = 0
        for _ in stream:
            chunks += 1
            heard.release()
    assert chunks > 30, "the answer came in few pieces"


def test_completion(client: Any, tiny_served: Path) -> None:
    ids = list(load_reference_tokenizer(tiny_served)(PROMPT).input_ids)
    text, count, finish = expected(tiny_served, ids, 30)
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 30}
    for salt, prompt in (("text", PROMPT), ("ids", ids)):
        reply = client.completions.create(prompt=prompt, extra_body={"cache_salt": salt}, **options)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (text, finish)
        assert reply.object == "text_completion"
        check_usage(reply.usage, len(ids), count)
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == finish
    assert all(chunk.usage is None for chunk in chunks)


def test_prefix_hit_in_usage(client: Any, tiny_served: Path) -> None:
    """The second of two equal prompts is served from whole blocks, all but its last token at most."""
    prompt = list(range(100, 148))  # 48 ids: three whole blocks, of which two may be hit
    for cached in (0, 32):
        reply = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
        )
        check_usage(reply.usage, 48, 20, cached)


def test_lists_and_n(client: Any, tiny_served: Path) -> None:
    """Choice i belongs to prompt i // n; greedy copies agree; usage counts each prompt once."""
    prompts = [[7, 8, 9], [10, 11, 12, 13]]
    texts = [expected(tiny_served, ids, 12) for ids in prompts]
    reply = client.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=0, max_tokens=12, extra_body={"cache_salt": "lists"}
    )
    wanted = [(i, texts[i // 2][0], texts[i // 2][2]) for i in range(4)]
    assert [(c.index, c.text, c.finish_reason) for c in reply.choices] == wanted
    assert reply.usage.prompt_tokens == 7
    assert reply.usage.completion_tokens == 2 * sum(count for _, count, _ in texts)


def test_async_client_many_at_once(server: RunningServer, tiny_served: Path) -> None:
    """Sixteen streams at the same time: each is the answer to its own prompt."""
    prompts = [list(range(20 + i, 40 + 2 * i)) for i in range(16)]
    wanted = [expected(tiny_served, ids, 24)[0] for ids in prompts]

    async def one(client: Any, ids: list[int]) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=ids, temperature=0, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everybody() -> list[str]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(one(client, ids) for ids in prompts))

    assert asyncio.run(everybody()) == wanted
    assert server.wait_idle(2.0) < 2.0
    server.kv(check=True)


def test_seeds(client: Any) -> None:
    """The same seed gives the same answer, none gives another each time."""

    def ask(**options: Any) -> str:
        options |= {"temperature": 1, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
        reply = client.completions.create(model=MODEL, prompt=PROMPT, **options)
        return str(reply.choices[0].text)

    assert ask(seed=7) == ask(seed=7)
    assert ask(seed=7) != ask(seed=8)
    assert len({ask() for _ in range(3)}) == 3


REFUSALS: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"model": "gpt-4"}, 404, "model", "model_not_found"),
    ({"max_tokens": 600}, 400, None, "context_length_exceeded"),
    ({"temperature": -1}, 400, "temperature", None),
    ({"temperature": "0.5"}, 400, "temperature", None),
    ({"top_p": 1.5}, 400, "top_p", None),
    ({"n": 0}, 400, "n", None),
    ({"stop": ""}, 400, "stop", None),
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": [384]}, 400, "prompt[0]", None),
    ({"suffix": "!"}, 400, "suffix", None),
]


@pytest.mark.parametrize(("fields", "status", "param", "code"), REFUSALS, ids=[str(r[0]) for r in REFUSALS])
@pytest.mark.parametrize("stream", [False, True])
def test_errors(
    client: Any, fields: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    """A refusal is an HTTP error in OpenAI's shape, streaming or not."""
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4} | fields
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(stream=stream, **options)
    assert caught.value.status_code == status
    body = caught.value.body
    assert isinstance(body, dict)
    assert {"message", "type", "param", "code"} <= set(body)
    assert param is None or body["param"] == param
    assert code is None or body["code"] == code


def test_healthy_after_all_that(server: RunningServer) -> None:
    """Nothing is live, the books balance, and the server is well."""
    server.wait_idle(2.0)
    kv = server.kv(check=True)
    states = {name: state["blocks"] for name, state in kv["states"].items()}
    assert states["live"] == 0
    assert sum(states.values()) == kv["pool"]["blocks"]
    assert server.http.get("/health").status_code == 200
