"""The two experiments of `compare` against arithmetic: what the dry run predicts, the real engine holds."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.modes import Heads, Mode, parse_mode
from model.progress import Silent
from server.engine.engine import Engine
from server.tools.compare.drive import Run, drive
from server.tools.compare.dry import DryModel, Pool, size_for_fixed_work, users_that_fit
from server.tools.compare.fixed_pool import FixedPoolJob, Growth, rehearse
from server.tools.compare.fixed_work import ROUNDS, FixedWorkJob
from server.tools.compare.results import Spread
from server.tools.compare.target import Target
from server.tools.compare.work import Crowd, fixed_work, powers_of_two

# 9 query heads and 3 KV heads, as the default model has; 2 layers of head_dim 16 in fp32.
HEADS = Heads(9, 3)
MODES = tuple(parse_mode(name, HEADS) for name in ("mqa", "native", "mha"))
BLOCK = 2 * 2 * 16 * 16 * 4  # bytes: K and V, layers, tokens, head_dim, itemsize
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny(heads=9, kv_heads=3, hidden=144, vocab=512)
    cache = tmp_path_factory.mktemp("cache")
    return Target(folder, cache, "mean", "cpu", "float32", block_size=16, threads=None, layers=None)


def dry(mode: Mode, block_size: int = 16) -> DryModel:
    return DryModel(mode, HEADS.q_heads, block_size)


def blocks(tokens: int, mode: Mode, block_size: int = 16) -> int:
    """Physical blocks of one sequence, counted by hand."""
    return -(-tokens // block_size) * mode.kv_heads


def test_the_fixed_work() -> None:
    work = fixed_work(4, 512)
    assert [(a.step, a.prompt, a.output) for a in work] == [
        (0, 384, 128),
        (4, 384, 128),
        (8, 384, 128),
        (12, 384, 128),
    ]


def test_counts_of_the_curve() -> None:
    assert powers_of_two(1) == (1,)
    assert powers_of_two(4) == (1, 2, 4)
    assert powers_of_two(12) == (1, 2, 4, 8, 12)
    assert powers_of_two(36) == (1, 2, 4, 8, 16, 32, 36)


@pytest.mark.parametrize("context", [32, 100, 128, 512])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_crowd_fills_its_context_together(context: int, block_size: int) -> None:
    crowd = Crowd(context, block_size, pool=64)
    first, *_ = arrivals = crowd.arrivals(3)
    assert set(arrivals) == {first}
    assert (first.step, first.prompt + first.output) == (0, context)
    assert 1 <= crowd.window < first.output
    # A whole block of head-room is left: without it the scheduler would let nobody in.
    assert -(-first.prompt // block_size) < -(-(context - 1) // block_size)
    assert crowd.overfull(4)[0].prompt <= first.prompt


def test_times_of_a_run() -> None:
    run = Run(arrived=[1.0, 2.0], tokens=[[1.5, 2.5, 4.5], [5.0]], steps=[1.5, 3.5])
    assert (run.first_tokens, run.gaps) == ([0.5, 3.0], [1.0, 2.0])
    assert (run.output_tokens, run.seconds) == (4, 5.0)


def test_percentiles() -> None:
    """Of 0, 1, ..., 100 s: the median 50 s, the 99th percentile 99 s; of one value, that value."""
    assert Spread.of([float(n) for n in range(101)]) == Spread(50e3, 99e3)
    assert Spread.of([0.25]) == Spread(250.0, 250.0)


@every_mode
@pytest.mark.parametrize(
    ("users", "context", "block_size"), [(4, 512, 16), (1, 128, 16), (3, 129, 8), (1, 129, 16), (2, 256, 64)]
)
def test_the_dry_run_counts_the_peak(mode: Mode, users: int, context: int, block_size: int) -> None:
    """It is when the first user ends, whose last token is never written; each other is 4 steps behind."""
    pool = size_for_fixed_work(dry(mode, block_size), users, context, batch_tokens=256)
    assert pool.peak == sum(blocks(context - 1 - 4 * user, mode, block_size) for user in range(users))
    assert pool.blocks == max(pool.peak, blocks(context, mode, block_size))


@pytest.mark.parametrize(("users", "context", "block_size"), [(4, 512, 16), (4, 64, 16), (6, 129, 8)])
def test_every_mode_has_the_same_schedule(users: int, context: int, block_size: int) -> None:
    """In pools as small as they are made: step for step as many users and tokens, and blocks as KV heads."""
    schedules = set()
    for mode in MODES:
        model = dry(mode, block_size)
        size = size_for_fixed_work(model, users, context, 256)
        engine = model.engine(size.blocks, users, context, 256)
        steps: list[tuple[int, ...]] = []

        def note(engine: Engine = engine, heads: int = mode.kv_heads, to: list[Any] = steps) -> None:
            stats, (live,) = engine.stats(), engine.live_bytes().values()
            to.append(
                (stats.running, stats.waiting, stats.batched_tokens, stats.output_tokens, live // heads)
            )

        drive(engine, model.users(), fixed_work(users, context), on_step=note)
        schedules.add(tuple(steps))
    (steps_of_all,) = schedules
    assert max(running for running, *_ in steps_of_all) == users


@every_mode
def test_a_reserve_at_admission_is_found(mode: Mode) -> None:
    """Four users of 2 blocks each: the last is let in only where a block for each is left over."""
    pool = size_for_fixed_work(dry(mode), 4, 64, batch_tokens=256)
    assert pool.peak == 4 * blocks(63, mode)
    assert pool.peak < pool.blocks <= pool.peak + 4 * mode.kv_heads
    assert pool.blocks % mode.kv_heads == 0


def test_fixed_work_takes_1_3_9(target: Target) -> None:
    users, context = 4, 128
    done = {}
    for mode in MODES:
        pool = size_for_fixed_work(dry(mode), users, context, target.batch_tokens)
        work = FixedWorkJob(target, mode, users, context, pool)(Silent())
        done[mode.name] = work
        assert work.peak_live_bytes == work.predicted_peak_bytes == users * blocks(127, mode) * BLOCK
        assert work.pool_bytes == pool.blocks * BLOCK
        arena = work.pool_bytes + BLOCK  # and the block for padding
        assert work.device_bytes == -(-arena // mmap.PAGESIZE) * mmap.PAGESIZE
        assert work.output_tokens == users * 32
        assert len(work.rounds) == ROUNDS and min(work.rounds) <= work.output_tokens_per_second <= max(
            work.rounds
        )
        assert 0 < work.itl_ms.p50 <= work.itl_ms.p99 and 0 < work.ttft_ms.p50 <= work.ttft_ms.p99
    peaks = [done[name].peak_live_bytes for name in ("mqa", "native", "mha")]
    assert (peaks[1], peaks[2]) == (3 * peaks[0], 9 * peaks[0])


def test_a_run_that_differs_from_the_dry_run_is_an_error(target: Target) -> None:
    mode = MODES[1]
    pool = size_for_fixed_work(dry(mode), 2, 64, target.batch_tokens)
    with pytest.raises(RuntimeError, match="where the dry run said"):
        FixedWorkJob(target, mode, 2, 64, Pool(pool.peak - 3, pool.blocks, pool.steps))(Silent())
    with pytest.raises(RuntimeError, match="where the dry run said"):
        FixedWorkJob(target, mode, 2, 64, Pool(pool.peak, pool.blocks, pool.steps + 1))(Silent())


@every_mode
@pytest.mark.parametrize(
    ("users", "context", "block_size"), [(4, 512, 16), (1, 512, 16), (2, 100, 16), (4, 512, 128)]
)
def test_users_that_fit(mode: Mode, users: int, context: int, block_size: int) -> None:
    """As many as the pool divided by what one holds at the end; the next one is let in and pushes out."""
    pool = users * blocks(context, MODES[2], block_size)
    found = users_that_fit(dry(mode, block_size), pool, context)
    assert found == pool // blocks(context - 1, mode, block_size) == users * 9 // mode.kv_heads
    crowd = Crowd(context, block_size, pool // mode.kv_heads)
    assert rehearse(dry(mode, block_size), Growth(crowd, found), pool, 256) > 0


@pytest.mark.parametrize(("context", "block_size"), [(81, 16), (36, 5), (64, 16), (130, 32)])
def test_a_pool_with_a_rest_holds_no_more_users(context: int, block_size: int) -> None:
    """A last user who is let in and then sits out until another ends has not found room. Whatever is left
    over beside whole users, in blocks."""
    model, each = dry(MODES[0], block_size), blocks(context - 1, MODES[0], block_size)
    for pool in range(2 * each, 4 * each + 1):
        assert users_that_fit(model, pool, context) == pool // each, pool


def test_where_the_next_user_waits(target: Target) -> None:
    """Contexts of two blocks leave no room between being let in and being full: nobody is pushed out."""
    mode = MODES[1]
    growth = Growth(Crowd(32, 16, pool=6), users_that_fit(dry(mode), 18, 32))
    done = FixedPoolJob(target, mode, growth, pool=18, steps=1)(Silent())
    assert (done.users, done.next_user) == (3, "waited")


@every_mode
def test_fixed_pool_is_found_by_running(target: Target, mode: Mode) -> None:
    users, context = 2, 64
    pool = users * blocks(context, MODES[2])
    fits = users * 9 // mode.kv_heads
    crowd = Crowd(context, 16, pool // mode.kv_heads)
    growth = Growth(crowd, fits)
    done = FixedPoolJob(target, mode, growth, pool, steps=1)(Silent())
    assert (done.users, done.next_user, done.pool_bytes) == (fits, "preempted", pool * BLOCK)
    assert [point.users for point in done.curve] == list(powers_of_two(fits))
    assert all(point.tokens_per_second > 0 for point in done.curve)


def test_a_wrong_number_of_users_is_an_error(target: Target) -> None:
    """The real engine, not the dry run, has the last word."""
    mode, context = MODES[1], 64
    pool = 2 * blocks(context, MODES[2])
    crowd = Crowd(context, 16, pool // mode.kv_heads)
    with pytest.raises(RuntimeError, match=r"of 7 users one (waited|preempted), where"):
        FixedPoolJob(target, mode, Growth(crowd, 7), pool, steps=1)(Silent())
    with pytest.raises(RuntimeError, match="of 6 users one found room, where the dry run said that 5 fit"):
        FixedPoolJob(target, mode, Growth(crowd, 5), pool, steps=1)(Silent())
