"""One small tokenizer with a chat template for every test of the door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vocabularies import add_byte_bpe


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and no weights; the ids 67 to 92 are the letters a to z. Read only."""
    return add_byte_bpe(tmp_path_factory.mktemp("words"))
