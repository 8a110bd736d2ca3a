"""What a checkpoint recommends for its answers, and what `--generation-config none` leaves of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from tests.support import checkpoints
from tests.support.asking import decode, text_of
from tests.support.command import InProcess
from tests.support.reference import load_reference
from tests.support.server import Served, inside

PROMPT = list(range(100, 120))
TOKENS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that wants greedy answers which repeat nothing, and ends them at a token of its own."""
    made = checkpoints.make_checkpoint(
        tmp_path_factory.mktemp("recommends"), vocab=checkpoints.BPE_VOCAB, std=0.3
    )
    checkpoints.add_byte_bpe(made)
    settings = {"do_sample": False, "repetition_penalty": 5.0, "eos_token_id": [2, end_of(made)]}
    (made / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return made


def end_of(folder: Path) -> int:
    """The third token of the plain greedy answer, which is in no other place before it."""
    first, second, third = load_reference(folder).greedy(PROMPT, 3)
    assert third not in (first, second)
    return third


def told(server: Served, **fields: Any) -> str:
    return text_of(server, prompt=PROMPT, max_tokens=TOKENS, **fields)


def greedy(folder: Path, penalty: float) -> str:
    return decode(folder, load_reference(folder).generate(PROMPT, TOKENS, repetition_penalty=penalty))


def test_the_checkpoints_own(folder: Path) -> None:
    with inside(folder) as server:
        assert told(server) == greedy(folder, 5.0)
        assert told(server, repetition_penalty=1) == greedy(folder, 1.0) != greedy(folder, 5.0)


def test_none_of_it_but_the_end_marks(folder: Path) -> None:
    with inside(folder, generation_config="none") as server:
        assert len({told(server) for _ in range(4)}) == 4  # OpenAI's temperature 1, no seed
        assert told(server, temperature=0) == greedy(folder, 1.0)
        reply = server.http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        ).json()
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_terminal_commands_have_the_flag(
    folder: Path, here: InProcess, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stop(options: Any, *args: Any) -> Any:
        seen.append(options)
        raise ModelError("far enough")

    monkeypatch.setattr("server.commands.loading.load_model", stop)
    words = [str(folder), "Hello"] if command == "generate" else [str(folder)]
    for flags, want in (((), "auto"), (("--generation-config", "none"), "none")):
        here(command, *words, *flags)
        assert seen.pop().generation_config == want


def test_what_is_wrong_in_the_file_is_none_of_its_business(folder: Path, tmp_path: Path) -> None:
    """With `none` the recommendation is not even read."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "generation_config.json").write_text('{"temperature": "hot"}', encoding="utf-8")
    with pytest.raises(ModelError, match="temperature"), inside(broken):
        pass
    with inside(broken, generation_config="none") as server:
        assert told(server, temperature=0) == greedy(folder, 1.0)
