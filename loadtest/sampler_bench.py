"""What drawing costs, as a share of the model's step: `rows` tokens drawn beside `rows` sequences decoding.

    python -m loadtest.sampler_bench [--model MODEL] [--rows 64] [--rounds 21] [--threads N] [--json FILE]

The model decodes `rows` sequences, greedily; after each step every case draws once, as the engine would, so
that both see the same machine. A case's share is the median over the rounds of its time by that step's. The
logits are the model's own after the shipped texts, or made up where the case says so. Wants an idle machine:
two numbers of a busy one say nothing, and the load is printed beside them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from loadtest.bench_engine import folder_of, kernels, make_engine
from loadtest.command import parser_of, write_json
from model.native.cores import Cores
from model.sampler import Sampler, make_sampling
from model.sampler_native import choose_sampler
from server.engine.engine import Engine
from server.engine.options import EngineOptions
from server.engine.request import Request, SamplingParams
from server.engine.scoring import load_scoring
from server.text.samples import held_out
from server.text.tokenizer import Tokenizer

PROMPT_TOKENS = 32
_WARM_UP = 3  # rounds that are not counted


@dataclass(frozen=True, slots=True)
class Case:
    """Rows to draw from, all with the same parameters."""

    name: str
    logits: str  # a key of `make_logits`
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


CASES = (
    Case("greedy", "model", temperature=0.0),
    Case("temperature 0.8, top_p 0.95", "model", temperature=0.8, top_p=0.95),
    Case("temperature 1", "model"),
    Case("temperature 1, top_k 50", "model", top_k=50),
    Case("temperature 1, min_p 0.05", "model", min_p=0.05),
    Case("temperature 1.5, top_p 0.95", "model", temperature=1.5, top_p=0.95),
    Case("temperature 2", "model", temperature=2.0),
    Case("temperature 0.8, top_p 0.95, 40 ids allowed", "masked", temperature=0.8, top_p=0.95),
    Case("temperature 0.8, top_p 0.95, one id sure", "peaked", temperature=0.8, top_p=0.95),
    Case("top_p 0.95, ids nearly equal", "flat", top_p=0.95),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """A case's time for all rows, and its share of the model's step."""

    name: str
    milliseconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Result:
    """One run; `step_ms` is the median of the model's steps. Loads are those of one minute."""

    rows: int
    vocab: int
    rounds: int
    threads: int
    load_before: float
    load_after: float
    step_ms: float
    costs: tuple[Cost, ...]


