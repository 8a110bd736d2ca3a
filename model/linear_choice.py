"""Which linear backend runs on a device, and why."""

from __future__ import annotations

import torch

from model.linear import LinearBackend, PackedBackend, PlainBackend
from model.linear_native import NativeLinearBackend
from model.linear_quantised_native import choose_quantised_backend
from model.native.library import DTYPES, NativeLibrary
from model.quantise import BITS


def choose_linear_backend(
    device: torch.device,
    dtype: torch.dtype,
    native: NativeLibrary | str = "no native operators were given",
    weights: str = "none",
) -> LinearBackend:
    """The fastest backend for inputs of `dtype` on `device`, with the reason for the choice. `native` are the
    operators in C++, or why there are none; `weights` are left as they are (none), or made int8 or int4."""
    if weights != "none":
        return choose_quantised_backend(BITS[weights], device, dtype, native)
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return PlainBackend(reason=f"torch's own {name} matrix products on {device.type}")
    if isinstance(native, NativeLibrary) and dtype in DTYPES:
        return NativeLinearBackend(native, reason=f"C++ kernels, {native.about}")
    if dtype != torch.bfloat16:
        why_not = native if isinstance(native, str) and dtype in DTYPES else f"no kernels for {name}"
        return PlainBackend(reason=f"torch's own matrix products: {why_not}")
    trouble = _packed_trouble(device)
    if trouble is not None:
        return PlainBackend(reason=f"no packed weights: {trouble}")
    return PackedBackend(reason="bfloat16 weights packed once for oneDNN")


def _packed_trouble(device: torch.device) -> str | None:
    """Why packed bfloat16 cannot be used here: tried, not assumed, as the operators are torch's own."""
    weight = torch.eye(32, device=device, dtype=torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no bfloat16 on this CPU"
        if not torch.equal(PackedBackend(reason="").pack(weight, None)(weight), weight):
            return "oneDNN's packed product is wrong here"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"this build of torch cannot pack ({str(error).splitlines()[0]})"
    return None
