"""OpenVINO GenAI's engine on the benchmarks' workloads; run by its own Python, without HTTP.

    ov-venv/bin/python -m loadtest.peer_openvino --gguf FILE --seed N --json FILE [--texts FILE]

It is driven as ours is (`loadtest/bench_engine.py`): the same prompts of ids, as many at a time, step by
step, greedy, and no answer ends before its last token. Its API: openvinotoolkit.github.io/openvino.genai.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from loadtest.bench_rows import Answer, BenchError, closed_loop, row, said, told
from loadtest.bench_work import VOCAB, WARM_UP, Ask, add_flags, asks, works_of
from loadtest.command import parser_of, write_both

CACHE_GB = 2  # as much as ours has by default
SEATS = 64


def load(model: Path) -> Any:
    """The pipeline, in bf16 where this CPU has it, with its prefix cache on as ours is."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = SEATS
    scheduler.enable_prefix_caching = True
    return genai.ContinuousBatchingPipeline(
        str(model), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}, {}
    )


class Driver:
    """Adds requests and reads their new tokens after each step."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._handles: dict[int, Any] = {}
        self._next = 0

    def drive(self, given: Sequence[Ask], concurrency: int) -> tuple[list[Answer], float]:
        """The answers to `given`, `concurrency` at a time, and the seconds they took."""
        self._handles.clear()
        return closed_loop(given, concurrency, self._add, self._step)

    def _add(self, index: int, ask: Ask) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = ask.output
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.array([ask.prompt], dtype=np.int64))
        self._handles[index] = self._pipe.add_request(self._next, ids, config)
        self._next += 1

    def _step(self) -> list[tuple[int, list[int], bool]]:
        self._pipe.step()
        news = []
        for index, handle in list(self._handles.items()):
            ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    ids += output.generated_ids
            ended = handle.get_status() != genai.GenerationStatus.RUNNING
            if ended:
                del self._handles[index]
            if ids or ended:
                news.append((index, ids, ended))
        return news


def main() -> int:
    """Measure; the exit code."""
    parser = parser_of("peer_openvino", __doc__)
    parser.add_argument("--gguf", type=Path, required=True, help="the checkpoint, F16")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="of the model (default: %(default)s)")
    add_flags(parser, kept=True)
    options = parser.parse_args()
    driver = Driver(load(options.gguf))
    rows, texts = {}, {}
    driver.drive(asks(WARM_UP, options.seed, options.vocab), 1)
    for work in works_of(options.workloads.split(","), options.requests):
        given = asks(work, options.seed, options.vocab)
        if work.shared:
            driver.drive(given[:1], 1)
        try:
            answers, wall = driver.drive(given, work.concurrency)
            rows[work.name] = told(row(work, answers, wall))
        except BenchError as error:
            print(f"not measured: {error}", file=sys.stderr)
            return 1
        texts[work.name] = said(given, answers)
    found = {"version": genai.__version__.partition("-")[0], "rows": rows}
    write_both(options, found, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
