"""Asks to requests: what a valid one becomes, and that no invalid one gets through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.text.asks import ChatAsk, CompletionAsk, SamplingAsk
from server.text.chat import ChatTemplate
from server.text.defaults import SamplingDefaults
from server.text.errors import RequestError
from server.text.prepare import Prepared, Preparer
from server.text.served import ServedModel, ServedVariant
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level, sentencepiece_file

CONTEXT, POOL = 256, 64
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepare")
    byte_level()(path)
    return path


def make(folder: Path, rows: int = 384) -> Preparer:
    tokenizer = Tokenizer.from_folder(folder)
    variants = {"native": ServedVariant("native", CONTEXT), "mha": ServedVariant("mha", POOL)}
    served = ServedModel(
        names={"tiny": "native", "tiny@mha": "mha"},
        variants=variants,
        vocab_rows=rows,
        eos_ids=frozenset({2}),
        fingerprint="abc",
        kv_dtype="float32",
        defaults=SamplingDefaults(),
    )
    return Preparer(served, tokenizer, ChatTemplate.from_folder(folder, tokenizer.special))


@pytest.fixture
async def preparer(folder: Path) -> AsyncIterator[Preparer]:
    made = make(folder)
    yield made
    await made.close()


async def completion(
    preparer: Preparer, prompt: Any = "Hello", sampling: dict[str, Any] | None = None, **fields: Any
) -> Prepared:
    ask = CompletionAsk("cmpl-1", prompt, sampling=SamplingAsk(**(sampling or {})), **fields)
    return await preparer.completion(ask)


async def chat(
    preparer: Preparer, messages: Any = HELLO, sampling: dict[str, Any] | None = None, **fields: Any
) -> Prepared:
    return await preparer.chat(
        ChatAsk("chatcmpl-1", messages, sampling=SamplingAsk(**(sampling or {})), **fields)
    )


async def test_priority_reaches_the_request(preparer: Preparer) -> None:
    asked = [None, 0, 7, -(2**31), 2**31 - 1]
    made = [await completion(preparer, sampling={"priority": value}) for value in asked]
    made += [await chat(preparer, sampling={"priority": value}) for value in asked]
    found = [prepared.request.priority for prepared in made if prepared.request is not None]
    assert found == [0, 0, 7, -(2**31), 2**31 - 1] * 2


async def test_a_plain_completion(preparer: Preparer, folder: Path) -> None:
    ids = tuple(Tokenizer.from_folder(folder).encode("Hello"))
    prepared = await completion(preparer)
    assert prepared.request is not None
    request = prepared.request
    assert (prepared.model, prepared.variant, request.variant, request.id) == (
        "tiny",
        "native",
        "native",
        "cmpl-1",
    )
    assert prepared.prompts == request.prompts == (ids,)
    assert (request.max_tokens, request.n, request.min_tokens) == (16, 1, 0)
    assert request.stop_ids == {2} and len(request.cache_root) == 32
    assert (prepared.prompt_tokens, prepared.num_choices) == (len(ids), 1)
    assert prepared.ends.strings == prepared.echo == ()


async def test_prompts_in_four_shapes(preparer: Preparer) -> None:
    one = (await completion(preparer, "Hello")).prompts[0]
    assert (await completion(preparer, list(one))).prompts == (one,)
    assert (await completion(preparer, ["Hello", "Hello"])).prompts == (one, one)
    several = await completion(preparer, [list(one), [383]], sampling={"n": 3})
    assert several.prompts == (one, (383,))
    assert several.num_choices == 6 and several.prompt_tokens == len(one) + 1


async def test_string_prompts_get_the_checkpoints_bos_and_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    sentencepiece_file()(tmp_path)
    preparer = make(tmp_path, rows=400)
    ids = (await completion(preparer, "rain")).prompts[0]
    assert ids[0] == 1
    assert (await completion(preparer, list(ids))).prompts == (ids,)
    assert (await completion(preparer, list(ids[1:]))).prompts == (ids[1:],)
    assert (await completion(preparer, "")).prompts == (
        (1,),
    )  # the BOS is a token, so this is no empty prompt
    await preparer.close()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "at least one token"),
        ([""], "at least one token"),
        (["a", ""], r"prompt\[1\]: must have at least one token"),
        ([], "must not be empty"),
        ([[]], "at least one token"),
        ([[1], []], r"prompt\[1\]: must have at least one token"),
        ([384], r"prompt\[0\]: must be a token id from 0 to 383, got 384"),
        ([[1], [2, -1]], r"prompt\[1\]\[1\]: must be a token id"),
        ([1.5], "must be a token id"),
        ([True], "must be a token id"),
        ([2**40], "must be a token id"),
        ([1, "a"], "must be a token id"),
        ("\ud800", "surrogate"),
        (5, "must be a string"),
    ],
)
async def test_bad_prompts_are_refused(preparer: Preparer, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        await completion(preparer, prompt)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("prompt")


async def test_the_last_embedding_row_is_a_token(preparer: Preparer) -> None:
    assert (await completion(preparer, [383])).prompts == ((383,),)


async def test_rows_that_the_model_lacks_are_refused_for_texts_too(folder: Path) -> None:
    preparer = make(folder, rows=40)
    with pytest.raises(RequestError, match="from 0 to 39"):
        await completion(preparer, "Hello")
    await preparer.close()


async def test_length_at_the_edge(preparer: Preparer) -> None:
    full = [5] * (CONTEXT - 16)
    assert (await completion(preparer, full, max_tokens=16)).prompts == (tuple(full),)
    assert (await completion(preparer, [5] * (CONTEXT - 3))).request.max_tokens == 3  # type: ignore[union-attr]
    assert (await completion(preparer, [5] * CONTEXT, max_tokens=0)).request is None
    for prompt, tokens, param in (
        (full, 17, "max_tokens"),
        ([5] * CONTEXT, None, "prompt"),
        ("x" * 9000, 1, "prompt"),
    ):
        with pytest.raises(RequestError, match=str(CONTEXT)) as caught:
            await completion(preparer, prompt, max_tokens=tokens)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    with pytest.raises(RequestError, match=r"prompt\[1\] has 257 tokens"):
        await completion(preparer, [[5], [5] * 257])


async def test_each_variant_has_its_own_limit(preparer: Preparer) -> None:
    prepared = await completion(preparer, [5] * 48, model="tiny@mha")
    assert prepared.request is not None and prepared.request.variant == "mha" and prepared.model == "tiny@mha"
    with pytest.raises(RequestError, match=str(POOL)):
        await completion(preparer, [5] * 49, model="tiny@mha", max_tokens=16)
    with pytest.raises(RequestError) as caught:
        await chat(preparer, model="other")
    assert caught.value.status == 404


async def test_max_tokens(preparer: Preparer) -> None:
    for wrong in (-1, 1.5, True, "5"):
        with pytest.raises(RequestError, match="max_tokens"):
            await completion(preparer, max_tokens=wrong)
    empty = await completion(preparer, max_tokens=0)
    assert empty.request is None and empty.prompt_tokens > 0
    prepared = await chat(preparer)
    assert prepared.request is not None
    assert prepared.request.max_tokens == CONTEXT - prepared.prompt_tokens
    for fields in (
        {"max_tokens": 0},
        {"max_completion_tokens": 0},
        {"max_tokens": -1},
        {"max_completion_tokens": True},
    ):
        with pytest.raises(RequestError, match=next(iter(fields))):
            await chat(preparer, **fields)
    both = await chat(preparer, max_tokens=50, max_completion_tokens=3)
    assert both.request is not None and both.request.max_tokens == 3
    with pytest.raises(RequestError, match="max_completion_tokens"):
        await chat(preparer, max_completion_tokens=CONTEXT)


async def test_min_tokens_and_stop_ids(preparer: Preparer) -> None:
    prepared = await completion(
        preparer, max_tokens=8, sampling={"min_tokens": 4, "stop": ["x"], "stop_token_ids": [9]}
    )
    assert prepared.request is not None
    assert prepared.ends.min_tokens == prepared.request.min_tokens == 4
    assert prepared.ends.strings == ("x",) and prepared.request.stop_ids == {2, 9}
    with pytest.raises(RequestError, match=r"min_tokens: must not exceed .* 8 tokens, got 9"):
        await completion(preparer, max_tokens=8, sampling={"min_tokens": 9})


async def test_echo_is_the_prompt_byte_for_byte(preparer: Preparer) -> None:
    text = "x != y and 'ok' .\n  🦙"
    echo = (await completion(preparer, text, echo=True)).echo
    assert [part.whole for part in echo] == [text]
    ids = (await completion(preparer, text)).prompts[0]
    echo = (await completion(preparer, [list(ids), [5]], echo=True, max_tokens=0)).echo
    assert [part.whole for part in echo] == [text, preparer._tokenizer.decode([5])]
    assert (await completion(preparer, text, echo=False)).echo == ()
    with pytest.raises(RequestError, match="echo"):
        await completion(preparer, text, echo=1)


async def test_chat_ids_are_the_rendered_texts(preparer: Preparer, folder: Path) -> None:
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    want = tuple(Tokenizer.from_folder(folder).encode_rendered(rendered))
    assert (await chat(preparer)).prompts == (want,)
    assert await preparer.tokenize_chat(HELLO) == list(want)


async def test_what_separates_caches(preparer: Preparer) -> None:
    async def root(**fields: Any) -> bytes:
        prepared = await completion(preparer, **fields)
        assert prepared.request is not None
        return prepared.request.cache_root

    same = await root()
    assert await root(prompt="other") == same
    others = [await root(key_id="k"), await root(cache_salt="k"), await root(model="tiny@mha")]
    assert len({same, *others}) == 4


async def test_oversize_is_refused_by_its_bytes(preparer: Preparer) -> None:
    started = time.perf_counter()
    for text in ("x" * 8_000_000, "🦙" * 2_000_000):
        with pytest.raises(RequestError, match=r"has at least [0-9]+ tokens") as caught:
            await completion(preparer, text)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="at most 128 prompts"):
        await completion(preparer, ["a"] * 100_000)
    assert time.perf_counter() - started < 1


async def test_a_text_too_large_to_tokenise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer promises no number of tokens from the bytes, and where nothing is run."""
    monkeypatch.setattr(Tokenizer, "min_tokens", lambda self, text: 0)
    preparer = make(folder)
    try:
        large = "a" * (2**20 + 1)
        for ask in (
            preparer.tokenize(large),
            preparer.tokenize_chat([{"role": "user", "content": large}]),
            chat(preparer, [{"role": "user", "content": large}]),
            completion(preparer, ["a", large]),
        ):
            with pytest.raises(RequestError, match=r"at most 1048576 bytes of text are tokenised, got \d+"):
                await ask
        assert len(await preparer.tokenize("a" * 2**20)) == 2**20
    finally:
        await preparer.close()


