"""Checkpoints that are as transformers reads them, or are refused before the server listens."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.command import InProcess, check_one_line
from tests.support.decoding import load_decoder, native_heads, run_alone
from tests.support.equality import assert_same_logits
from tests.support.reference import Reference


def reference(folder: Path) -> Reference:
    """transformers on `folder`, not kept: these folders are used once."""
    from transformers import AutoModelForCausalLM

    return Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def assert_as_transformers(folder: Path, ids: list[int], chunk: int | None = None) -> None:
    decoder = load_decoder(folder)
    ours = run_alone(decoder, ids, native_heads(decoder), chunk)
    assert_same_logits(ours, reference(folder).logits(ids), folder.name)


def refused_at_start(here: InProcess, folder: Path, *parts: str) -> None:
    """The server does not start, and says in one line why."""
    check_one_line(here("serve", str(folder), "--dtype", "float32", "--kv-memory", "1MiB"), *parts)
