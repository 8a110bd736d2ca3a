"""Linear layers over weights of 4 or 8 bits, in C++ on a CPU: codes become bfloat16 in registers, sums and
scales are fp32 (csrc/quantised.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from model.linear import Embedding, GatedLinear, Linear, LinearBackend
from model.linear_native import NativeGated, NativeLinear, alternating, padded
from model.linear_quantised import ENDS, QuantisedBackend
from model.native.library import LANES, NativeLibrary
from model.quantise import GROUP, Bits, Quantised, quantise


@dataclass(frozen=True, slots=True)
class CodePanels:
    """Codes as csrc/quantised.h reads them: 16 outputs side by side, each a 4-byte lane of codes.

    lanes int32 `[ceil(N / 16), G, 4 or 8, 16]`, for 4 or 8 bits; scales bfloat16 `[ceil(N / 16), G, S, 16]`,
    the scale and, with 4 bits, the middle of each output. Outputs beyond N are zero.
    """

    lanes: Tensor
    scales: Tensor
    inputs: int  # K; the panels have G * 32


def to_code_panels(weight: Quantised) -> CodePanels:
    """`weight` in the native order."""
    parts = [weight.scale] if weight.middle is None else [weight.scale, weight.middle]
    scales = torch.stack([_panelled(part) for part in parts], dim=2)  # [P, G, S, 16]
    words = weight.codes.view(torch.int32) if weight.middle is None else _words(weight.codes)
    lanes = _panelled(words).contiguous()
    lanes = lanes.view(len(lanes), weight.scale.shape[1], -1, LANES)
    return CodePanels(lanes, scales, weight.inputs)


def _panelled(rows: Tensor) -> Tensor:
    """rows `[N, C]` -> `[ceil(N / 16), C, 16]`, with rows of zeros at the end."""
    whole = F.pad(rows, (0, 0, 0, -len(rows) % LANES))
    return whole.view(-1, LANES, rows.shape[1]).transpose(1, 2)


def _words(codes: Tensor) -> Tensor:
    """codes uint8 `[N, G * 16]`, two of neighbouring inputs in each -> int32 `[N, G * 4]`: of four bytes, the
    low halves at bits 0, 4, 8, 12 and the high halves 16 further."""
    four = codes.view(len(codes), -1, 4)
    word = torch.zeros(four.shape[:2], dtype=torch.int32, device=codes.device)
    for place in range(4):
        pair = four[..., place].to(torch.int32)
        word |= ((pair & 15) | (pair >> 4) << 16) << (4 * place)
    return word


@dataclass(frozen=True, slots=True)
class PanelledEmbedding:
    """A table of 8-bit codes, read from the panels that the lm_head multiplies with."""

    panels: CodePanels
    size: int
    nbytes: int
    dtype: torch.dtype  # of what is looked up

    def rows(self, ids: Tensor) -> Tensor:
        """See `Embedding.rows`."""
        panel, lane = ids.flatten() // LANES, ids.flatten() % LANES
        words = self.panels.lanes[panel, :, :, lane]  # [n, G, 8]
        scale = self.panels.scales[panel, :, 0, lane]  # [n, G]
        codes = Quantised(words.view(torch.int8).flatten(1), scale, None, self.panels.inputs)
        return codes.dequantise(self.dtype).view(*ids.shape, self.panels.inputs)

    @property
    def device(self) -> torch.device:
        """See `Embedding.device`."""
        return self.panels.lanes.device


@dataclass(frozen=True, slots=True)
class NativeQuantisedBackend(QuantisedBackend):
    """The same by the kernels in C++."""

    library: NativeLibrary
    where: ClassVar[str] = "native"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `LinearBackend.pack`."""
        codes = quantise(weight, self.bits)
        return self._linear(codes, self._settled(to_code_panels(codes)), bias)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> GatedLinear:
        """See `LinearBackend.pack_gated`. Panels of gate and up alternate, as `gated_linear` wants them."""
        halves = [quantise(half, self.bits) for half in weight.chunk(2)]
        gate, up = (to_code_panels(half) for half in halves)
        lanes, scales = alternating(gate.lanes, up.lanes), alternating(gate.scales, up.scales)
        panels = self._settled(CodePanels(lanes, scales, gate.inputs))
        packed = self._weight(panels, padded(bias, 2), len(lanes) * LANES)
        nbytes = sum(half.nbytes for half in halves) + (0 if bias is None else bias.nbytes)
        return NativeGated(self.library.ops, packed, len(weight) // 2, nbytes, -gate.inputs % GROUP)

    def pack_tied(self, table: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_tied`."""
        codes = quantise(table, ENDS)
        panels = self._settled(to_code_panels(codes))
        embedding = PanelledEmbedding(panels, codes.outputs, codes.nbytes, table.dtype)
        return embedding, self._linear(codes, panels, None)

    def _linear(self, codes: Quantised, panels: CodePanels, bias: Tensor | None) -> Linear:
        packed = self._weight(panels, padded(bias), codes.outputs)
        nbytes = codes.nbytes + (0 if bias is None else bias.nbytes)
        return NativeLinear(self.library.ops, packed, codes.outputs, nbytes, -codes.inputs % GROUP)

    def _settled(self, panels: CodePanels) -> CodePanels:
        """The same where they stay."""
        settle = self.library.ops.settle
        return CodePanels(settle(panels.lanes), settle(panels.scales.contiguous()), panels.inputs)

    def _weight(self, panels: CodePanels, bias: Tensor | None, outputs: int) -> Any:
        inputs = panels.lanes.shape[1] * GROUP
        return self.library.classes.Weight(panels.lanes, bias, outputs, inputs, panels.scales)


def choose_quantised_backend(
    bits: Bits, device: torch.device, dtype: torch.dtype, native: NativeLibrary | str
) -> LinearBackend:
    """The fastest backend for weights of `bits` bits and inputs of `dtype` on `device`, with the reason for
    the choice. `native` are the operators in C++, or why there are none."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return QuantisedBackend(bits, f"weights are made again in {name} for each product on {device.type}")
    if dtype != torch.bfloat16:
        return QuantisedBackend(bits, f"weights are made again for each product: no kernels for {name}")
    if isinstance(native, str):
        return QuantisedBackend(bits, f"weights are made again for each product: {native}")
    return NativeQuantisedBackend(bits, f"products over codes, {native.about}", native)
