"""What the start table says of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from server.commands.start_table import print_start_table
from tests.support.driving import fp32_engine


def test_quantised_weights_are_told_with_their_bits(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Untied, so half of this tiny model is tables of 8.5 bits; norms have 32."""
    facts = fp32_engine(tiny(), weights="int4")[1]
    print_start_table("tiny", facts, ())
    said = " ".join(capsys.readouterr().out.split())
    assert 5 < facts.bits_per_weight < 8.5
    assert f"int4 at {facts.bits_per_weight:.2f} bits each with scales; the rest float32" in said
    assert "linear torch-int4 (" in said
    print_start_table("tiny", fp32_engine(tiny())[1], ())
    assert "bits each" not in capsys.readouterr().out
