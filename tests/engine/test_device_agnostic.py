"""Every tensor that the model, the cache and the engine make has an explicit device and dtype.

A normal run on the CPU under a mode that sees each call of a factory function; one that leaves its device or
dtype to a default fails, so the same code runs on any device without touching a global.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from model.attention.reference import ReferenceAttention
from model.config import ModelConfig
from model.convert import AveragedRows, RepeatedRows, Rewrite, aligned_rows
from model.convert_folder import convert_folder
from model.decoder import Decoder
from model.heads import NativeHeads, RepeatHeads, Variant
from model.linear import PlainBackend
from model.progress import Silent
from model.random_weights import random_weights
from server.engine.request import SamplingParams
from server.engine.scoring import Scorer
from server.engine.variants import CalibrationSource
from tests.support.attention import CPU
from tests.support.calibrations import random_calibration
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import prompt_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(str(ROOT / room) for room in ("model", "cache", "server/engine"))
FACTORIES: dict[Callable[..., Any], str] = {
    getattr(torch, name): name
    for name in (
        "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
        "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    )
}  # fmt: skip


class ExplicitFactories(TorchFunctionMode):
    """Collects factory calls from our rooms that name no device or no dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.faults: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            frame = sys._getframe(1)
            while frame.f_back is not None and not frame.f_code.co_filename.startswith(str(ROOT)):
                frame = frame.f_back
            file = frame.f_code.co_filename
            if file.startswith(ROOMS):
                self.seen += 1
                missing = {"device", "dtype"} - {key for key, value in kwargs.items() if value is not None}
                if missing:
                    self.faults.append(
                        f"{file}:{frame.f_lineno}: torch.{FACTORIES[func]} without {sorted(missing)}"
                    )
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"family": "llama", "rope": "llama3"},
        {"family": "qwen3", "rope": "yarn"},
        {"family": "qwen2", "rope": "dynamic"},
        {"family": "mistral", "rope": "linear", "window": 24},
    ],
    ids=lambda checkpoint: str(checkpoint["family"]),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_normal_run_names_device_and_dtype(
    tiny: Callable[..., Path], checkpoint: dict[str, Any], dtype: str
) -> None:
    folder = tiny(**checkpoint)
    with ExplicitFactories() as watched:
        variants = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))
        engine = fp32_engine(
            folder, dtype=dtype, variants=variants, kv_memory=1 << 18, max_batch_tokens=32, max_num_seqs=8
        )[0]
        requests = [
            greedy_request([i % 120 for i in prompt_of(20 + 5 * i)], 25, n=1 + i % 2,
                           variant=("native", "mha")[i % 2], stop_ids=(2,), min_tokens=5,
                           logprobs=(None, 3)[i % 2], prompt_logprobs=(2, None, None)[i % 3],
                           sampling=SamplingParams(
                               i / 4, top_k=5 * (i % 3), top_p=0.9, seed=i, repetition_penalty=1 + i % 2 / 5,
                               frequency_penalty=i % 3, presence_penalty=i % 2,
                               logit_bias=((i, 2.0),) * (i % 2),
                           ))
            for i in range(6)
        ]  # fmt: skip
        run(engine, requests)
        run(engine, requests[:1])  # a prefix hit
        engine._runner.try_out(engine._shape)
        engine.report(check=True)
        engine.blocks(0, 100)
    assert watched.faults == []
    assert watched.seen > 0


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_name_device_and_dtype(tiny: Callable[..., Path], weights: str, dtype: str) -> None:
    folder = tiny(family="qwen2", hidden=80)  # groups that are not whole
    with ExplicitFactories() as watched:
        engine = fp32_engine(folder, dtype=dtype, weights=weights, kv_memory=1 << 18)[0]
        run(engine, [greedy_request([i % 120 for i in prompt_of(20)], 5)])
    assert watched.faults == []
    assert watched.seen > 0


def test_scoring_random_weights_names_device_and_dtype(tiny: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(tiny(family="qwen3"))
    with ExplicitFactories() as watched:
        weights = random_weights(
            config, device=CPU, dtype=torch.bfloat16, linear=PlainBackend("test"), seed=1
        )
        decoder = Decoder(config, weights, CPU)
        scorer = Scorer(decoder, ReferenceAttention(CPU), Variant("mha", RepeatHeads(4)), 50)
        list(scorer.logits([i % 120 for i in prompt_of(40)]))
    assert watched.faults == []
    assert watched.seen > 0


@pytest.mark.parametrize("kind", ["aligned", "aligned-fixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fitting_and_serving_a_reduced_mode_names_device_and_dtype(
    tiny: Callable[..., Path], tmp_path: Path, kind: str, dtype: str
) -> None:
    """Biases and a sliding window too; then the fit is read from its file and served beside the mean's."""
    folder = tiny(family="qwen2", window=24, heads=8, kv_heads=4)
    text = [[(7 * i + j) % 120 for j in range(48)] for i in range(4)]
    source = CalibrationSource(lambda: text, tmp_path, Silent())
    options: dict[str, Any] = {"dtype": dtype, "attention": ("mqa", "gqa2", "native"), "kv_memory": 1 << 18}
    with ExplicitFactories() as watched:
        for _ in range(2):
            engine = fp32_engine(folder, calibration=source, head_map=kind, **options)[0]
        run(engine, [greedy_request([i % 120 for i in prompt_of(40)], 5, variant=v) for v in ("mqa", "gqa2")])
        engine = fp32_engine(folder, head_map="mean", **options)[0]
        run(engine, [greedy_request([i % 120 for i in prompt_of(40)], 5, variant="mqa")])
    assert watched.faults == []
    assert watched.seen > 0


@pytest.mark.parametrize("rewrite", ["aligned-fixed", "mean", "repeat"])
def test_converting_names_device_and_dtype(tiny: Callable[..., Path], tmp_path: Path, rewrite: str) -> None:
    folder = tiny(family="qwen2", heads=8, kv_heads=4)
    config = ModelConfig.from_folder(folder)
    made = random_calibration(config, 2, free=False)
    with ExplicitFactories() as watched:
        rewrites: dict[str, Rewrite] = {
            "aligned-fixed": aligned_rows(made, config),
            "mean": AveragedRows(config, 2),
            "repeat": RepeatedRows(config, 8),
        }
        convert_folder(folder, tmp_path / "out", config, rewrites[rewrite], dtype=None, progress=Silent())
    assert watched.faults == []


def test_the_mode_sees_what_it_should() -> None:
    """A made-up file of the model room that leaves dtype or device out, or gives both."""
    lines = (
        "import torch",
        "torch.zeros(2)",
        "torch.ones(2, dtype=d)",
        "torch.arange(3, dtype=d, device=v)",
    )
    source = "\n".join(lines)
    code = compile(source, str(ROOT / "model" / "made_up.py"), "exec")
    with ExplicitFactories() as watched:
        exec(code, {"d": torch.int64, "v": torch.device("cpu")})
    assert watched.seen == 3
    assert [fault.partition("made_up.py")[2] for fault in watched.faults] == [
        ":2: torch.zeros without ['device', 'dtype']",
        ":3: torch.ones without ['device']",
    ]
