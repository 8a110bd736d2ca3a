"""Debug mode: each counter, made wrong between two steps, ends the engine at the next one and is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.accounts import Account
from cache.errors import CacheError
from cache.layout import KVLayout
from cache.pool import KVPool
from cache.state import Slot
from model.heads import NativeHeads, RepeatHeads, Variant
from server.engine import engine as engine_module
from server.engine.engine import Engine
from server.engine.errors import ConfigError
from server.engine.request import FinishReason
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import manager_of, pool_of, prompt_of

BOTH = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))


def busy(folder: Path, debug: bool = True) -> Engine:
    """Three steps in: one native request of 40 tokens, an mha one of two choices, one that waits for a place,
    and a cached prefix of one that is over."""
    engine = fp32_engine(folder, variants=BOTH, max_num_seqs=3, debug=debug)[0]
    run(engine, [greedy_request(prompt_of(33, 300), 1)])
    engine.add(greedy_request(prompt_of(40, 301), 30))
    engine.add(greedy_request(prompt_of(20, 302), 30, variant="mha", n=2))
    engine.add(greedy_request(prompt_of(10, 303), 30))
    for _ in range(3):
        engine.step()
    assert engine.dead is None and engine.stats().running == 3 and engine.stats().waiting == 1
    return engine


def slot_of(engine: Engine, index: int) -> Slot:
    sequence = engine._scheduler.running[index]
    assert sequence.slot is not None
    slot = manager_of(engine).state.slots[sequence.slot]
    assert slot is not None
    return slot


def account_of(engine: Engine, index: int) -> Account:
    return manager_of(engine).state.accounts[engine._scheduler.running[index].work.account]


def add_to(owner: Callable[[Engine], Any], name: str, amount: int = 1) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        target = owner(engine)
        setattr(target, name, getattr(target, name) + amount)

    return change


def shift_live(engine: Engine) -> None:
    manager_of(engine).state.store.live[:] += (2, -2)


def take_from_line(engine: Engine) -> None:
    engine._scheduler.unstarted.clear()


def a_copy_waits(engine: Engine) -> None:
    engine._scheduler.waiting.append(engine._scheduler.waiting[0])


# What is changed, and how the fault names it. The native request holds 3 * 2 blocks, each mha choice 2 * 4 of
# which one is shared; 2 * 2 are cached, of a pool of 64 MiB in blocks of 4 KiB.
WRONGS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "free": (add_to(lambda e: manager_of(e).state.store, "free", -1), "free blocks should be"),
    "cached": (add_to(lambda e: manager_of(e).state.index, "cached"), "cached blocks should be 4, .* says 5"),
    "live of a variant": (shift_live, "live bytes of native should be 24576, .* says 32768"),
    "peak": (
        lambda e: setattr(manager_of(e).state.store, "most_live", 17),
        "peak live blocks should be 18, .* 17",
    ),
    "blocks of a request": (add_to(lambda e: account_of(e, 0), "blocks", -1), "blocks of request 'test-"),
    "tokens of a request": (add_to(lambda e: account_of(e, 1), "tokens"), "tokens of request 'test-"),
    "exclusive": (add_to(lambda e: account_of(e, 1), "exclusive"), "exclusive blocks of request 'test-"),
    "unfinished": (
        add_to(lambda e: e._scheduler.running[1].work, "unfinished"),
        "unfinished choices of request 'test-[0-9]+' should be 2, not 3",
    ),
    "waiting requests": (take_from_line, "waiting requests should be 1, not 0"),
    "waiting choices": (a_copy_waits, "waiting choices should be 1, not 2"),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_counter_that_is_wrong_ends_the_engine_at_the_next_step(small: Path, wrong: str) -> None:
    engine = busy(small)
    change, message = WRONGS[wrong]
    change(engine)
    events = engine.step()
    assert engine.dead is not None
    with pytest.raises(AssertionError, match=f"books are wrong: {message}"):
        raise AssertionError(engine.dead)
    ends = [event.finish for event in events if event.finish is not None]
    assert ends == [FinishReason.ERROR] * 4, "everybody learns it at once"


@pytest.mark.parametrize("wrong", ["cached tokens", "logical blocks", "running choices"])
def test_what_a_step_left_wrong(small: Path, wrong: str) -> None:
    """Slips of the engine itself: a sequence that forgets a token, an advance that is not booked."""
    engine = busy(small)
    manager, scheduler = manager_of(engine), engine._scheduler
    if wrong == "cached tokens":
        advance = manager.advance
        manager.advance = lambda slot, tokens, chain: advance(slot, tokens - 1, chain)  # type: ignore[method-assign]
        message = "cached tokens of choice 0 of request 'test-[0-9]+' should be 43, not 42"
    elif wrong == "logical blocks":
        extend = manager.extend
        manager.extend = lambda slot, tokens: extend(slot, tokens + 16)  # type: ignore[method-assign]
        message = "logical blocks of choice 0 of request 'test-[0-9]+' should be 3, not 4"
    else:
        engine._scheduler.running.append(scheduler.running[0])
        engine._plan = lambda events: engine_module.Plan((), (), 0)  # type: ignore[method-assign]
        message = "running choices should be 3, not 4"
    engine.step()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(engine.dead)


@pytest.mark.parametrize("wrong", ["cached", "exclusive", "waiting requests"])
def test_without_debug_nothing_is_counted_twice(small: Path, wrong: str, monkeypatch: Any) -> None:
    def recount(*_: Any) -> None:
        raise AssertionError("it recounts")

    monkeypatch.setattr(engine_module, "reconcile", recount)
    engine = busy(small, debug=False)
    WRONGS[wrong][0](engine)
    engine.step()
    assert engine.dead is None


def test_debug_changes_no_answer_and_finds_nothing(small: Path, oracle: Oracle) -> None:
    """Shared prompts, choices, preemptions, aborts and cached blocks in a pool of 16 logical blocks."""
    engine = pool_of(small, 16, variants=BOTH, debug=True, max_num_seqs=6)[0]
    prompts = [prompt_of(20 + i % 3, 310 + i // 2) for i in range(8)]
    requests = [
        greedy_request(p, 40, variant=("mha", "native")[i % 2], n=1 + i % 2) for i, p in enumerate(prompts)
    ]
    dropped = greedy_request(prompt_of(30, 320), 40)
    engine.add(dropped)
    engine.step()
    engine.abort(dropped.id)
    engine.step()
    for answers, prompt in zip(run(engine, requests), prompts, strict=True):
        assert [answer.ids for answer in answers] == [oracle.greedy(prompt, 40)] * len(answers)
    assert engine.dead is None and engine.stats().preemptions > 0


def break_formula(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVLayout, "arena_bytes", lambda layout, total: total * layout.block_bytes)


def break_arena(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVPool, "nbytes", property(lambda pool: 0))


def break_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVPool, "device_bytes", lambda pool: pool.nbytes + 4096)


@pytest.mark.parametrize("broken", [break_formula, break_arena, break_device])
def test_no_start_on_an_arena_of_another_size(
    small: Path, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MiB is 256 blocks of 4,096 bytes, and the scratch block makes 257: 1,052,672."""
    assert (
        fp32_engine(small, kv_memory=1 << 20)[1].pool_audit == "1,052,672 bytes by formula, arena and device"
    )
    broken(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        fp32_engine(small, kv_memory=1 << 20)
    line = str(caught.value)
    numbers = {
        break_formula: ("1,048,576", "1,052,672", "1,052,672"),
        break_arena: ("1,052,672", "0", "1,052,672"),
        break_device: ("1,052,672", "1,052,672", "1,056,768"),
    }[broken]
    assert "formula gives {} bytes, the arena has {}, the device reports {} in".format(*numbers) in line
    assert "\n" not in line and "please report" in line


def test_a_device_that_cannot_be_asked_starts_and_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVPool, "device_bytes", lambda pool: None)
    engine, facts = fp32_engine(small, kv_memory=1 << 20)
    assert facts.pool_audit == "1,052,672 bytes by formula and arena; this device cannot be asked"
    assert engine.report().audit.agrees and engine.report().audit.device_bytes is None


def test_a_check_on_demand_verifies_the_arena_too(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fp32_engine(small, kv_memory=1 << 20)[0]
    assert engine.report(check=True).audit.agrees
    monkeypatch.setattr(KVPool, "device_bytes", lambda pool: 0)
    assert not engine.report().audit.agrees
    with pytest.raises(CacheError, match="device reports 0 in pages"):
        engine.report(check=True)
