"""From options to an engine: sizes, refusals and the reasons given."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.errors import ModelError
from model.heads import NativeHeads, RepeatHeads, Variant
from model.native.target import cpu_flags
from server.engine import build, device, loading, sizing
from server.engine.build import build_engine
from server.engine.device import choose_device, choose_dtype
from server.engine.errors import ConfigError
from server.engine.options import EngineOptions
from server.engine.sizing import size_pool
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import manager_of

CPU = torch.device("cpu")
# `small`: 2 layers, 2 KV heads of 16, fp32: a block of 16 tokens takes 2 * 2 * 16 * 16 * 4 bytes.
BLOCK = 4096
BOTH = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as refused:
        build_engine(EngineOptions(**{"dtype": "float32"} | options), folder)  # type: ignore[arg-type]
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_facts_say_what_was_built(small: Path) -> None:
    engine, facts = fp32_engine(small, kv_memory=10 * BLOCK + 100, variants=BOTH, max_num_seqs=8)
    assert (facts.num_layers, facts.q_heads, facts.kv_heads, facts.group, facts.head_dim) == (2, 4, 2, 2, 16)
    assert (facts.total_blocks, facts.block_bytes, facts.pool_bytes) == (10, BLOCK, 10 * BLOCK)
    assert (facts.vocab_rows, facts.eos_ids) == (512, frozenset({2}))
    assert (facts.dtype, facts.kv_dtype, facts.dtype_reason) == ("float32", "float32", "as asked")
    assert facts.weight_bytes == sum(
        4 * n for n in (512 * 64 * 2, 64 * 5, 2 * 64 * 64 * 2, 2 * 2 * 32 * 64, 2 * 3 * 64 * 128)
    )
    native, mha = facts.variants
    assert (native.kv_heads, native.bytes_per_token, native.tokens_that_fit) == (2, 512, 80)
    assert (mha.kv_heads, mha.group, mha.bytes_per_token, mha.tokens_that_fit) == (4, 1, 1024, 32)
    assert (native.max_len, mha.max_len, facts.max_model_len, facts.clamped_from) == (80, 32, 80, 256)
    assert native.full_length_users == 1.0
    assert "mha takes 4 KV heads" in facts.warnings[0] and "--kv-memory to 80KiB for all" in facts.warnings[0]
    assert manager_of(engine).total == 10
    assert len(facts.fingerprint) == 64


def test_a_pool_that_holds_the_context_is_not_clamped(small: Path) -> None:
    facts = fp32_engine(small, kv_memory=64 * BLOCK)[1]
    assert (facts.max_model_len, facts.clamped_from, facts.warnings) == (256, None, ())
    assert facts.variants[0].full_length_users == 2.0
    facts = fp32_engine(small, kv_memory=64 * BLOCK, max_model_len=100)[1]
    assert (facts.max_model_len, facts.clamped_from) == (100, None)
    assert facts.variants[0].full_length_users == 5.12


def test_a_context_that_does_not_fit(small: Path) -> None:
    """Asked for, it is refused with need, have, the largest that fits, and the flag to turn."""
    message = refusal(small, kv_memory=16 * BLOCK, max_model_len=200)
    assert message == (
        "--max-model-len 200 needs a KV pool of 104 KiB and there are 64.0 KiB (as asked); the largest that "
        "fits is 128: lower --max-model-len, or raise --kv-memory to 104KiB"
    )
    fp32_engine(small, kv_memory=106496, max_model_len=200)
    fp32_engine(small, kv_memory=16 * BLOCK, max_model_len=128)


def test_each_mode_has_its_own_limit(small: Path) -> None:
    """10 blocks: 160 tokens of mqa, 80 of native (2 KV heads), 32 of mha (4)."""
    three = {"attention": ("native", "mqa", "mha"), "head_map": "mean", "kv_memory": 10 * BLOCK}
    facts = fp32_engine(small, **three)[1]
    assert [v.max_len for v in facts.variants] == [80, 160, 32]
    assert (facts.max_model_len, facts.clamped_from) == (80, 256)
    assert facts.warnings[0] == (
        "mha takes 4 KV heads: the pool holds 32 tokens of one sequence, not 80; raise --kv-memory to 80KiB "
        "for all"
    )
    assert "lossy" in facts.warnings[1] and len(facts.warnings) == 2
    facts = fp32_engine(small, **three, max_model_len=60)[1]  # fits the first mode; mha has its own clamp
    assert [v.max_len for v in facts.variants] == [60, 60, 32]
    assert "not 60; raise --kv-memory to 64KiB for all" in facts.warnings[0]
    message = refusal(small, **three | {"attention": ("mha", "mqa")}, max_model_len=60)
    assert "the largest that fits is 32" in message
    facts = fp32_engine(small, **three | {"kv_memory": 3 * BLOCK})[1]
    assert [v.max_len for v in facts.variants] == [16, 48, 0]
    assert "mha takes 4 KV heads: the pool cannot hold a single block of 16 tokens" in facts.warnings[0]


def test_no_room_for_one_block(small: Path) -> None:
    message = refusal(small, kv_memory=BLOCK)
    assert message == (
        "the KV pool of 4.00 KiB (as asked) cannot hold a single block of 16 tokens, which takes 8.00 KiB; "
        "give at least --kv-memory 8KiB, or a smaller --block-size"
    )
    refusal(small, kv_memory=2 * BLOCK - 1)
    assert fp32_engine(small, kv_memory=2 * BLOCK)[1].max_model_len == 16


def test_what_cannot_work_is_refused_before_the_weights_are_read(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loading, "load_weights", never)
    refusal(small, kv_memory=10)
    refusal(small, kernels="cpp")
    refusal(small, speculate="llm")
    refusal(small, kv_memory=16 * BLOCK, max_model_len=200)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 65, "max_batch_tokens": 64}, "--max-batch-tokens 64 is less than --max-num-seqs"),
        ({"weights": "int3"}, "--weights int3: must be one of none, int8, int4"),
        ({"kernels": "cpp"}, "--kernels cpp: must be auto or torch"),
        ({"speculate": "llm"}, "--speculate llm: must be ngram or off"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0: must be at least 1"),
        ({"block_size": 0}, "--block-size 0: must be at least 1"),
        ({"max_batch_tokens": -1}, "--max-batch-tokens -1"),
        ({"kv_memory": 0}, "--kv-memory 0: must be more than 0"),
        ({"kv_memory": 1 << 20, "kv_fraction": 0.5}, "exclude each other"),
        ({"kv_fraction": 0.0}, "--kv-fraction 0.0: must be above 0"),
        ({"kv_fraction": 1.5}, "--kv-fraction 1.5"),
        ({"device": "tpu"}, "--device tpu: must be auto, cpu or cuda"),
        ({"dtype": "int8"}, "--dtype int8: must be auto, bfloat16, float16, float32"),
        ({"max_model_len": 1, "kv_memory": 1 << 20}, "--max-model-len 1: must be at least 2"),
        ({"max_model_len": 257, "kv_memory": 1 << 20}, "--max-model-len 257 exceeds the 256 positions"),
    ],
)
def test_options_that_cannot_work(small: Path, options: dict[str, object], words: str) -> None:
    assert words in refusal(small, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(small: Path) -> None:
    assert "--device cuda: PyTorch finds no NVIDIA GPU" in refusal(small, device="cuda")
    assert choose_device("auto") == CPU


def test_default_step(small: Path) -> None:
    assert fp32_engine(small)[1].max_batch_tokens == 256
    assert fp32_engine(small, max_num_seqs=300)[1].max_batch_tokens == 300
    assert fp32_engine(small, max_batch_tokens=512)[1].max_batch_tokens == 512


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        build_engine(EngineOptions(), tmp_path / "nowhere")


def test_default_pool() -> None:
    """On a CPU the smaller of 2 GiB and a quarter of free memory; on a GPU a share of what is left."""
    gib = 1 << 30
    assert size_pool(None, None, 100 * gib, on_gpu=False).nbytes == 2 * gib
    quarter = size_pool(None, None, 4 * gib, on_gpu=False)
    assert (quarter.nbytes, quarter.reason) == (gib, "a quarter of the 4.00 GiB of free memory")
    assert size_pool(None, None, 10 * gib, on_gpu=True).nbytes == 9 * gib
    assert size_pool(None, 0.5, 10 * gib, on_gpu=True).nbytes == 5 * gib
    assert size_pool(None, 0.5, 10 * gib, on_gpu=False).nbytes == 5 * gib
    assert size_pool(123, None, 10 * gib, on_gpu=True).nbytes == 123


def test_n2_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits only where the CPU computes in bfloat16 and the checkpoint is 16-bit."""
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx512f", "avx512_bf16"}))
    assert choose_dtype("auto", torch.bfloat16, CPU).dtype is torch.bfloat16
    assert choose_dtype("auto", torch.float16, CPU).dtype is torch.bfloat16
    assert "avx512_bf16" in choose_dtype("auto", torch.bfloat16, CPU).reason
    assert choose_dtype("auto", torch.float32, CPU).dtype is torch.float32
    assert choose_dtype("auto", None, CPU).dtype is torch.float32
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx2"}))
    choice = choose_dtype("auto", torch.bfloat16, CPU)
    assert choice.dtype is torch.float32
    assert choice.reason == "the checkpoint is bfloat16, but this CPU has neither amx_bf16 nor avx512_bf16"
    assert choose_dtype("float16", torch.bfloat16, CPU).dtype is torch.float16


