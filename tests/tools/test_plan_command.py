"""`headroom plan`: what it prints, for people and as JSON, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, InProcess, check_one_line, headroom
from tests.support.shapes import LLAMA_3_8B
from tests.support.stub_hub import StubHub

SMOL = "smollm2-135m"


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[..., Path]:
    """A folder with the Llama-3-8B config, changed as asked, and nothing else."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / "config-only"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B | changes))
        return folder

    return write


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
