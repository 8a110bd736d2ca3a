"""Grammars of strangers: compiled once, elsewhere, within limits; the loop goes on, whatever they do."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.engine.request import Constraint
from server.text.errors import RequestError
from server.text.grammar import Grammars, Held
from server.text.grammar_ask import read_grammar
from server.text.grammar_matcher import GrammarSource
from server.text.grammar_process import GrammarLimits
from server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

ROWS, EOS = 49152, 2
# Each of these lexer's states is the product of 59 expressions': it does not end in a second, nor in ten.
SLOW = "start: A\nA: " + " & ".join(f"/(?s:.)*{'x' * i}(?s:.)*/" for i in range(1, 60))
RECURSIVE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.fixture(scope="module")
def source(smol: Path) -> GrammarSource:
    tokenizer = Tokenizer.from_folder(smol)
    return GrammarSource(lambda: tokenizer, ROWS)


@pytest.fixture
async def grammars(source: GrammarSource) -> AsyncIterator[Grammars]:
    made = Grammars(source)
    yield made
    await made.close()


async def hold(grammars: Grammars, **structured: Any) -> Held:
    ask = read_grammar(None, structured)
    assert ask is not None
    return await grammars.hold(ask, [EOS])


async def refusal(grammars: Grammars, **structured: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await hold(grammars, **structured)
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_grammar")
    assert error.param == f"structured_outputs.{next(iter(structured))}"
    assert len(error.message) < 600
    return error.message


async def test_what_cannot_be_used_is_refused_in_the_librarys_words(grammars: Grammars) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": "(("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, "no text fits it"),
        ({"regex": "()"}, "only the empty text fits it"),
        ({"regex": "a{1000000000}"}, "repeats more than 100000 times"),
        ({"regex": "((a{0,1000}){0,1000}){0,1000}"}, "too many"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable schema"),
        ({"json": {"type": "weird"}}, "Invalid type: weird"),
        ({"json": {"type": "string", "pattern": "(("}}, "unclosed group"),
        ({"json": {"$ref": "http://127.0.0.1:9/x.json"}}, "does not fetch resources"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch resources"),
        ({"json": {"$ref": "#"}}, "no text fits it"),
        ({"json": RECURSIVE}, "no text fits it"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf constraints are not"),
        ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}}, "max is 2000"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": "start: start"}, "no text fits it"),
        ({"grammar": "root ::= other"}, "not GBNF"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
        ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "too deeply nested"),
        ({"grammar": 'start: "a" <|im_start|> "b"'}, "unknown special token"),
        ({"grammar": 'start: "a" <[5]> "b"'}, "tokens by number"),
    ]  # fmt: skip
    for structured, says in cases:
        assert says in await refusal(grammars, **structured), structured


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "(a?){1000}a{1000}"},
        {"regex": "(a|b)*a(a|b){500}"},
        {"regex": "(.*a){200}"},
        {"regex": "a\x00b\n/c"},
        {"json": {"type": "array", "maxItems": 10**9}},
        {"json": {"type": "string", "maxLength": 2**31}},
        {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
        {"choice": [f"c{i}" for i in range(6000)]},
        {"choice": ["a" * 60_000]},
        {"grammar": 'start: "<[5]>" /<[0-9]>/ // <[6]>\n'},
        {"grammar": '%llguidance {"no_forcing": false}\nstart: "ab"'},
        {"grammar": "root ::= item+\nitem ::= [a-z]{1,3} | \"::=\""},
    ],
)  # fmt: skip
async def test_what_is_large_but_can_be_used(
    grammars: Grammars, source: GrammarSource, structured: dict[str, Any]
) -> None:
    held = await hold(grammars, **structured)
    began = time.perf_counter()
    source.matcher(held.constraint)  # as the engine's thread does it
    assert time.perf_counter() - began < 0.1


async def test_a_grammar_that_takes_too_long_is_ended_and_the_loop_goes_on(grammars: Grammars) -> None:
    await hold(grammars, regex="a")  # the worker is there now
    worker = grammars.worker_pid
    slow = asyncio.create_task(refusal(grammars, grammar=SLOW))
    last, longest = time.perf_counter(), 0.0
    while not slow.done():
        await asyncio.sleep(0.01)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert "more than 1 s or 256 MiB" in await slow
    assert longest < 0.5
    began = time.perf_counter()
    assert "more than 1 s" in await refusal(grammars, grammar=SLOW)  # and it is not tried again
    assert time.perf_counter() - began < 0.2
    assert grammars.worker_pid == worker
    assert await hold(grammars, regex="b")


@pytest.mark.parametrize("limit", [{"memory_bytes": 4 * 2**20}, {"cpu_seconds": 0.1}])
async def test_each_limit_ends_a_grammar_by_itself(source: GrammarSource, limit: dict[str, Any]) -> None:
    """Half a second and 45 MB for this one."""
    dear = {"type": "integer", "multipleOf": 99991}
    grammars = Grammars(source, GrammarLimits(**limit))
    assert "it takes more than" in await refusal(grammars, json=dear)
    await grammars.close()
    roomy = Grammars(source, GrammarLimits(cpu_seconds=60))
    assert await hold(roomy, json=dear)
    await roomy.close()


async def test_a_second_equal_request_compiles_nothing(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first = await hold(grammars, json=schema)
    again = await hold(grammars, json=schema)
    assert grammars.compilations == 1
    assert again.compiled is first.compiled and again.constraint == first.constraint
    both = await asyncio.gather(hold(grammars, regex="x+"), hold(grammars, regex="x+"))
    assert grammars.compilations == 2 and both[0].compiled is both[1].compiled
    await refusal(grammars, regex="((")
    await refusal(grammars, regex="((")
    assert grammars.compilations == 3
    await hold(grammars, json={"type": "array"})
    assert grammars.compilations == 4


async def test_only_so_many_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.text.grammar._KEPT", 2)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        await hold(grammars, regex=pattern)
    assert grammars.compilations == 4  # a, b, c, and b again: a was used since
    monkeypatch.setattr("server.text.grammar._KEPT_BYTES", 1)
    await hold(grammars, regex="d")
    await hold(grammars, regex="a")
    assert grammars.compilations == 6


async def test_a_client_that_leaves_takes_nothing_with_it(grammars: Grammars) -> None:
    await hold(grammars, regex="a")
    leaving = asyncio.create_task(hold(grammars, regex="(a|b)*a(a|b){400}"))
    staying = asyncio.create_task(hold(grammars, regex="(a|b)*a(a|b){400}"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert isinstance((await staying).constraint, Constraint)
    assert grammars.compilations == 2
    assert await hold(grammars, regex="c")


async def test_what_nobody_waits_for_any_more_is_not_begun(grammars: Grammars) -> None:
    await hold(grammars, regex="a")
    running = asyncio.create_task(refusal(grammars, grammar=SLOW))
    await asyncio.sleep(0.05)
    leaving = [asyncio.create_task(hold(grammars, regex=f"a{{{i}}}")) for i in range(1, 21)]
    await asyncio.sleep(0.05)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    back = asyncio.create_task(hold(grammars, regex="a{7}"))  # another who asks for the same
    await asyncio.wait_for(asyncio.gather(running, back), 10)
    assert grammars.compilations == 3


async def test_one_that_was_begun_is_kept_though_its_client_left(grammars: Grammars) -> None:
    leaving = asyncio.create_task(hold(grammars, regex="a"))
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert await hold(grammars, regex="b")
    assert await hold(grammars, regex="a")
    assert grammars.compilations == 2


async def test_only_so_many_wait(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.text.grammar._WAITING", 3)
    await hold(grammars, regex="a")
    tasks = [asyncio.create_task(hold(grammars, regex=f"b{{{i}}}")) for i in range(1, 4)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        await hold(grammars, regex="c")
    assert (caught.value.status, caught.value.code) == (503, "too_many_grammars")
    assert await hold(grammars, regex="a"), "it is there already"
    assert await hold(grammars, regex="b{2}"), "it is waited for already"
    await asyncio.gather(*tasks)
    assert await hold(grammars, regex="c")


async def test_only_so_much_is_in_use(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers hold counts as much as what is kept for others."""
    monkeypatch.setattr("server.text.grammar._KEPT", 1)
    held = [await hold(grammars, regex=f"a{{{i}}}") for i in range(1, 6)]
    monkeypatch.setattr("server.text.grammar._HELD_BYTES", sum(one.compiled.nbytes for one in held))
    with pytest.raises(RequestError, match="in use take") as caught:
        await hold(grammars, regex="b")
    assert (caught.value.status, caught.value.code) == (503, "too_many_grammars")
    del held[:2], caught
    gc.collect()
    assert await hold(grammars, regex="b"), "nothing is remembered against it"


