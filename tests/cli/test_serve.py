"""`headroom serve` as a process: what it says, how it refuses to start, how it ends."""

from __future__ import annotations

import gc
import shlex
import shutil
from pathlib import Path

import httpx
import pytest
import torch

from model.native.library import NativeLibrary
from tests.support import checkpoints
from tests.support.command import InProcess, check_one_line, headroom
from tests.support.native import native, seed
from tests.support.server import running

SMALL = ["--dtype", "float32", "--kv-memory", "1MiB"]


def test_the_start_table_and_the_command_it_suggests(tiny_served: Path) -> None:
    """Two layers, two KV heads of 16, fp32: a block of 16 tokens is 2 * 2 * 16 * 16 * 4 = 4096 bytes."""
    flags = [
        "--dtype",
        "float32",
        "--kv-memory",
        "1MiB",
        "--max-model-len",
        "500",
        "--served-model-name",
        "it's",
    ]
    compiled = isinstance(native(), NativeLibrary)
    attention, linear = ("native", "native") if compiled else ("reference", "torch")
    with running(tiny_served, *flags) as server:
        said = server.log()
        table = said.partition("Listening")[0].strip().splitlines()
        assert len(table) <= 12
        assert max(map(len, said.splitlines())) < 200
        for part in (
            "it's (llama, 2 layers, head_dim 16)",
            "GQA, 4 query heads and 2 KV heads: 2 query heads read each",
            "float32",
            "1.00 MiB",
            "256 blocks of 4.00 KiB, each 16 tokens of one KV head",
            "512 B of cache; MHA would take 1.00 KiB",
            "2,048 tokens = 4.1 users at the full 500 tokens",
            f"attention {attention} (",
            f"linear {linear} (",
            "(as asked)",
        ):
            assert part in said, (part, said)
        assert "warning" not in said
        assert f"Listening on {server.url}, Ctrl-C stops." in said
        command = shlex.split(said.partition("Try it:")[2])
        assert command[:2] == ["curl", "-N"]
        url, body = command[2], command[command.index("-d") + 1]
        assert '"temperature":0' in body  # a first answer that ends
        reply = httpx.post(url, content=body, headers={"content-type": "application/json"}, trust_env=False)
        assert reply.text.endswith("data: [DONE]\n\n")
        assert '"model":"it\'s"' in reply.text
        port = server.url.rpartition(":")[2]
        check_one_line(
            headroom("serve", str(tiny_served), "--port", port), f"port {port} of 127.0.0.1 is taken"
        )


def test_an_open_door_and_a_clamped_context_are_told(tiny_served: Path) -> None:
    with running(tiny_served, *SMALL, "--kv-memory", "128KiB", "--host", "0.0.0.0") as server:
        assert "warning: 0.0.0.0 can be reached from other machines, and no key is asked for" in server.log()
        assert f"Listening on all addresses (from here {server.url}), Ctrl-C" in server.log()
        assert f"curl -N {server.url}/v1/" in server.log()
        assert server.http.get("/v1/models").status_code == 200
        # 32 blocks of 4 KiB hold 16 logical ones of 2 heads, 256 tokens.
        assert "256 tokens = 1 user at the full 256 tokens (the model's own 512 do not fit" in server.log()


def test_a_key_from_the_environment_and_no_chat(sp_served: Path) -> None:
    """A key closes the door; a model that cannot chat suggests another path."""
    env = {"HEADROOM_API_KEY": "secret"}
    with running(sp_served, *SMALL, "--host", "0.0.0.0", env=env) as server:
        said = server.log()
        assert "warning" not in said
        assert "/v1/completions -H 'authorization: Bearer YOUR_KEY'" in said
        assert "/v1/chat/completions" not in said
        assert server.http.get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert "secret" not in server.log()


