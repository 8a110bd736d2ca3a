"""Whose the cores are in a step: the kernels', where all of it is theirs; PyTorch's, where it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.decoder import Decoder
from model.native.cores import Cores
from model.native.library import NativeLibrary
from tests.support import driving
from tests.support.native import native


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({}, 1),
        ({"kernels": "torch"}, 2),
        ({"block_size": 8}, 2),
        ({"dtype": "float16"}, 2),
        ({"weights": "int8"}, 2),
    ],
    ids=str,
)
@pytest.mark.usefixtures("two_threads")
def test_pytorch_keeps_its_threads_where_it_does_the_work(
    tiny_served: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], threads: int
) -> None:
    if not isinstance(native(), NativeLibrary):
        pytest.skip(str(native()))
    seen: list[int] = []
    hidden = Decoder.hidden

    def watched(self: Decoder, *args: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return hidden(self, *args)

    monkeypatch.setattr(Decoder, "hidden", watched)
    engine, _ = driving.fp32_engine(tiny_served, **{"dtype": "float32", **options})
    driving.generate(engine, [5, 6, 7], 3)
    assert seen == [threads] * len(seen) and seen
    assert torch.get_num_threads() == 2, "they come back"


@pytest.mark.usefixtures("two_threads")
def test_they_come_back_from_a_step_that_fails() -> None:
    library = native()
    if not isinstance(library, NativeLibrary):
        pytest.skip(library)
    with pytest.raises(ZeroDivisionError), Cores(library).lent():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
