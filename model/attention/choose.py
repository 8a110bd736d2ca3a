"""Which attention backend runs on a device, and why."""

from __future__ import annotations

import torch

from model.attention.base import AttentionBackend
from model.attention.native import NativeAttention, unfit
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
    why_not = native if isinstance(native, str) else unfit(dtype, block_size, head_dim)
    if device.type != "cpu":
        why_not = f"native kernels are for CPUs, this is {device.type}"
    if why_not is None and isinstance(native, NativeLibrary):
        return NativeAttention(native)
    return ReferenceAttention(device, reason=f"plain PyTorch: {why_not}")