async def test_long_texts_do_not_hold_up_the_loop(preparer: Preparer) -> None:
    text = "every second sailor paints the broken letters " * 20_000
    work = asyncio.create_task(preparer.tokenize(text))
    started = last = time.perf_counter()
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0.002)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert len(await work) > 100_000
    assert longest < (last - started) / 2  # on the loop it would be one long pause


async def test_many_short_texts_leave_the_loop_its_turns(preparer: Preparer) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await completion(preparer, ["fine"] * 100)
    task.cancel()
    assert turns >= 100


async def test_a_base_model_starts_and_only_chat_is_refused(tmp_path: Path) -> None:
    sentencepiece_file()(tmp_path)
    preparer = make(tmp_path, rows=400)
    assert "no chat template" in str(await preparer.start())
    assert (await completion(preparer, "rain")).request is not None
    with pytest.raises(RequestError, match="cannot chat"):
        await chat(preparer)
    await preparer.close()


async def test_the_first_text_that_is_too_long_is_the_last_that_is_read(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred texts of which each is too long cost as much as one."""
    read: list[str] = []
    tokenize = preparer.tokenize

    async def noted(content: str, **fields: Any) -> list[int]:
        read.append(fields["name"])
        return await tokenize(content, **fields)

    monkeypatch.setattr(preparer, "tokenize", noted)
    long = "a b " * CONTEXT
    with pytest.raises(RequestError, match=r"prompt\[1\] has [0-9]+ tokens") as caught:
        await completion(preparer, ["fine", *[long] * 100])
    assert caught.value.code == "context_length_exceeded"
    assert read == ["prompt[0]", "prompt[1]"]
