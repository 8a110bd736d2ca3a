"""`plan`: numbers worked out by hand, from a folder that holds config.json and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.expected import parameter_count
from model.fetch import resolve_config
from server.engine.errors import ConfigError
from server.tools.plan import Plan, PlanOptions, Row, make_plan
from server.tools.plan_advice import Advice, advise
from tests.support.reference import load_reference
from tests.support.shapes import LLAMA_3_8B

SMOL = "smollm2-135m"


def smol_plan(**options: Any) -> Plan:
    return make_plan(SMOL, resolve_config(SMOL), PlanOptions(**options))


def row_of(plan: Plan, mode: str, dtype: str) -> Row:
    (row,) = [row for row in plan.rows if (row.mode, row.kv_dtype) == (mode, dtype)]
    return row


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_smollm2(dtype: str, size: int) -> None:
    """30 layers, head_dim 64: 2 * 30 * 64 * 2 = 7,680 bytes a token and KV head in bf16."""
    plan = smol_plan()
    rows = [row_of(plan, mode, dtype) for mode in ("mqa", "native", "mha")]
    assert [row.bytes_per_token for row in rows] == [each * size // 2 for each in (7_680, 23_040, 69_120)]
    assert {row.block_bytes for row in rows} == {122_880 * size // 2}
    assert [(row.kv_heads, row.group, row.lossy) for row in rows] == [
        (1, 9, True),
        (3, 3, False),
        (9, 1, False),
    ]
    assert [row.blocks_per_user for row in rows] == [512, 1536, 4608]
    for row in rows:
        assert [memory.users for memory in row.memory] == [1, 8, 64]
        assert [m.bytes for m in row.memory] == [m.users * 8192 * row.bytes_per_token for m in row.memory]
        assert row.pool is None
    assert len(plan.rows) == 9 and plan.rows[0].kv_dtype == "bfloat16"


def test_llama_3_8b() -> None:
    plan = make_plan("m", ModelConfig.from_dict(LLAMA_3_8B), PlanOptions(kv_memory=80 << 30))
    rows = {row.mode: row for row in plan.rows if row.kv_dtype == "bfloat16"}
    assert {mode: row.bytes_per_token for mode, row in rows.items()} == {
        "mqa": 16_384,
        "gqa2": 32_768,
        "gqa4": 65_536,
        "native": 131_072,
        "gqa16": 262_144,
        "mha": 524_288,
    }
    assert plan.parameters == 8_030_261_248  # as its model card says
    # A user takes 1 GiB natively, so 80 GiB hold 80.
    pools = {mode: row.pool for mode, row in rows.items()}
    assert pools["native"] is not None and pools["mha"] is not None and pools["mqa"] is not None
    assert [pools[mode].users for mode in ("mqa", "native", "mha")] == [640, 80, 20]  # type: ignore[union-attr]
    assert (pools["native"].blocks, pools["native"].bytes) == (327_680, 80 << 30)
    assert pools["native"].arena_bytes == (80 << 30) + 262_144


def test_partly_filled_blocks_count_whole() -> None:
    """33 tokens take 3 blocks of 16 for each of 3 heads; 100 blocks hold 11 such users and one block more."""
    plan = smol_plan(
        context=33, users=5, kv_memory=100 * 122_880 + 5, dtypes=("bfloat16",), attention=("native",)
    )
    (row,) = plan.rows
    assert row.blocks_per_user == 9
    assert [(m.users, m.bytes) for m in row.memory] == [(1, 9 * 122_880), (5, 45 * 122_880)]
    assert row.pool is not None
    assert (row.pool.blocks, row.pool.users, row.pool.fits) == (100, 11, True)
    assert row.pool.longest_context == 6 * 16  # 100 blocks are 33 logical ones, 6 for each of 5 users


def test_tail_waste() -> None:
    """(B - 1) / 2 empty tokens on average, whatever the mode."""
    plan = smol_plan(block_size=20)
    for mode, per_token in (("mqa", 7_680), ("native", 23_040), ("mha", 69_120)):
        tails = row_of(plan, mode, "bfloat16").tail_waste
        assert [(t.block_size, t.tokens) for t in tails] == [
            (8, 3.5), (16, 7.5), (20, 9.5), (32, 15.5), (64, 31.5), (128, 63.5),
        ]  # fmt: skip
        assert [t.bytes for t in tails] == [t.tokens * per_token for t in tails]


def test_the_checkpoint_s_own_dtype_comes_first() -> None:
    for own, first in (("float16", "float16"), ("float32", "float32"), (None, "float32")):
        config = ModelConfig.from_dict(LLAMA_3_8B | {"torch_dtype": own})
        rows = make_plan("m", config, PlanOptions()).rows
        assert rows[0].kv_dtype == first
        assert {row.kv_dtype for row in rows} == {"bfloat16", "float16", "float32"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"family": "llama", "tie_word_embeddings": True},
        {"family": "llama", "attention_bias": True, "mlp_bias": True},
        {"family": "qwen2"},
        {"family": "qwen3", "head_dim": 32},
    ],
)
def test_parameters_are_those_of_transformers(tiny: Callable[..., Path], arguments: dict[str, Any]) -> None:
    folder = tiny(**arguments)
    parameters = load_reference(folder).model.parameters()
    assert parameter_count(ModelConfig.from_folder(folder)) == sum(each.numel() for each in parameters)


def advice_for(**options: Any) -> tuple[Advice, ...]:
    config = resolve_config(SMOL)
    plan = make_plan(SMOL, config, PlanOptions(**options))
    return advise(config, plan, options.get("attention", ()))


def fits(options: dict[str, Any], changed: dict[str, Any]) -> bool:
    """Whether the first row of a plan with these options fits."""
    pool = smol_plan(**(options | changed)).rows[0].pool
    assert pool is not None
    return pool.fits


def test_every_advice_is_enough_and_no_more() -> None:
    """Followed, the plan fits; with one token, user or byte more (or less memory), it does not."""
    options: dict[str, Any] = {
        "context": 4000, "users": 16, "kv_memory": 1000 << 20,
        "dtypes": ("float32",), "attention": ("native",),
    }  # fmt: skip
    assert not fits(options, {})
    (advice,) = advice_for(**options)
    changes = {change.flag: change.value for change in advice.changes}
    assert set(changes) == {"--context", "--users", "--kv-memory", "--attention"}
    context, users = int(changes["--context"]), int(changes["--users"])
    assert fits(options, {"context": context}) and not fits(options, {"context": context + 1})
    assert fits(options, {"users": users}) and not fits(options, {"users": users + 1})
    need = advice.bytes_needed
    assert need == 16 * 250 * 3 * 245_760  # 250 blocks of 16 tokens, 3 heads
    assert changes["--kv-memory"] == f"{need // 1024}KiB"
    assert fits(options, {"kv_memory": need}) and not fits(options, {"kv_memory": need - 1})
    assert changes["--attention"] == "mqa"
    assert fits(options, {"attention": ("mqa",)})
    (advice,) = advice_for(**options | {"kv_memory": 1500 << 20})
    assert {change.flag: change.value for change in advice.changes}["--dtype"] == "bfloat16"
    assert fits(options | {"kv_memory": 1500 << 20}, {"dtypes": ("bfloat16",)})


def test_advice_is_about_what_was_asked() -> None:
    memory = 600 << 20  # bf16 at 8,192 tokens: mqa 60 MiB, native 180, mha 540
    assert advice_for(kv_memory=memory) == ()
    advice = advice_for(kv_memory=memory, users=4)
    assert [(each.mode, each.kv_dtype) for each in advice] == [("native", "bfloat16")]
    advice = advice_for(kv_memory=memory, users=2, attention=("mha", "mqa", "native"))
    assert [each.mode for each in advice] == ["mha"]
    (kept,) = [change for change in advice[0].changes if change.flag == "--attention"]
    assert (kept.value, kept.effect) == ("native", "360 MiB, the same answers")
    assert advice_for(users=10**6) == (), "no memory was named, so nothing is short"
    # Less than one block for each user: no context is long enough, no number of users small enough.
    (advice_1,) = advice_for(kv_memory=122_880, attention=("native",))
    assert [change.flag for change in advice_1.changes] == ["--kv-memory"]


def test_errors_without_a_command_line() -> None:
    config = resolve_config(SMOL)
    with pytest.raises(ModelError, match="gqa2"):
        make_plan(SMOL, config, PlanOptions(attention=("gqa2",)))
    with pytest.raises(ConfigError, match="--context 9000 exceeds"):
        make_plan(SMOL, config, PlanOptions(context=9000))
