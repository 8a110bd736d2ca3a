"""Which attention backend runs on a device, and why."""

from __future__ import annotations

import torch

from model.attention.base import AttentionBackend
from model.attention.reference import ReferenceAttention
from model.native.library import NativeLibrary


def choose_attention_backend(
    device: torch.device,
    dtype: torch.dtype,
    *,
    block_size: int,
    head_dim: int,
    native: NativeLibrary | str,
) -> AttentionBackend:
    """The fastest backend that reads a cache of `dtype` on `device`, in blocks of `block_size` tokens, with
    the reason for the choice. `native` are the operators in C++, or why there are none."""
    return ReferenceAttention(device, reason="plain PyTorch, the only backend so far")
