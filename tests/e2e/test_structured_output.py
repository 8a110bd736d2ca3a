"""Structured output over HTTP: every spelling, whole and streamed, hostile sources, the official client."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import openai
import pytest

from server.text.grammar_build import to_lark
from server.text.grammar_matcher import GrammarSource
from server.text.tokenizer import Tokenizer
from tests.support.engines import fp32_facts
from tests.support.schemas import random_schema
from tests.support.server import Served, inside
from tests.support.sse import read_stream

EOS = 2
ASKED = [{"role": "user", "content": "Invent a person."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "books"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module")
def served(tiny_served: Path) -> Iterator[Served]:
    with inside(tiny_served, served_name="tiny") as served:
        yield served


@pytest.fixture(scope="module")
def default_model(smol: Path) -> Iterator[Served]:
    """Whose vocabulary of 49,152 makes grammars dear."""
    with inside(smol, dtype="bfloat16", kv_memory=32 << 20, max_model_len=512) as served:
        yield served


def ask(served: Served, path: str = "completions", **fields: Any) -> Any:
    subject = {"prompt": "Answer:"} if path == "completions" else {"messages": ASKED}
    return served.http.post(f"/v1/{path}", json=subject | {"max_tokens": 60, "temperature": 0} | fields)


def text_of(reply: Any) -> str:
    """The text of a reply with one choice that ended by itself."""
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_spelling(served: Served, path: str, temperature: float) -> None:
    def answer(**fields: Any) -> str:
        return text_of(ask(served, path, temperature=temperature, seed=3, max_tokens=200, **fields))

    jsonschema.validate(json.loads(answer(response_format=FORMAT)), PERSON)
    jsonschema.validate(json.loads(answer(structured_outputs={"json": PERSON})), PERSON)
    jsonschema.validate(json.loads(answer(structured_outputs={"json": json.dumps(PERSON)})), PERSON)
    assert re.fullmatch("[A-Z]{3}-[0-9]{2,4}", answer(structured_outputs={"regex": "[A-Z]{3}-[0-9]{2,4}"}))
    assert answer(structured_outputs={"choice": ["tea", "coffee"]}) in ("tea", "coffee")
    gbnf = 'root ::= "<" ("a" | "b")+ ">" [0-9]{2}'
    assert re.fullmatch("<[ab]+>[0-9]{2}", answer(structured_outputs={"grammar": gbnf}, stop_token_ids=[]))
    lark = 'start: "x=" NUMBER\nNUMBER: /[1-9][0-9]{0,3}/'
    assert re.fullmatch("x=[1-9][0-9]{0,3}", answer(structured_outputs={"grammar": lark}))


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object(served: Served, fields: dict[str, Any]) -> None:
    reply = ask(served, "chat/completions", max_tokens=120, **fields)
    choice = reply.json()["choices"][0]
    text = choice["message"]["content"]
    assert text.startswith("{") and not re.search(r"[ \n\t]{2}", re.sub(r'"(\\.|[^"\\])*"', "", text))
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_each_choice_can_be_reached(served: Served) -> None:
    words = ["red", "reddish", "green", "größer", " blue", 'say "x"\\']
    reply = ask(served, structured_outputs={"choice": words}, temperature=2, seed=1, n=128)
    found = {choice["text"] for choice in reply.json()["choices"]}
    assert found == set(words)


def test_streamed_equals_whole_and_usage_counts_the_last_token(served: Served) -> None:
    for path, fields in (
        ("completions", {"structured_outputs": {"regex": "[a-z]{4}: [0-9]{6}"}}),
        ("chat/completions", {"response_format": FORMAT}),
    ):
        whole = ask(served, path, **fields).json()
        body = {"prompt": "Answer:"} if path == "completions" else {"messages": ASKED}
        body |= {
            "max_tokens": 60,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with served.http.stream("POST", f"/v1/{path}", json=body | fields) as response:
            streamed = read_stream(response.iter_lines())
        (choice,) = whole["choices"]
        assert streamed.text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert streamed.finish == choice["finish_reason"] == "stop"
        usage = streamed.chunks[-1]["usage"]
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_n_choices_seeds_and_scores(served: Served) -> None:
    fields = {"structured_outputs": {"regex": "[a-z]{6}"}, "n": 3, "seed": 5, "temperature": 1, "logprobs": 2}
    first, second = ask(served, **fields).json(), ask(served, **fields).json()
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1 and all(re.fullmatch("[a-z]{6}", text) for text in texts)
    for choice in first["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


def test_where_it_ends(served: Served) -> None:
    cut = ask(served, structured_outputs={"regex": "[0-9]{30}"}, max_tokens=5).json()["choices"][0]
    assert cut["finish_reason"] == "length" and re.fullmatch("[0-9]{5,15}", cut["text"])
    endless = ask(served, structured_outputs={"regex": "[ab]+"}, ignore_eos=True, max_tokens=9).json()
    assert endless["choices"][0]["finish_reason"] == "length"
    whole = ask(served, structured_outputs={"regex": "[ab]{3}"}, ignore_eos=True)
    assert re.fullmatch("[ab]{3}", text_of(whole))
    stopped = ask(served, structured_outputs={"regex": "one, two, three"}, stop=[", t"])
    assert text_of(stopped) == "one"
    marked = ask(served, structured_outputs={"regex": "a+"}, stop_token_ids=[0], logit_bias={"0": 100})
    assert re.fullmatch("a+", text_of(marked))


def test_what_does_not_go_together(served: Served) -> None:
    for fields, param in (
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": "regex"}, "structured_outputs"),
        ({"response_format": ["json"]}, "response_format"),
        ({"guided_json": PERSON}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "start: A"}, "guided_grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ):
        reply = ask(served, **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    for fields in (
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
    ):
        assert ask(served, **fields, max_tokens=1).status_code == 200


HOSTILE: list[dict[str, Any]] = [
    {"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    {"json": {"type": "array", "maxItems": 10**9, "items": {"type": "integer"}}},
    {"json": {"type": "integer", "multipleOf": 99991}},
    {"json": {"allOf": [{"type": "integer", "multipleOf": k} for k in (97, 89, 83)]}},
    {"regex": "(a?){1000}a{1000}"},
    {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    {"regex": "(a|b)*a(a|b){900}"},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
    {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    {"json": {"if": {}, "then": {}, "else": {}}},
    {"choice": []},
    {"choice": [""]},
    {"choice": [f"c{i}" for i in range(10**5)]},
    {"choice": ["x" * 60_000]},
    {"regex": "(("},
    {"regex": "(?!a)b"},
    {"grammar": "start: a\na: a a a | \"x\" | "},
    {"grammar": "start: A\nA: " + " & ".join(f"/(?s:.)*{'x' * i}(?s:.)*/" for i in range(1, 60))},
]  # fmt: skip


@pytest.mark.model
def test_hostile_sources_hurt_nobody(default_model: Served) -> None:
    """Each is refused, or answered within its grammar, within seconds; `/health` answers all the while."""
    served = default_model
    gaps, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            began = time.monotonic()
            assert served.http.get("/health").status_code == 200
            gaps.append(time.monotonic() - began)
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        refused = 0
        for structured in HOSTILE:
            began = time.monotonic()
            reply = ask(served, structured_outputs=structured, max_tokens=8)
            assert time.monotonic() - began < 60, structured  # of wall time, on whatever machine
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 400:
                refused += 1
                assert reply.json()["error"]["param"].startswith("structured_outputs.")
                assert len(reply.json()["error"]["message"]) < 700
    finally:
        over.set()
        watching.join()
    assert refused >= 13 and len(gaps) > 20
    assert max(gaps) < 3.0, "the event loop stood still"
    assert text_of(ask(served, structured_outputs={"choice": ["fine"]})) == "fine"
    assert served.live_blocks() == 0


def test_a_mixed_crowd_is_answered_as_if_alone(tiny_served: Path) -> None:
    """In fp32, where an answer alone and in a crowd are equal to the id."""
    requests: list[dict[str, Any]] = [
        {"prompt": f"Number {i} is", "max_tokens": 40, "temperature": 1, "seed": i, "n": 2} for i in range(12)
    ]
    for i in range(0, 12, 2):
        requests[i] |= {"structured_outputs": {"regex": f"[a-z]{{3,{5 + i}}}-[0-9]{{{i + 1}}}"}}
    with inside(tiny_served, kv_memory=10 * 2 * 4096, max_model_len=128) as served:

        def texts(request: dict[str, Any]) -> list[str]:
            reply = served.http.post("/v1/completions", json=request)
            assert reply.status_code == 200, reply.text
            return [choice["text"] for choice in reply.json()["choices"]]

        alone = [texts(request) for request in requests]
        found: dict[int, list[str]] = {}
        crowd = [
            threading.Thread(target=lambda i=i: found.update({i: texts(requests[i])})) for i in range(12)
        ]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert served.preemptions() > 0
    assert [found[i] for i in range(12)] == alone
    for i in range(0, 12, 2):
        assert all(re.fullmatch(f"[a-z]{{3,{5 + i}}}-[0-9]{{{i + 1}}}", text) for text in alone[i])


def test_a_sentencepiece_tokenizer(sp_served: Path) -> None:
    """Its pieces carry the spaces, and a leading one is part of the text here."""
    with inside(sp_served, max_model_len=128) as served:
        for pattern in ("[a-z]{3} [0-9]{4}", " two  spaces", "naïve 日本"):
            for prompt in ("Answer:", [1]):  # after no text at all, a space would else be dropped
                fields = {"structured_outputs": {"regex": pattern}, "temperature": 1, "prompt": prompt}
                assert re.fullmatch(pattern, text_of(ask(served, **fields)))


def test_the_official_client(served: Served) -> None:
    client = served.openai()
    reply = client.chat.completions.create(
        model="tiny", messages=ASKED, response_format=FORMAT, temperature=0, max_tokens=80
    )
    jsonschema.validate(json.loads(reply.choices[0].message.content), PERSON)
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    reply = client.completions.create(model="tiny", prompt="Well?", extra_body=extra, max_tokens=9)
    assert reply.choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="look-around") as caught:
        client.completions.create(
            model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "(?=a)"}}
        )
    assert caught.value.code == "invalid_grammar" and caught.value.param == "structured_outputs.regex"


async def test_the_official_client_with_asyncio(served: Served) -> None:
    client = served.async_openai()

    async def person(seed: int) -> Any:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASKED, response_format=FORMAT, seed=seed, max_tokens=80, stream=True
        )
        return json.loads("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))

    for found in await asyncio.gather(*(person(seed) for seed in range(4))):
        jsonschema.validate(found, PERSON)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_random_schemas_on_the_default_model(smol: Path) -> None:
    check_random_schemas(smol, 200, blocks=31, dtype="bfloat16")


def test_20_random_schemas(tiny_served: Path) -> None:
    check_random_schemas(tiny_served, 20, blocks=31, dtype="float32")


def check_random_schemas(folder: Path, count: int, blocks: int, dtype: str) -> None:
    """At temperatures 0 and 1, two choices each, in a pool of `blocks` that preempts: what ends by itself
    validates, and no more than 5 % are cut, each of them the beginning of an answer that fits."""
    schemas = [random_schema(Random(seed)) for seed in range(count)]
    tokenizer = Tokenizer.from_folder(folder)
    source = GrammarSource(lambda: tokenizer, tokenizer.vocab_size)
    memory = blocks * fp32_facts(folder, dtype=dtype).variants[0].bytes_per_token * 16
    options = {"dtype": dtype, "kv_memory": memory, "max_model_len": 480, "max_num_seqs": 32}
    with inside(folder, max_queued=2 * count, **options) as served:
        replies = asyncio.run(_all(served, schemas))
        assert served.preemptions() > 0
        assert served.kv(check=True)["states"]["live"]["blocks"] == 0
    cut = 0
    for schema, reply in replies:
        assert reply.status_code == 200, (schema, reply.text)
        for choice in reply.json()["choices"]:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), schema)
            else:
                cut += 1
                _check_beginning(source, schema, choice["text"])
    assert cut <= 0.05 * 4 * count


async def _all(served: Served, schemas: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    gate = asyncio.Semaphore(40)
    async with served.async_http(600) as http:

        async def one(schema: dict[str, Any], temperature: float) -> tuple[dict[str, Any], Any]:
            body = {
                "prompt": "An example, as JSON: ", "temperature": temperature, "max_tokens": 400, "n": 2,
                "seed": 1, "structured_outputs": {"json": schema},
            }  # fmt: skip
            async with gate:
                return schema, await http.post("/v1/completions", json=body)

        return await asyncio.gather(*(one(schema, t) for schema in schemas for t in (0.0, 1.0)))


def _check_beginning(source: GrammarSource, schema: dict[str, Any], text: str) -> None:
    """A fresh matcher takes the text, whatever tokens it is cut into; of a cut character, nothing."""
    held = source.compile(to_lark("json", json.dumps(schema)))
    matcher = held.matcher([EOS])
    for token in source._tokenizer().encode_rendered(text.rstrip("\ufffd")):
        matcher.advance(token)
