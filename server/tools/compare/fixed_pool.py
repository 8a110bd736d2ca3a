"""Experiment B: one pool for every mode, and users until somebody is pushed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from model.modes import Mode
from model.progress import Progress
from server.engine.engine import Engine
from server.tools.compare.drive import Run, Users, drive
from server.tools.compare.dry import DryModel
from server.tools.compare.results import FixedPool, Point
from server.tools.compare.target import Demand, Target, make_engine
from server.tools.compare.work import Arrival, Crowd, powers_of_two


@dataclass(frozen=True, slots=True)
class Growth:
    """1, 2, 4, 8, ... and at last `users` users fill the context of `crowd` at once; then one more comes.

    Everybody first reads a prompt alone; after that the prefix index has it, so that a crowd starts in one
    step and decodes side by side.
    """

    crowd: Crowd
    users: int

    def run(self, engine: Engine, users: Users, on_step: Callable[[], None]) -> tuple[tuple[Point, ...], str]:
        """The curve, and what became of one user too many. Raises RuntimeError where the users do not fit,
        or one more does."""
        points = []
        read = 0
        for count in powers_of_two(self.users):
            self._read(engine, users, read, count - read, on_step)
            read = count
            run = drive(engine, users, self.crowd.arrivals(count), stop_at_trouble=True, on_step=on_step)
            self._expect(run, count, fits=True)
            points.append(Point(count, count / median(run.steps[-self.crowd.window :])))
        more = self.users + 1
        self._read(engine, users, read, 1, on_step)
        run = drive(engine, users, self.crowd.overfull(more), stop_at_trouble=True, on_step=on_step)
        self._expect(run, more, fits=False)
        return tuple(points), run.trouble or ""

    def _read(
        self, engine: Engine, users: Users, first: int, count: int, on_step: Callable[[], None]
    ) -> None:
        """New users read their prompt, one after the other."""
        for user in range(first, first + count):
            drive(engine, users, [Arrival(0, self.crowd.prompt, 1)], first_user=user, on_step=on_step)

    def _expect(self, run: Run, users: int, *, fits: bool) -> None:
        if (run.trouble is None) is not fits:
            found = run.trouble or "found room"
            raise RuntimeError(
                f"of {users} users one {found}, where the dry run said that {self.users} fit; please report "
                "this line"
            )

    def demand(self, pool: int, batch_tokens: int) -> Demand:
        """The engine that it takes, over `pool` physical blocks."""
        most = self.users + 1
        tokens = max(batch_tokens, self.crowd.batch_tokens(most))
        return Demand(pool, most, self.crowd.context, tokens, prefix_cache=True)


@dataclass(frozen=True, slots=True)
class FixedPoolJob:
    """One mode's turn; runs in a process of its own. `users` comes from the dry run."""

    target: Target
    mode: Mode
    growth: Growth
    pool: int  # physical blocks
    steps: int  # that it will take, for the progress bar

    def __call__(self, progress: Progress) -> FixedPool:
        """Raises ModelError or ConfigError; RuntimeError if the run was not what the dry run said."""
        engine, facts = make_engine(
            self.target, self.mode, self.growth.demand(self.pool, self.target.batch_tokens), progress
        )
        progress.start("", self.steps)
        users = Users(self.mode.name, facts.vocab_rows)
        warm = Crowd(self.growth.crowd.context, facts.block_size, self.pool).arrivals(1)
        drive(engine, Users(self.mode.name, facts.vocab_rows, "warm-up"), warm)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            progress.update(done)

        curve, next_user = self.growth.run(engine, users, count)
        return FixedPool(self.mode.name, facts.pool_bytes, self.growth.users, next_user, curve)


def rehearse(model: DryModel, growth: Growth, pool: int, batch_tokens: int) -> int:
    """Runs it without a model; the steps it takes."""
    demand = growth.demand(pool, batch_tokens)
    engine = model.engine(
        pool, demand.users, demand.context, demand.batch_tokens, prefix_cache=demand.prefix_cache
    )
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    growth.run(engine, model.users(), count)
    return steps
