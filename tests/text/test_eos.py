"""End marks from three files; ids that cannot be drawn are dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from server.text.eos import eos_ids
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level, write_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eos")
    byte_level()(path)  # its tokenizer's eos is 2
    return path


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        (set(), None, {2}),
        ({0}, None, {0, 2}),
        (set(), [7, 0], {0, 2, 7}),
        ({5}, 6, {2, 5, 6}),
        ({5}, [384, -1], {2, 5}),
    ],
)
def test_the_union_of_three_files(folder: Path, config: set[int], generation: Any, want: set[int]) -> None:
    settings = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2}
    write_json(folder / "generation_config.json", settings | {"eos_token_id": generation})
    assert eos_ids(folder, frozenset(config), Tokenizer.from_folder(folder), 384) == want


@pytest.mark.parametrize("wrong", ["2", True, [1, "2"], 1.5])
def test_an_eos_that_is_no_id_is_a_start_up_error(folder: Path, wrong: Any) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": wrong})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        eos_ids(folder, frozenset(), Tokenizer.from_folder(folder), 384)
