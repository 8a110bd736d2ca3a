"""`plan`: numbers worked out by hand, from a folder that holds config.json and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
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
from tests.support.command import ROOT, InProcess, check_one_line, headroom
from tests.support.reference import load_reference
from tests.support.stub_hub import StubHub

SMOL = "smollm2-135m"
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    return InProcess(capsys, monkeypatch)


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[..., Path]:
    """A folder with the Llama-3-8B config, changed as asked, and nothing else."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / "config-only"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B | changes))
        return folder

    return write


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


def test_windows_save_nothing_and_it_says_so(here: InProcess, config_only: Callable[..., Path]) -> None:
    plain = json.loads(here("plan", str(config_only()), "--json").stdout)
    assert plain["sliding_window"] == []
    folder = config_only(model_type="mistral", sliding_window=4096)
    done = json.loads(here("plan", str(folder), "--json").stdout)
    assert done["sliding_window"] == [{"tokens": 4096, "layers": 32, "saves_bytes": False}]
    assert done["rows"] == plain["rows"]
    said = " ".join(here("plan", str(folder)).stdout.split())
    assert "32 of 32 layers read only the last 4,096 tokens. It saves no bytes yet" in said
    assert "sliding window" not in here("plan", SMOL).stdout
    folder = config_only(
        model_type="qwen2", use_sliding_window=True, sliding_window=512, max_window_layers=20
    )
    done = json.loads(here("plan", str(folder), "--json").stdout)
    assert done["sliding_window"] == [{"tokens": 512, "layers": 12, "saves_bytes": False}]


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(
    here: InProcess, config_only: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = here("plan", str(config_only()), "--kv-memory", "20GiB")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, lines)) <= columns
    assert "…" not in done.stdout, "nothing is cut"
    rows = [line.split() for line in lines if line.split()[:1] in (["mqa"], ["native"], ["mha"])]
    assert rows[:3] == [
        ["mqa", "1", "16,384", "128", "MiB", "1.00", "GiB", "8.00", "GiB", "160", "lossy"],
        ["native", "8", "131,072", "1.00", "GiB", "8.00", "GiB", "64.0", "GiB", "20"],
        ["mha", "32", "524,288", "4.00", "GiB", "32.0", "GiB", "256", "GiB", "5", "exact"],
    ]


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_help_is_quick(command: str) -> None:
    code = (
        "import sys; from server.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: headroom {command} ")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_what_does_not_fit_is_said_with_what_would(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = here("plan", "--kv-memory", "2GiB", "--users", "16")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "16 users with 8,192 tokens need 2.81 GiB, and there are 2.00 GiB" in said
    for change in ("--context 5824", "--users 11", "--attention mqa", "--kv-memory 2880MiB"):
        assert f"\n  {change} " in done.stdout
    assert "--max-num-seqs" not in said
    assert "serve runs 64 sequences at once" in " ".join(here("plan", "--kv-memory", "9GiB").stdout.split())


def test_json_is_documented(here: InProcess) -> None:
    """Every name in it is explained; the names are a promise, so they are spelled out here too."""
    done = json.loads(here("plan", "--json", "--kv-memory", "64MiB", "--attention", "native").stdout)
    assert list(done) == [
        "model", "family", "layers", "q_heads", "kv_heads", "head_dim", "parameters", "max_context",
        "sliding_window", "context", "block_size", "asked_users", "kv_memory", "rows", "advice",
    ]  # fmt: skip
    assert list(done["rows"][0]) == [
        "mode", "kv_heads", "group", "lossy", "kv_dtype", "bytes_per_token", "block_bytes", "blocks_per_user",
        "memory", "pool", "tail_waste",
    ]  # fmt: skip
    assert list(done["rows"][0]["pool"]) == [
        "blocks", "bytes", "arena_bytes", "users", "longest_context", "fits",
    ]  # fmt: skip
    assert list(done["advice"][0]) == ["mode", "kv_dtype", "users", "bytes_needed", "changes"]
    assert list(done["advice"][0]["changes"][0]) == ["flag", "value", "effect"]
    page = (ROOT / "docs" / "tools.md").read_text()
    assert {name for name in _names(done) if f"`{name}`" not in page} == set()


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


def test_a_hub_id_costs_one_file(tmp_path: Path) -> None:
    repo = {"config.json": json.dumps(LLAMA_3_8B).encode(), "model.safetensors": b"weights"}
    with StubHub({"org/llama": repo}).running() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        done = headroom("plan", "org/llama", "--json", env=env)
        assert hub.downloaded == ["config.json"]
        unknown = headroom("plan", "org/nonesuch", env=env)
    assert json.loads(done.stdout)["rows"][0]["bytes_per_token"] == 16_384
    check_one_line(unknown, "org/nonesuch", "no such repository on the hub")


BAD = {
    "mode": (["--attention", "gqa5"], {}, 1, "gqa5: 5 KV heads cannot share 32 query heads equally"),
    "no mode": (["--attention", " ,"], {}, 2, "name at least one mode"),
    "no such mode": (["--attention", "native,mla"], {}, 1, "'mla' is not known"),
    "twice": (["--attention", "mha,gqa32"], {}, 1, "mha and gqa32 are the same here"),
    "context 0": (["--context", "0"], {}, 2, "--context: '0' is not a whole number of at least 1"),
    "context": (["--context", "8193"], {}, 1, "--context 8193 exceeds the 8192 positions"),
    "users": (["--users", "0"], {}, 2, "at least 1"),
    "no memory": (["--kv-memory", "0"], {}, 1, "--kv-memory 0: must be more than 0 bytes"),
    "memory": (["--kv-memory", "lots"], {}, 2, "'lots' is not a size"),
    "absurd memory": (["--kv-memory", "9" * 400], {}, 2, "more than any machine has"),
    "dtype": (["--dtype", "int8"], {}, 2, "'int8'"),
    "block size": (["--block-size", "0"], {}, 2, "at least 1"),
    "layers": ([], {"num_hidden_layers": 2**31 - 1}, 1, "num_hidden_layers is 2147483647"),
    "heads": ([], {"num_attention_heads": 7}, 1, "must divide num_attention_heads (7)"),
    "family": ([], {"model_type": "mamba"}, 1, "model_type 'mamba' is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(here: InProcess, config_only: Callable[..., Path], case: str) -> None:
    words, changes, code, part = BAD[case]
    check_one_line(here("plan", str(config_only(**changes)), *words), part, code=code)


def test_absurd_loads_are_only_numbers(here: InProcess, config_only: Callable[..., Path]) -> None:
    """A million billion users, blocks of a billion tokens, two billion heads: an answer at once."""
    folder = config_only(num_attention_heads=2**30, num_key_value_heads=2**10, head_dim=128)
    words = ["--users", str(10**17), "--block-size", str(10**9), "--kv-memory", "1TiB"]
    assert here("plan", str(folder), *words).returncode == 0


def test_folders_that_cannot_be_planned(here: InProcess, tmp_path: Path) -> None:
    check_one_line(here("plan", str(tmp_path / "missing")), "no model", "missing")
    check_one_line(here("plan", str(tmp_path)), "holds no config.json")
    (tmp_path / "config.json").write_text('{"model_type": ')
    check_one_line(here("plan", str(tmp_path)), "config.json: is not valid JSON")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    check_one_line(here("plan", str(tmp_path)), "config.json: is not valid JSON")
    (tmp_path / "config.json").write_text("[]")
    check_one_line(here("plan", str(tmp_path)), "holds a JSON list, not an object")
    check_one_line(here("plan", str(tmp_path / "config.json")), "is a file; name the folder")


def test_errors_without_a_command_line() -> None:
    config = resolve_config(SMOL)
    with pytest.raises(ModelError, match="gqa2"):
        make_plan(SMOL, config, PlanOptions(attention=("gqa2",)))
    with pytest.raises(ConfigError, match="--context 9000 exceeds"):
        make_plan(SMOL, config, PlanOptions(context=9000))
