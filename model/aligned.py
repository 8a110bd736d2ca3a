"""The aligned head map: fewer KV heads, each shared by a group of the checkpoint's, in a fitted basis.

RoPE (arXiv 2104.09864) turns a pair of columns as one complex number, so a complex factor for each (head,
pair) commutes with it. A shared key is made of slots; a slot is a pair whose shared key is a sum over the
group's heads, each times a factor, and a query that reads it carries the factor of the head it read. Slots
may take the same pair twice and another never; each keeps the frequency of its pair. Values go through a
matrix before the cache, and an output projection of the map's own follows attention. The factors, the
matrix and the projection are a `Calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.calibration import Calibration, LayerFit
from model.heads import KeyNorm
from model.linear import Linear, LinearBackend
from model.rope import Rotation, swap_halves


@dataclass(frozen=True, slots=True)
class _Factors:
    """One complex factor a + ib for each slot of each native KV head, as two real tables.

    `x * even + swap(x) * odd` multiplies x's pairs by them; both `[Hkv, D]` fp32.
    """

    even: Tensor  # a, a
    odd: Tensor  # -b, b

    @staticmethod
    def of(factors: Tensor, device: torch.device) -> _Factors:
        """factors `[Hkv, S]` complex."""
        real, imaginary = factors.real.float(), factors.imag.float()
        return _Factors(
            torch.cat((real, real), dim=-1).to(device),
            torch.cat((-imaginary, imaginary), dim=-1).to(device),
        )

    @property
    def nbytes(self) -> int:
        return self.even.nbytes + self.odd.nbytes


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the columns of a layer's slots come from, `[heads * D]` int64 each."""

    query: Tensor  # of the query heads side by side
    key: Tensor  # of the native KV heads side by side
    turn: Tensor  # of the rotation, for each KV head of the map

    @staticmethod
    def of(frequency: Tensor, q_heads: int, kv_heads: int, device: torch.device) -> _Columns | None:
        """frequency `[K, S]`; None where every slot is its own pair, and nothing has to be gathered."""
        groups, slots = frequency.shape
        frequency = frequency.to(device)
        if torch.equal(frequency, torch.arange(slots, device=device, dtype=torch.int64).expand(groups, -1)):
            return None
        pairs = torch.cat((frequency, frequency + slots), dim=-1)  # [K, D]
        return _Columns(_side_by_side(pairs, q_heads), _side_by_side(pairs, kv_heads), pairs.flatten())

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + self.key.nbytes + self.turn.nbytes


def _side_by_side(pairs: Tensor, heads: int) -> Tensor:
    """pairs `[K, D]`, each K of `heads / K` heads -> `[heads * D]`: columns of heads laid side by side."""
    groups, head_dim = pairs.shape
    starts = torch.arange(heads, device=pairs.device, dtype=torch.int64) * head_dim
    return (pairs.repeat_interleave(heads // groups, dim=0) + starts.unsqueeze(1)).flatten()


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's fit in the form that it runs in."""

    columns: _Columns | None
    query: _Factors
    key: _Factors
    v_in: Tensor  # [K, h * D, D] in the run's dtype: transposed, as a product from the right
    o: Linear

    @property
    def nbytes(self) -> int:
        gathered = 0 if self.columns is None else self.columns.nbytes
        return gathered + self.query.nbytes + self.key.nbytes + self.v_in.nbytes + self.o.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class AlignedHeads:
    """Fewer KV heads by a calibration: lossy, with an output projection of its own. See `aligned_heads`."""

    kv_heads: int
    identity: str
    nbytes: int
    layers: tuple[_Layer, ...]
    owns_output: bool = True
    repeats: bool = False

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadMap.qkv`. Slot s of a key or query is its columns s and s + D/2."""
        own = self.layers[layer]
        k = k_norm(k)
        wide_q, wide_k = q.float(), k.float()
        turn = rotation
        if own.columns is not None:
            wide_q = wide_q.flatten(1).index_select(1, own.columns.query)
            wide_k = wide_k.flatten(1).index_select(1, own.columns.key)
            turn = rotation.gather(own.columns.turn)
        keys = self._shared_keys(wide_k.view(k.shape), own.key)
        queries = self._queries(wide_q.view(q.shape), own.query, turn)
        return queries.to(q.dtype), turn.apply(keys).to(k.dtype), self._shared_values(v, own.v_in)

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """See `HeadMap.out`."""
        return self.layers[layer].o(attended)

    def _shared_keys(self, k: Tensor, factors: _Factors) -> Tensor:
        """k `[T, Hkv, D]` in slots -> `[T, K, D]`: each group's sum, not yet turned; fp32."""
        tokens, heads, head_dim = k.shape
        each = torch.addcmul(k * factors.even, swap_halves(k), factors.odd)
        return each.view(tokens, self.kv_heads, heads // self.kv_heads, head_dim).sum(dim=2)

    def _queries(self, q: Tensor, factors: _Factors, turn: Rotation) -> Tensor:
        """q `[T, Hq, D]` in slots -> `[T, Hq, D]`, factor and turn in one complex product; fp32."""
        tokens, heads, head_dim = q.shape
        native = factors.even.shape[0]
        even, odd = (part.view(self.kv_heads, -1, head_dim) for part in (factors.even, factors.odd))
        cos, sin = (part.view(tokens, -1, 1, head_dim) for part in (turn.cos, turn.sin))
        # (a + ib)(cos + i sin) for each native head, which several query heads read: [T, K, Hkv / K, D].
        real = torch.addcmul(cos * even, sin, odd, value=-1).view(tokens, native, 1, head_dim)
        imaginary = torch.addcmul(sin * even, cos, odd).view(tokens, native, 1, head_dim)
        q = q.view(tokens, native, heads // native, head_dim)
        return torch.addcmul(q * real, swap_halves(q), imaginary).view(tokens, heads, head_dim)

    def _shared_values(self, v: Tensor, v_in: Tensor) -> Tensor:
        """v `[T, Hkv, D]` -> `[T, K, D]`: each group's values side by side through its matrix."""
        grouped = v.reshape(v.shape[0], self.kv_heads, v_in.shape[1])
        return torch.bmm(grouped.transpose(0, 1), v_in).transpose(0, 1)


def aligned_heads(
    calibration: Calibration, *, device: torch.device, dtype: torch.dtype, linear: LinearBackend
) -> AlignedHeads:
    """The head map of a calibration, for a decoder that runs in `dtype` on `device`.

    Factors stay in fp32; `v_in` and the output projection are weights in `dtype`, the latter as `linear`
    holds one.
    """
    layers = tuple(_layer(fit, device, dtype, linear) for fit in calibration.layers)
    return AlignedHeads(
        kv_heads=calibration.kv_heads,
        identity=f"{calibration.kind}:{calibration.digest}",
        nbytes=sum(layer.nbytes for layer in layers),
        layers=layers,
    )


def _layer(fit: LayerFit, device: torch.device, dtype: torch.dtype, linear: LinearBackend) -> _Layer:
    kv_heads, slots = fit.key.shape
    bias = None if fit.o_bias is None else fit.o_bias.to(device, dtype)
    return _Layer(
        columns=_Columns.of(fit.frequency, fit.o.shape[1] // (2 * slots), kv_heads, device),
        query=_Factors.of(fit.query, device),
        key=_Factors.of(fit.key, device),
        v_in=fit.v_in.to(device, dtype).transpose(1, 2).contiguous(),
        o=linear.pack(fit.o.to(device, dtype), bias),
    )
