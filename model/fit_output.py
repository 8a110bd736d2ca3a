"""Shared values and the output projection that reads them.

Of a group's h heads with D columns each, the D directions are kept that matter most to what W_O makes of
them. W_O absorbs the way back, and is then refitted by ridge regression around that start.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-6  # of the largest eigenvalue: columns of values that W_O ignores are still divided by


class ValueStatistics:
    """Second moments of a layer's values, by group: the sum over tokens, in fp64."""

    def __init__(self, kv_heads: int) -> None:
        """`kv_heads`: K, those of the mode."""
        self._kv_heads = kv_heads
        self._moment: Tensor | None = None  # [K, h * D, h * D]

    def add(self, v: Tensor) -> None:
        """v `[T, Hkv, D]` fp32, after bias."""
        groups = v.reshape(v.shape[0], self._kv_heads, -1).transpose(0, 1)  # [K, T, h * D]
        moment = (groups.transpose(1, 2) @ groups).double()
        self._moment = moment if self._moment is None else self._moment + moment

    def subspace(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """The native W_O `[hidden, Hkv, G, D]` -> `v_in` `[K, D, h * D]` and W_O with the way back absorbed
        `[hidden, Hq * D]`, both fp32. Raises ValueError where nothing was added."""
        if self._moment is None:
            raise ValueError("no tokens were added")
        moment, weight = self._moment.cpu(), o.double().cpu()
        _, native, _, head_dim = weight.shape
        share = native // self._kv_heads
        power, axes = torch.linalg.eigh(torch.einsum("okgd,okge->kde", weight, weight))  # [Hkv, D, D]
        root = power.maximum(_FLOOR * power.amax(dim=1, keepdim=True)).clamp_min(1e-30).sqrt()
        to_metric = root.unsqueeze(2) * axes.transpose(1, 2)
        from_metric = axes / root.unsqueeze(1)
        v_in, back = [], []
        for group in range(self._kv_heads):
            members = slice(group * share, (group + 1) * share)
            forth = _diagonal(to_metric[members])  # [h * D, h * D]
            _, directions = torch.linalg.eigh(forth @ moment[group] @ forth.T)  # ascending
            kept = directions[:, -head_dim:].flip(1)
            inward = kept.T @ forth
            sign = _signs(inward)
            v_in.append(sign.unsqueeze(1) * inward)
            outward = _diagonal(from_metric[members]) @ kept * sign
            back.append(outward.view(share, head_dim, head_dim))
        absorbed = torch.einsum("okgd,kde->okge", weight, torch.cat(back))
        return torch.stack(v_in).float().to(o.device), absorbed.flatten(1).float().to(o.device)


class Ridge:
    """Linear regression of a target on features, drawn to a start: sums over tokens, in fp64."""

    def __init__(self, start: Tensor) -> None:
        """start `[out, n]` fp32: what the weight is where the tokens say nothing."""
        self._start = start
        self._gram: Tensor | None = None  # [n, n]
        self._product: Tensor | None = None  # [n, out]

    def add(self, features: Tensor, target: Tensor) -> None:
        """features `[T, n]`, target `[T, out]`, fp32."""
        rest = target - features @ self._start.T
        gram, product = (features.T @ features).double(), (features.T @ rest).double()
        self._gram = gram if self._gram is None else self._gram + gram
        self._product = product if self._product is None else self._product + product

    def weight(self, strength: float) -> Tensor:
        """`[out, n]` fp32. `strength` is the penalty on leaving the start, in mean diagonals of the Gram
        matrix. Raises ValueError where nothing was added."""
        if self._gram is None or self._product is None:
            raise ValueError("no tokens were added")
        scale = self._gram.diagonal().mean()
        if not scale > 0:
            return self._start
        gram = self._gram.clone()
        gram.diagonal().add_(strength * scale)
        step = torch.cholesky_solve(self._product, torch.linalg.cholesky(gram))
        return self._start + step.T.float()


def _signs(rows: Tensor) -> Tensor:
    """Eigenvectors are free in sign: `[n]` of 1 and -1 that make the largest entry of each row positive."""
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).squeeze(1)
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def _diagonal(blocks: Tensor) -> Tensor:
    """`[h, D, D]` -> `[h * D, h * D]`, zero outside the blocks."""
    made: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return made
