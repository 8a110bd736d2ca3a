"""Which attention backend runs on a device, and why."""

from __future__ import annotations

import torch

from model.attention.base import AttentionBackend
from model.attention.reference import ReferenceAttention


def choose_attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The fastest backend that reads a cache of `dtype` on `device`, with the reason for the choice."""
    return ReferenceAttention(device, reason="plain PyTorch, the only backend so far")
