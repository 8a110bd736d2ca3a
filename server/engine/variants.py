"""Attention modes to variants: each mode that is served gets the head map that makes its KV heads.

Which modes there are is known from `config.json` alone, so a wrong one is refused before the weights are
read. The maps come after the weights: those of reduced modes may be fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.calibration import HEAD_MAPS
from model.config import ModelConfig
from model.decoder import Decoder
from model.heads import HeadMap, MeanHeads, NativeHeads, RepeatHeads, Variant
from model.linear import LinearBackend
from model.modes import Heads, Mode, parse_modes
from model.progress import Progress
from server.engine.errors import ConfigError
from server.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """What fitting a head map needs of the world outside: a text as ids (`windows`, all of one length, asked
    for only when needed), the folder that keeps what was fitted, and who is told how far it is."""

    windows: Callable[[], Sequence[Sequence[int]]]
    folder: Path
    progress: Progress


def choose_modes(
    options: EngineOptions, config: ModelConfig, calibration: CalibrationSource | None
) -> tuple[Mode, ...]:
    """The modes of `options.attention`, checked. Raises ModelError (modes), ConfigError (head map)."""
    if not options.attention:
        raise ConfigError("--attention names no mode; give at least one, as native or native,mqa")
    if options.head_map not in HEAD_MAPS:
        raise ConfigError(f"--head-map {options.head_map}: must be one of {', '.join(HEAD_MAPS)}")
    modes = parse_modes(options.attention, Heads(config.num_heads, config.num_kv_heads))
    lossy = next((mode for mode in modes if mode.lossy), None)
    if lossy is not None and options.head_map != "mean" and calibration is None:
        raise ConfigError(
            f"attention mode {lossy.name} with --head-map {options.head_map} is fitted to a text, and there "
            f"is none here; take --head-map mean"
        )
    return modes


def modes_of(variants: Sequence[Variant], config: ModelConfig) -> tuple[Mode, ...]:
    """The modes of variants that were made elsewhere."""
    return tuple(Mode(v.name, v.kv_heads, v.kv_heads < config.num_kv_heads) for v in variants)


def make_variants(
    modes: Sequence[Mode],
    head_map: str,
    decoder: Decoder,
    linear: LinearBackend,
    calibration: CalibrationSource | None,
) -> tuple[Variant, ...]:
    """Each mode with its head map; reduced ones get a map of the kind `head_map`, fitted to the decoder if
    the cache folder of `calibration` does not have it yet. Raises ModelError where the kind cannot apply."""
    native = decoder.config.num_kv_heads
    variants = []
    for mode in modes:
        made: HeadMap
        if mode.kv_heads == native:
            made = NativeHeads(native)
        elif not mode.lossy:
            made = RepeatHeads(mode.kv_heads)
        elif head_map == "mean":
            made = MeanHeads(mode.kv_heads)
        else:
            raise ConfigError(f"--head-map {head_map} is not built yet; take --head-map mean")
        variants.append(Variant(mode.name, made))
    return tuple(variants)


def map_name(variant: Variant, native: int) -> str:
    """What a variant's head map is called: native, repeat, or the kind of a reduced mode's."""
    if variant.kv_heads < native:
        return variant.head_map.identity.partition(":")[0]
    return "native" if variant.kv_heads == native else "repeat"


def lossy_warning(name: str, kv_heads: int, native: int, head_map: str) -> str:
    """What a user is told who serves fewer KV heads than the checkpoint has."""
    heads = "1 KV head" if kv_heads == 1 else f"{kv_heads} KV heads"
    return (
        f"{name} is lossy: {heads} for the checkpoint's {native} (head map {head_map}); "
        f"`headroom compare` measures the cost"
    )
