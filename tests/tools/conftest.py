"""Models that the tests of the tools share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import BPE_VOCAB, add_byte_bpe, make_checkpoint
from tests.support.shapes import LLAMA_3_8B


@pytest.fixture(scope="session")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 query heads and 3 KV heads, with a tokenizer."""
    made = tmp_path_factory.mktemp("nine")
    make_checkpoint(made, heads=9, kv_heads=3, hidden=144, vocab=BPE_VOCAB)
    return add_byte_bpe(made)


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 3 8B's config.json, and nothing else."""
    made = tmp_path_factory.mktemp("llama-3-8b")
    (made / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return made