def test_what_is_loaded_is_walked_by_no_collection(
    here: InProcess, tiny_served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection over all that torch and the rest made takes up to half a second, and stops all."""
    frozen: list[int] = []

    async def look(*_: object) -> int:
        frozen.append(gc.get_freeze_count())
        return 0

    monkeypatch.setattr("server.commands.serve._serve", look)
    try:
        assert here("serve", str(tiny_served), "--port", "0", *SMALL).returncode == 0
        assert frozen[0] > 50_000
    finally:
        gc.unfreeze()


def test_starts_that_cannot_work(here: InProcess, tiny_served: Path, tmp_path: Path) -> None:
    def refused(folder: Path, *flags: str) -> str:
        return check_one_line(here("serve", str(folder), "--port", "0", "--device", "cpu", *flags))

    assert "--kv-memory" in refused(tiny_served, "--kv-memory", "1KiB")
    line = refused(tiny_served, "--dtype", "float32", "--kv-memory", "64KiB", "--max-model-len", "500")
    for part in ("--max-model-len", "500", "--kv-memory"):
        assert part in line

    broken = tmp_path / "broken"
    shutil.copytree(tiny_served, broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert weights.name in refused(broken)
    (broken / "config.json").write_text("{")
    assert "config.json" in refused(broken)


@pytest.mark.parametrize(
    ("q_heads", "modes", "line"),
    [
        (9, "gqa4", "attention mode gqa4: 4 KV heads cannot share 9 query heads equally"),
        (6, "gqa2", "attention mode gqa2: 2 is neither a multiple nor a divisor of the checkpoint's 3 KV"),
        (9, "mha,gqa9", "attention modes mha and gqa9 are the same here (9 KV heads); name it once"),
        (9, "native,mla", "attention mode 'mla' is not known"),
    ],
)
def test_modes_that_cannot_be_served(
    here: InProcess, tmp_path: Path, tiny_served: Path, q_heads: int, modes: str, line: str
) -> None:
    """One line, exit code 1, before a weight is read (there are none)."""
    for path in tiny_served.glob("*.json"):
        shutil.copy(path, tmp_path)
    checkpoints.edit_config(tmp_path, {"num_attention_heads": q_heads, "num_key_value_heads": 3})
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    said = check_one_line(here("serve", str(tmp_path), "--port", "0", "--attention", modes), line)
    assert "name it once" in said or f"modes are mqa (1), native (3), mha ({q_heads})" in said


def test_a_pool_too_small_for_the_first_mode(here: InProcess, tiny_served: Path) -> None:
    small = ["--dtype", "float32", "--kv-memory", "12KiB", "--attention", "mha,native"]
    check_one_line(here("serve", str(tiny_served), "--port", "0", *small), "at least --kv-memory 16KiB")


def test_the_start_table_of_several_modes(tiny_served: Path) -> None:
    flags = ["--dtype", "float32", "--kv-memory", "128KiB", "--served-model-name", "tiny", "--attention",
             "mqa,native,mha", "--head-map", "mean"]  # fmt: skip
    with running(tiny_served, *flags) as server:
        said = server.log().partition("Listening")[0]
        lines = [line.split() for line in said.splitlines()]
        for row in (
            "mqa 1 256 B 512 1 at 512 mean, lossy none",
            "native 2 512 B 256 1 at 256 native none",
            "mha 4 1.00 KiB 128 1 at 128 repeat, exact none",
        ):
            assert row.split() in lines, said
        assert "4 query heads and the checkpoint's own 2 KV heads; 3 modes of one copy" in said
        assert (
            "warning: mqa is lossy: 1 KV head for the checkpoint's 2 (head map mean); `headroom compare` "
            "measures the cost\n"
        ) in said
        assert "warning: mha takes 4 KV heads: the pool holds 128 tokens of one sequence, not 512" in said
        assert '"model":"tiny@mqa"' in server.log()


def test_a_fitted_mode_is_fitted_once(tiny_served: Path, tmp_path: Path) -> None:
    """Told in one line where there is no terminal, kept in the user's cache, and shown with what it owns.

    Two layers of W_O [64, 64], v_in [16, 32], factors [2, 4, 16] and columns, beside 123,200 weights.
    """
    flags = ["--dtype", "float32", "--kv-memory", "128KiB", "--served-model-name", "tiny"]
    flags += ["--attention", "native,mqa"]
    asked = {"model": "tiny@mqa", "prompt": "The old clockmaker", "max_tokens": 12, "temperature": 0}
    answers = []
    seed(tmp_path / "headroom")
    for fits in (1, 0):
        with running(tiny_served, *flags, env={"XDG_CACHE_HOME": str(tmp_path)}) as server:
            assert server.log().count("Fitting mqa to this model (once)\n") == fits
            assert (
                "warning: mqa is lossy: 1 KV head for the checkpoint's 2 (head map aligned)" in server.log()
            )
            (row,) = (line.split() for line in server.log().splitlines() if line.startswith("mqa "))
            assert " ".join(row[:-3]) == "mqa 1 256 B 512 1 at 512 aligned, lossy"
            (model,) = (m for m in server.http.get("/v1/models").json()["data"] if m["lossy"])
            assert (model["id"], model["head_map"]) == ("tiny@mqa", "aligned")
            answers.append(server.http.post("/v1/completions", json=asked).json()["choices"])
        assert 36 <= float(row[-3]) < 48 and row[-2] == "KiB", row
        share = float(row[-1].strip("(%)")) / 100
        assert share == pytest.approx(float(row[-3]) * 1024 / (4 * 123_200), abs=0.001)
    assert answers[0] == answers[1]
    assert len(list((tmp_path / "headroom/calibrations").glob("*.safetensors"))) == 1


def test_torchs_own_words_for_no_memory(
    here: InProcess, tiny_served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        torch.empty(2**50, dtype=torch.float32, device="cpu")

    monkeypatch.setattr("server.app.build_engine", build)
    check_one_line(here("serve", str(tiny_served), "--port", "0"), "not enough memory for this model")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(here: InProcess, tiny_served: Path) -> None:
    check_one_line(here("serve", str(tiny_served), "--port", "0", "--device", "cuda"), "--device")
