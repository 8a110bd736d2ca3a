"""Which operators an engine gets, and what it is told where it gets none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.native.library import NativeLibrary, NativeUnavailable
from model.sampler_native import NativeSampler, NativeScorer
from server.engine import kernels
from server.engine.build import build_engine
from server.engine.kernels import choose_native, native_source
from server.engine.options import EngineOptions
from tests.support import driving
from tests.support.native import native

CPU = torch.device("cpu")
LIBRARY = NativeLibrary(Path("/some/where.so"), "headroom", "compiled for this CPU")


class Told:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def start(self, label: str, total: int | None) -> None:
        self.labels.append(label)

    def update(self, done: int) -> None:
        raise AssertionError("a compiler does not say how far it is")


def test_the_choice() -> None:
    def never() -> NativeLibrary:
        raise AssertionError("compiled for nothing")

    assert choose_native("torch", CPU, never) == "--kernels torch"
    assert choose_native("auto", torch.device("cuda"), never) == "native operators are for CPUs, this is cuda"
    assert choose_native("auto", CPU, None) == "no native operators were given"
    assert choose_native("auto", CPU, lambda: LIBRARY) is LIBRARY


def test_it_looks_once_and_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What failed is not tried again for the next engine of this run."""
    calls: list[tuple[Path, str | None]] = []

    def fail(cache: Path, recipe: kernels.Recipe, *, say: object) -> NativeLibrary:
        calls.append((cache, recipe.compiler))
        assert callable(say)
        say("compiling")
        raise NativeUnavailable("no C++ compiler found, neither g++ nor clang++")

    monkeypatch.setattr(kernels, "load_native", fail)
    told = Told()
    source = native_source(tmp_path, told, "clang++")
    assert calls == []
    for _ in range(2):
        assert source() == "no C++ compiler found, neither g++ nor clang++"
    assert (calls, told.labels) == ([(tmp_path, "clang++")], ["compiling"])


@pytest.mark.parametrize("asked", ["torch", "auto"])
def test_the_reason_is_among_the_facts(tiny_served: Path, asked: str) -> None:
    """Where the operators are missing, PyTorch computes, and says why."""
    options = EngineOptions(device="cpu", dtype="bfloat16", kv_memory=1 << 20, kernels=asked)
    _, facts = build_engine(options, tiny_served, native=lambda: "none today")
    why = {"torch": "--kernels torch", "auto": "none today"}[asked]
    assert (facts.attention_backend, facts.attention_reason) == ("reference", f"plain PyTorch: {why}")
    assert facts.linear_backend != "native"


@pytest.mark.parametrize(
    "options", [{}, {"weights": "int8"}, {"block_size": 8}, {"kernels": "torch"}], ids=str
)
def test_they_draw_and_score_wherever_they_are(
    tiny_served: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    if not isinstance(native(), NativeLibrary):
        pytest.skip(str(native()))
    calls: list[str] = []
    for kind in (NativeSampler, NativeScorer):
        monkeypatch.setattr(kind, "__call__", watched(kind.__call__, kind.__name__, calls))
    engine, _ = driving.fp32_engine(tiny_served, **options)
    calls.clear()  # what was drawn to try the engine out
    driving.run(engine, [driving.greedy_request([5, 6, 7], 2, logprobs=1, prompt_logprobs=0)])
    drawn = ["NativeSampler", "NativeScorer"]
    assert calls == ([] if "kernels" in options else ["NativeScorer", *drawn, *drawn])


def watched(call: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    """`call`, whose name is noted."""

    def noted(*args: Any) -> Any:
        calls.append(name)
        return call(*args)

    return noted
