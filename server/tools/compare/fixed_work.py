"""Experiment A: the same work in each mode, in a pool that is exactly as large as the work's peak."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from model.modes import Mode
from model.progress import Progress
from server.engine.engine import Engine
from server.tools.compare.drive import Run, Users, drive
from server.tools.compare.dry import Pool
from server.tools.compare.results import FixedWork, Spread
from server.tools.compare.target import Demand, Target, make_engine
from server.tools.compare.work import Arrival, fixed_work

ROUNDS = 3
_WARM_UP = 4  # output tokens of one user before the clock starts


@dataclass(frozen=True, slots=True)
class FixedWorkJob:
    """One mode's turn; runs in a process of its own. `pool` comes from the dry run."""

    target: Target
    mode: Mode
    users: int
    context: int
    pool: Pool

    def __call__(self, progress: Progress) -> FixedWork:
        """Raises ModelError or ConfigError; RuntimeError if the run was not what the dry run said."""
        demand = Demand(
            self.pool.blocks, self.users, self.context, self.target.batch_tokens, prefix_cache=False
        )
        engine, facts = make_engine(self.target, self.mode, demand, progress)
        progress.start("", ROUNDS * self.pool.steps)
        runs = self._runs(engine, facts.vocab_rows, progress)
        predicted = self.pool.peak * facts.block_bytes
        _check(engine, runs, self.pool, predicted)
        rates = tuple(run.output_tokens / run.seconds for run in runs)
        return FixedWork(
            mode=self.mode.name,
            peak_live_bytes=engine.peak_live_bytes(),
            predicted_peak_bytes=predicted,
            pool_bytes=facts.pool_bytes,
            device_bytes=engine.device_bytes(),
            weight_bytes=facts.weight_bytes,
            map_bytes=facts.variants[0].weight_bytes,
            ttft_ms=Spread.of([wait for run in runs for wait in run.first_tokens]),
            itl_ms=Spread.of([gap for run in runs for gap in run.gaps]),
            output_tokens=runs[0].output_tokens,
            rounds=rates,
            output_tokens_per_second=median(rates),
        )

    def _runs(self, engine: Engine, vocab: int, progress: Progress) -> list[Run]:
        work = fixed_work(self.users, self.context)
        warm = Arrival(0, work[0].prompt, min(_WARM_UP, work[0].output))
        drive(engine, Users(self.mode.name, vocab, "warm-up"), [warm])
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            progress.update(done)

        return [
            drive(engine, Users(self.mode.name, vocab, f"round {number}"), work, on_step=count)
            for number in range(ROUNDS)
        ]


def _check(engine: Engine, runs: list[Run], pool: Pool, predicted: int) -> None:
    """The dry run's promises. A difference would be this program's fault, and no number could be trusted."""
    stats = engine.stats()
    steps = {len(run.steps) for run in runs}
    found = (engine.peak_live_bytes(), steps, stats.preemptions, stats.cached_tokens)
    wanted = (predicted, {pool.steps}, 0, 0)
    if found != wanted:
        raise RuntimeError(
            f"(peak live bytes, steps, preemptions, tokens from the prefix index) were {found} where the dry "
            f"run said {wanted}; please report this line"
        )
