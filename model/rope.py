"""Rotary position embedding: which kinds a checkpoint may ask for, their frequencies, and the rotation.

A head's pair (i, i + D/2) turns by `position * inv_freq[i]`. Kinds: default (RoFormer, arXiv 2104.09864),
linear (position interpolation, arXiv 2306.15595), dynamic (NTK by length; only lengths within
`max_position_embeddings`, where it equals default), yarn (arXiv 2309.00071) and llama3 (Llama 3.1's smoothed
interpolation, as transformers has it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import ModelError
from model.fields import Fields

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE as the checkpoint asks for it; a kind reads only its own fields."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # yarn, llama3: context length before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: whether the ramp's ends are whole dimensions

    @staticmethod
    def from_config(
        config: Mapping[str, object], max_position: int, where: str = "config.json"
    ) -> RopeConfig:
        """RoPE of a whole `config.json` object, in the old keys or in transformers 5's.

        `rope_scaling`, where it is given, wins over `rope_parameters`; `rope_theta` beside the object
        fills one missing inside it; both as transformers reads them. Raises ModelError.
        """
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = config.get(key) or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"{where}: {key} is {given!r}; it must be an object")
        inside = Fields(given, f"{where}, {key}")
        for name, value in given.items():
            if isinstance(value, Mapping):
                raise inside.fail(f"{name} is an object; RoPE that differs by layer type is not supported")
        kind = inside.raw("rope_type") or inside.raw("type") or "default"
        if kind not in ROPE_KINDS:
            raise inside.fail(f"rope_type is {kind!r}; supported are {', '.join(ROPE_KINDS)}")
        _refuse_partial(inside)
        _refuse_partial(Fields(config, where))
        theta = inside.positive("rope_theta", Fields(config, where).positive("rope_theta", 10_000.0))
        if theta <= 1:
            raise inside.fail(f"rope_theta is {theta:g}; it must be above 1")
        return _of_kind(str(kind), theta, inside, config, max_position)


def _refuse_partial(fields: Fields) -> None:
    share = fields.positive("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise fields.fail(f"partial_rotary_factor is {share:g}; only whole heads are rotated here (1.0)")


def _of_kind(
    kind: str, theta: float, inside: Fields, config: Mapping[str, object], max_position: int
) -> RopeConfig:
    """The fields that `kind` reads; a missing one is an error, a default is transformers' own."""
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=inside.positive("factor"))
    # transformers lets the key beside the object win, and falls back on the context length.
    beside = Fields(config, inside.where).optional_integer("original_max_position_embeddings")
    original = beside or inside.integer("original_max_position_embeddings", max_position)
    if kind == "yarn":
        return _yarn(theta, inside, max_position, original)
    low, high = inside.positive("low_freq_factor"), inside.positive("high_freq_factor")
    if high <= low:
        raise inside.fail(f"high_freq_factor is {high:g}; it must be above low_freq_factor ({low:g})")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=inside.positive("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(theta: float, inside: Fields, max_position: int, original: int) -> RopeConfig:
    """YaRN's fields; the attention factor is derived where it is not given."""
    if not inside.has("factor"):
        raise inside.fail("factor is missing; it must be a number above 0, or null for the ratio of lengths")
    factor = inside.positive("factor", max_position / original)
    attention = inside.optional_positive("attention_factor")
    mscale, mscale_all = inside.raw("mscale"), inside.raw("mscale_all_dim")
    if attention is None and mscale and mscale_all:
        over = _yarn_scale(factor, inside.positive("mscale"))
        attention = over / _yarn_scale(factor, inside.positive("mscale_all_dim"))
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=inside.positive("beta_fast", 32.0),
        beta_slow=inside.positive("beta_slow", 1.0),
        attention_factor=_yarn_scale(factor, 1.0) if attention is None else attention,
        truncate=inside.flag("truncate", True),
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    """How much longer keys and queries become: 0.1 · mscale · ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of each pair: `[head_dim / 2]` fp32."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(config, plain)
    if config.kind == "yarn":
        return _yarn_frequencies(config, plain, head_dim)
    return plain  # default, and dynamic within max_position_embeddings


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    original = config.original_max_position
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / config.factor + keep * plain


def _yarn_frequencies(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often over the original context are kept, those that turn seldom stretched."""

    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # an empty ramp is a step
    steps = torch.arange(head_dim // 2, device=plain.device, dtype=torch.float32)
    stretch = ((steps - first) / (last - first)).clamp(0.0, 1.0)
    return plain / config.factor * stretch + plain * (1 - stretch)


class Rope:
    """Tables of cos and sin for positions `[0, max_position)`: two of `[max_position, head_dim / 2]` fp32."""

    def __init__(self, config: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        frequencies = inverse_frequencies(config, head_dim, device)
        positions = torch.arange(max_position, device=device, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        self._cos = angles.cos() * config.attention_factor
        self._sin = angles.sin() * config.attention_factor

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` `[T]` int64, looked up once for all layers of a step."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns the heads of `T` tokens, each by its own position.

    `cos` and the signed `sin` are fp32, `[T, D]` for all heads alike or `[T, H, D]` for each; pair i is
    columns i and i + D/2. The rotation is `x * cos + swap(x) * sin`, where swap exchanges the halves of a
    head; the sign belongs to the first half, so that one multiply-add does both.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """x `[T, H, D]` -> `[T, H, D]` in x's dtype, computed in fp32."""
        cos, sin = self.cos, self.sin
        if cos.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        wide = x.float()
        return torch.addcmul(wide * cos, swap_halves(wide), sin).to(x.dtype)

    def gather(self, columns: Tensor) -> Rotation:
        """The rotation of heads whose pairs stand elsewhere, or more than once, and keep their frequency.

        `columns` `[H * D]` int64 are the columns of `self` that those of the H heads turn as, first half from
        first half; `self` is `[T, D]`, the result `[T, H, D]`.
        """
        head_dim = self.cos.shape[1]
        heads = columns.shape[0] // head_dim
        cos, sin = self.cos.index_select(1, columns), self.sin.index_select(1, columns)
        return Rotation(cos.view(-1, heads, head_dim), sin.view(-1, heads, head_dim))


def swap_halves(x: Tensor) -> Tensor:
    """x `[..., D]` with columns i and i + D/2 exchanged."""
    return x.roll(x.shape[-1] // 2, dims=-1)
