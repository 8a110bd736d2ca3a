"""The parts of `make bench` that compare an engine with itself: other weights, and n-gram speculation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.bench_engine import drive, kernels
from loadtest.bench_rows import row, told
from loadtest.bench_setup import Found, Setup, run_work, warm
from loadtest.bench_work import Ask, Work, asks, few, repetitive, works_of
from server.engine.engine import Engine
from server.engine.facts import EngineFacts
from server.engine.options import EngineOptions

QUANTISED = ("none", "int8", "int4")  # of --weights
BESIDE_PEERS = ("none", "int4")  # those whose perplexity stands beside others' figures
QUANTISED_WORKS = ("decode1", "decode16", "decode64")
REPETITIVE = (Work("repetitive1", 4, 1, 128, 128), Work("repetitive16", 32, 16, 128, 128))
RANDOM = ("decode1", "decode16")  # only what the model itself repeats can be guessed
SPECULATION_TURNS = 3


def quantised_part(setup: Setup) -> Found:
    """Decoding with each kind of weights, and the perplexity that it has."""
    rows: dict[str, Any] = {}
    for kind in QUANTISED:
        engine, facts = warm(setup, weights=kind)
        found = {
            work.name: run_work(engine, facts, work, setup)[0]
            for work in works_of(QUANTISED_WORKS, setup.requests)
        }
        del engine
        rows[kind] = {"weight_bytes": facts.weight_bytes, "rows": found, **_perplexity(setup.folder, kind)}
    return {"rows": rows}, {}


def perplexity_part(setup: Setup) -> Found:
    """The perplexity alone, where nothing else of it is wanted."""
    return {"rows": {kind: _perplexity(setup.folder, kind) for kind in BESIDE_PEERS}}, {}


def _perplexity(folder: Path, kind: str) -> dict[str, Any]:
    from server.engine.scoring import load_scoring
    from server.text.tokenizer import Tokenizer
    from server.tools.quality import WINDOW, measure_quality, shipped_text

    options = EngineOptions(weights=kind)
    text = shipped_text(Tokenizer.from_folder(folder), WINDOW)
    (found,) = measure_quality(load_scoring(options, folder, WINDOW, native=kernels()), [text])
    return {"perplexity": found.perplexity, "text": found.text, "positions": found.positions}


def speculation_part(setup: Setup) -> Found:
    """Repetitive and random prompts without and with n-gram speculation, in turn, each time fresh ones; of
    each the run with the median rate."""
    engines = {kind: warm(setup, speculate=kind) for kind in ("off", "ngram")}
    rows: dict[str, Any] = {}
    for work in [*few(REPETITIVE, setup.requests), *works_of(RANDOM, setup.requests)]:
        make = repetitive if work.name.startswith("repetitive") else asks
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in engines}
        for turn in range(SPECULATION_TURNS):
            given = make(work, setup.seed + turn, setup.vocab)
            for kind, (engine, facts) in engines.items():
                runs[kind].append(_speculated(engine, facts, work, given))
        rows[work.name] = {
            kind: sorted(each, key=lambda run: float(run["out_tok_s"]))[len(each) // 2]
            for kind, each in runs.items()
        }
    return {"rows": rows}, {}


def _speculated(engine: Engine, facts: EngineFacts, work: Work, given: list[Ask]) -> dict[str, Any]:
    """Figures, steps, and whatever the engine counts of its drafts."""
    before = asdict(engine.stats())
    answers, wall = drive(engine, facts, given, work.concurrency)
    gone = {key: value - before[key] for key, value in asdict(engine.stats()).items()}
    return told(row(work, answers, wall)) | {
        key: value for key, value in gone.items() if key == "steps" or "draft" in key or "accept" in key
    }
