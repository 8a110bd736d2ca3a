"""Linear layers: one protocol, and the backends that hold a weight in the layout they read.

A backend takes the weight over (`pack`); whoever loads drops the original afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> `[..., out]`, in x's dtype."""
        ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and bias as they are held."""
        ...

    def shares(self, tensor: Tensor) -> bool:
        """Whether the weight lives in `tensor`'s storage (a tied lm_head), so that it is counted once."""
        ...


class LinearBackend(Protocol):
    """Makes `Linear`s; chosen once per device and dtype."""

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """Why this backend was chosen, in a few words for the start table."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight `[out, in]`, bias `[out]` or None, both on the device and in the dtype of the run."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """`torch.nn.functional.linear` on the weight as stored."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return self.weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class PlainBackend:
    """Runs anywhere, in any dtype, and adds no copy of a weight."""

    reason: str
    name: str = "torch"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return PlainLinear(weight, bias)


def choose_linear_backend(device: torch.device, dtype: torch.dtype) -> LinearBackend:
    """The fastest backend that runs weights of `dtype` on `device`, with the reason for the choice."""
    return PlainBackend(
        reason=f"plain matrix products for {str(dtype).removeprefix('torch.')} on {device.type}"
    )
