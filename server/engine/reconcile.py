"""Debug mode: after every step, all that is kept in counters is counted again (`--debug`, tests)."""

from __future__ import annotations

from collections.abc import Mapping

from cache.manager import CacheManager
from cache.recount import reconcile as reconcile_cache
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence, Work


def reconcile(manager: CacheManager, scheduler: Scheduler, works: Mapping[str, Work]) -> None:
    """Raises RuntimeError or CacheError that names the first counter that is wrong, with both numbers.

    The cache's counters against a recount of its blocks; each sequence's tokens against the cache's; the
    scheduler's lines against the requests in flight. Milliseconds: for debugging only.
    """
    reconcile_cache(manager)
    for sequence in scheduler.running:
        _reconcile_sequence(manager, sequence)
    for work in works.values():
        unfinished = sum(sequence.finish is None for sequence in work.sequences)
        _same(f"unfinished choices of request {work.request.id!r}", work.unfinished, unfinished)
    alive = [sequence for work in works.values() for sequence in work.sequences if sequence.finish is None]
    running = sum(sequence.slot is not None for sequence in alive)
    _same("running choices", len(scheduler.running), running)
    _same("waiting choices", len(scheduler.waiting), len(alive) - running)
    unstarted = sum(not any(sequence.ran for sequence in work.sequences) for work in works.values())
    _same("waiting requests", len(scheduler.unstarted), unstarted)


def _reconcile_sequence(manager: CacheManager, sequence: Sequence) -> None:
    """Its computed tokens are in the cache, in as few blocks as hold them."""
    name = f"choice {sequence.index} of request {sequence.work.request.id!r}"
    slot = None if sequence.slot is None else manager.state.slots[sequence.slot]
    if slot is None:
        raise RuntimeError(f"the engine's books are wrong: {name} runs without a place in the cache")
    _same(f"cached tokens of {name}", slot.tokens, sequence.computed)
    _same(f"logical blocks of {name}", slot.blocks, manager.state.layout.logical_blocks(sequence.computed))


def _same(name: str, kept: int, counted: int) -> None:
    if kept != counted:
        raise RuntimeError(f"the engine's books are wrong: {name} should be {counted}, not {kept}")