async def test_what_is_only_kept_makes_room(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that make a kept grammar grow must not keep everybody from a new one."""
    (await hold(grammars, regex="a")).compiled.steps = 10_000
    (await hold(grammars, regex="b")).compiled.steps = 10_000
    monkeypatch.setattr("server.text.grammar._KEPT_BYTES", 15 * 2**20)
    monkeypatch.setattr("server.text.grammar._HELD_BYTES", 20 * 2**20)
    assert await hold(grammars, regex="c")


async def test_a_killed_worker_is_replaced(grammars: Grammars) -> None:
    await hold(grammars, regex="a")
    assert grammars.worker_pid is not None
    os.kill(grammars.worker_pid, signal.SIGKILL)
    assert await hold(grammars, regex="b")
    killed = grammars.worker_pid
    assert killed is not None
    os.kill(killed, signal.SIGSTOP)  # so that it has the message, and no answer yet
    waiting = asyncio.create_task(hold(grammars, regex="c"))
    await asyncio.sleep(0.1)
    os.kill(killed, signal.SIGKILL)
    assert await waiting
    assert grammars.worker_pid != killed


async def test_a_worker_that_hangs_is_ended(source: GrammarSource) -> None:
    grammars = Grammars(source, GrammarLimits(wall_seconds=3))
    await hold(grammars, regex="a")
    assert grammars.worker_pid is not None
    os.kill(grammars.worker_pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match="try again"):
        await hold(grammars, regex="b")
    assert await hold(grammars, regex="b")  # the same: what was given up is not kept as a refusal
    await grammars.close()
    assert grammars.worker_pid is None


async def test_nothing_is_started_before_it_is_asked_for(source: GrammarSource) -> None:
    grammars = Grammars(source)
    assert grammars.worker_pid is None
    await grammars.close()
