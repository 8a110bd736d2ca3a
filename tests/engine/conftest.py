"""A small RAND: every output depends on the whole prompt, and ids can be compared with the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_rand
from tests.support.reference import Reference, load_reference


class Oracle:
    """transformers' greedy ids on one folder, each prompt computed once."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < tokens:
            known = self._known[tuple(prompt)] = self.reference.greedy(prompt, tokens)
        return known[:tokens]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND with 512 ids, 256 positions, 4 query and 2 KV heads. Read only."""
    return make_rand(tmp_path_factory.mktemp("small"), vocab=512)


@pytest.fixture(scope="session")
def oracle(small: Path) -> Oracle:
    return Oracle(load_reference(small))
