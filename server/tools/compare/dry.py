"""The same scheduler and the same allocator without a model: what a run will hold, known before it.

The runner answers every draw with id 0 and computes nothing. The arena is that of a one-layer model with the
smallest head, as the number of blocks depends on neither; its pages are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cache.copies import BlockCopies
from cache.layout import KVLayout, LayerGroup
from cache.manager import CacheManager
from cache.pool import KVPool
from cache.state import VariantSpec
from model.heads import NativeHeads, Variant
from model.modes import Mode
from server.engine.batch import ForwardBatch, Shape
from server.engine.engine import Engine
from server.engine.runner import Drawn, ModelRunner
from server.engine.scheduler import Limits
from server.tools.compare.drive import Users, drive
from server.tools.compare.work import Crowd, fixed_work

_VOCAB = 1 << 16  # ids are only told apart


class DryRunner(ModelRunner):
    """Draws id 0 for everybody."""

    def __init__(self) -> None:
        pass

    def copy(self, copies: BlockCopies) -> None:
        """Nothing."""

    def run(self, batch: ForwardBatch) -> Drawn:
        """Id 0 for each draw, in the order of `batch.drawn`."""
        return Drawn(np.zeros(len(batch.drawn), dtype=np.int64))

    def try_out(self, shape: Shape) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class DryModel:
    """What a dry run must know of a model in one mode."""

    mode: Mode
    q_heads: int
    block_size: int  # tokens

    def engine(
        self, blocks: int, users: int, context: int, batch_tokens: int, *, prefix_cache: bool = False
    ) -> Engine:
        """An engine over a pool of `blocks` physical blocks that may run `users` sequences at once."""
        cpu = torch.device("cpu")
        name, heads = self.mode.name, self.mode.kv_heads
        layout = KVLayout((LayerGroup((0,), heads, 2),), self.block_size, torch.float16)
        manager = CacheManager(
            layout,
            KVPool(layout, blocks, cpu),
            max_seqs=users,
            max_seq_len=context,
            max_kv_heads=heads,
            variants=[VariantSpec(name, heads)],
            q_heads=self.q_heads,
            prefix_cache=prefix_cache,
        )
        shape = Shape(self.block_size, self.q_heads, {name: Variant(name, NativeHeads(heads))}, cpu, _VOCAB)
        return Engine(DryRunner(), manager, shape, Limits(batch_tokens, users), {name: context})

    def blocks(self, tokens: int) -> int:
        """Physical blocks of one sequence of `tokens` KV tokens."""
        return -(-tokens // self.block_size) * self.mode.kv_heads

    def users(self) -> Users:
        """Users of its mode."""
        return Users(self.mode.name, _VOCAB)


@dataclass(frozen=True, slots=True)
class Pool:
    """Physical blocks: the most that the work held at once (`peak`), and the pool it needs to run as if there
    were no limit (`blocks`), which is more only where the scheduler's reserve at admission asks for it."""

    peak: int
    blocks: int
    steps: int


def size_for_fixed_work(model: DryModel, users: int, context: int, batch_tokens: int) -> Pool:
    """Counts the fixed work's peak, and finds the smallest pool from there up that changes nothing."""
    ample = model.engine(users * (model.blocks(context) + model.mode.kv_heads), users, context, batch_tokens)
    unlimited = _held(ample, model, users, context)
    peak = _peak(ample)
    blocks = max(peak, model.blocks(context))  # room for a context's last token too, which is never written
    while True:
        engine = model.engine(blocks, users, context, batch_tokens)
        if _held(engine, model, users, context) == unlimited and not engine.stats().preemptions:
            return Pool(peak, blocks, len(unlimited))
        blocks += model.mode.kv_heads


def users_that_fit(model: DryModel, pool: int, context: int) -> int:
    """The most users that all fill `context` tokens at once in `pool` physical blocks; at least 1."""
    users = max(1, pool // model.blocks(context - 1))
    while users > 1 and _trouble(model, pool, context, users, overfull=False):
        users -= 1
    while not _trouble(model, pool, context, users + 1, overfull=True):
        users += 1
    return users


def _trouble(model: DryModel, pool: int, context: int, users: int, *, overfull: bool) -> str | None:
    """How the first user without room fares where `users` come at once; None if all find some."""
    crowd = Crowd(context, model.block_size, pool // model.mode.kv_heads)
    work = crowd.overfull(users) if overfull else crowd.arrivals(users)
    engine = model.engine(pool, users, context, users * context)
    return drive(engine, model.users(), work, stop_at_trouble=True).trouble


def _held(engine: Engine, model: DryModel, users: int, context: int) -> list[int]:
    """The bytes that each step of the fixed work held afterwards: equal lists mean equal schedules."""
    held: list[int] = []
    work = fixed_work(users, context)
    drive(engine, model.users(), work, on_step=lambda: held.append(sum(engine.live_bytes().values())))
    return held


def _peak(engine: Engine) -> int:
    return engine.peak_live_bytes() // engine.report().pool.block_bytes