def measure(folder: Path, windows: Sequence[Sequence[int]], rows: int, rounds: int) -> Result:
    """`windows` are token ids of texts, each as long as a prompt and `rows` positions at least."""
    load_before = os.getloadavg()[0]
    logits = make_logits(model_logits(folder, windows, rows))
    engine = decoding_engine(folder, windows, rows, rounds + _WARM_UP)
    sampler, cores = choose_sampler(kernels()()), Cores(kernels()())
    draws = [draw_of(case, logits[case.logits], sampler, cores) for case in CASES]
    steps: list[float] = []
    times: list[list[float]] = [[] for _ in CASES]
    for turn in range(rounds + _WARM_UP):
        step = clocked(lambda: len(engine.step()), at_least=rows)
        spent = [clocked(draw) for draw in draws]
        if turn >= _WARM_UP:
            steps.append(step)
            for kept, value in zip(times, spent, strict=True):
                kept.append(value)
    greedy = statistics.median(times[0])  # the engine's step draws too, greedily
    model = [max(step - greedy, 1e-9) for step in steps]
    costs = tuple(
        Cost(
            case.name,
            1e3 * statistics.median(spent),
            statistics.median(value / step for value, step in zip(spent, model, strict=True)),
        )
        for case, spent in zip(CASES, times, strict=True)
    )
    return Result(
        rows=rows,
        vocab=logits["model"].shape[1],
        rounds=rounds,
        threads=torch.get_num_threads(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        step_ms=1e3 * statistics.median(model),
        costs=costs,
    )


def model_logits(folder: Path, windows: Sequence[Sequence[int]], rows: int) -> Tensor:
    """`[rows, V]` fp32: the model's after places that are spread over the windows."""
    scoring = load_scoring(EngineOptions(), folder, max(map(len, windows)), native=kernels())
    scorer = scoring.scorer(scoring.native, max(len(window) for window in windows))
    each = -(-rows // len(windows))
    parts = []
    for window in windows:
        whole = torch.cat(list(scorer.logits(window)))
        places = torch.linspace(len(window) // 16, len(window) - 1, each, dtype=torch.float64)
        parts.append(whole[places.to(device=whole.device, dtype=torch.int64)])
    return torch.cat(parts)[:rows].contiguous()


def make_logits(model: Tensor) -> dict[str, Tensor]:
    """The model's logits, and made-up ones of their shape."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(model.shape, generator=generator, dtype=torch.float32).to(model.device)
    vocab = model.shape[1]
    row = torch.arange(len(model), dtype=torch.int64, device=model.device)
    peaked = noise.clone()
    peaked[row, row * 31 % vocab] = 25.0
    allowed = torch.rand(model.shape, generator=generator, dtype=torch.float32) < 40 / vocab
    allowed[:, 0] = True
    masked = model.masked_fill(~allowed.to(model.device), -torch.inf)
    return {"model": model, "masked": masked, "peaked": peaked, "flat": 0.1 * noise}


def draw_of(case: Case, logits: Tensor, sampler: Sampler, cores: Cores) -> Callable[[], int]:
    """Draws all rows once and waits for the ids; other numbers each time."""
    generator = np.random.default_rng(0)
    ones = np.ones(len(logits))

    @torch.inference_mode()
    def draw() -> int:
        batch = make_sampling(
            temperature=case.temperature * ones,
            top_p=case.top_p * ones,
            top_k=np.full(len(logits), case.top_k, dtype=np.int64),
            min_p=case.min_p * ones,
            key=generator.integers(2**63, size=len(logits)),
            device=logits.device,
        )
        with cores.lent():
            return len(sampler(logits, batch).cpu())

    return draw


def decoding_engine(folder: Path, windows: Sequence[Sequence[int]], rows: int, steps: int) -> Engine:
    """An engine in which `rows` sequences decode for at least so many steps more."""
    engine, facts = make_engine(folder, max_num_seqs=rows, prefix_cache=False)
    tokens = 2 * (rows + steps)  # the first to arrive decode while the last are read
    for row in range(rows):
        window = windows[row % len(windows)]
        start = row * 7 % max(1, len(window) - PROMPT_TOKENS)
        prompt = tuple(window[start : start + PROMPT_TOKENS])
        engine.add(
            Request(
                id=f"row-{row}",
                variant=facts.variants[0].name,
                prompts=(prompt,),
                n=1,
                max_tokens=tokens,
                sampling=SamplingParams(temperature=0.0),
                cache_root=bytes(32),
            )
        )
    while len(engine.step()) < rows:  # one event a sequence, once all of them decode
        pass
    return engine


def clocked(work: Callable[[], int], at_least: int = 1) -> float:
    """Seconds of one call, which must get that much done."""
    start = time.perf_counter()
    done = work()
    spent = time.perf_counter() - start
    if done < at_least:
        raise RuntimeError(f"{done} of {at_least} sequences decoded: the step is not what is measured")
    return spent


def show(result: Result) -> Table:
    """The table that is printed."""
    table = Table(
        title=f"{result.rows} rows of {result.vocab:,}, {result.threads} threads; the model's step takes "
        f"{result.step_ms:.1f} ms; load {result.load_before:.1f} before, {result.load_after:.1f} after"
    )
    table.add_column("parameters of all rows")
    table.add_column("ms", justify="right")
    table.add_column("share of the step", justify="right")
    for cost in result.costs:
        table.add_row(cost.name, f"{cost.milliseconds:.2f}", f"{cost.share:.1%}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = parser_of("sampler_bench", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = folder_of(args.model)
    tokenizer = Tokenizer.from_folder(folder)
    windows = [held_out("prose", tokenizer)[0], held_out("code", tokenizer)[0]]
    result = measure(folder, windows, args.rows, args.rounds)
    Console(width=110).print(show(result))
    if args.json is not None:
        write_json(args.json, asdict(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