def test_16_bit_checkpoints_run_in_their_dtype_or_fp32(tiny: Callable[..., Path]) -> None:
    folder = tiny(dtype=torch.bfloat16)
    _, facts = build_engine(EngineOptions(device="cpu", kv_memory=1 << 20), folder)
    expected = "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16"} else "float32"
    assert facts.dtype == facts.kv_dtype == expected
    assert "the checkpoint is bfloat16" in facts.dtype_reason


@pytest.mark.parametrize("memory", [8 * BLOCK, None])
def test_positions_that_no_pool_holds_cost_nothing(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, memory: int | None
) -> None:
    """Tables for two billion positions would take 128 GiB."""
    monkeypatch.setattr(build, "DEFAULT_POOL", 8 * BLOCK)
    monkeypatch.setattr(sizing, "DEFAULT_POOL", 8 * BLOCK)
    folder = tiny(max_position_embeddings=2**31 - 1)
    many = (Variant("native", NativeHeads(2)), Variant("mqa", NativeHeads(1)))
    engine, facts = fp32_engine(folder, variants=many, kv_memory=memory)
    assert [variant.max_len for variant in facts.variants] == [64, 128]
    assert engine._runner._decoder.rope._cos.shape[0] == 128
    engine, _ = fp32_engine(folder, kv_memory=memory)
    (answer,) = run(engine, [greedy_request([5] * 60, 4)])[0]
    assert (len(answer.ids), answer.error) == (4, None)


def test_a_large_pool_takes_no_memory_until_it_is_used(small: Path) -> None:
    begin = time.monotonic()
    engine, facts = fp32_engine(small, kv_memory=4 << 30)
    assert facts.total_blocks == (4 << 30) // BLOCK
    assert engine.report().audit.arena_bytes == (4 << 30) + BLOCK
    assert time.monotonic() - begin < 5
