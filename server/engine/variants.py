"""Attention modes to variants: each mode that is served gets the head map that makes its KV heads.

Which modes there are is known from `config.json` alone, so a wrong one is refused before the weights are
read. The maps come after the weights: those of reduced modes may be fitted to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.aligned import aligned_heads
from model.calibrate import METHOD, calibrate
from model.calibration import HEAD_MAPS, Calibration, load_or_fit
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import ModelError
from model.heads import HeadMap, MeanHeads, NativeHeads, RepeatHeads, Variant
from model.linear import LinearBackend
from model.modes import Heads, Mode, counted, parse_modes
from model.progress import Progress
from server.engine.errors import ConfigError
from server.engine.facts import VariantFacts
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
        raise ConfigError(_no_text(lossy, options.head_map))
    return modes


def _no_text(mode: Mode, head_map: str) -> str:
    return (
        f"attention mode {mode.name} with --head-map {head_map} is fitted to a text, and there is none here; "
        f"take --head-map mean"
    )


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
    """Each mode with its head map; those of reduced modes are of the kind `head_map`. Raises ModelError where
    that kind cannot apply to the checkpoint."""
    return tuple(Variant(mode.name, _map(mode, head_map, decoder, linear, calibration)) for mode in modes)


def _map(
    mode: Mode, head_map: str, decoder: Decoder, linear: LinearBackend, calibration: CalibrationSource | None
) -> HeadMap:
    if mode.kv_heads == decoder.config.num_kv_heads:
        return NativeHeads(mode.kv_heads)
    if not mode.lossy:
        return RepeatHeads(mode.kv_heads)
    if head_map == "mean":
        return MeanHeads(mode.kv_heads)
    if calibration is None:
        raise ConfigError(_no_text(mode, head_map))
    embed = decoder.weights.embed
    fit = fitted(mode, head_map, decoder, calibration)
    return aligned_heads(fit, device=embed.device, dtype=embed.dtype, linear=linear)


def fitted(mode: Mode, head_map: str, decoder: Decoder, source: CalibrationSource) -> Calibration:
    """The calibration of a reduced mode: the one kept for this checkpoint, text and method, or a new one,
    about as much work as two passes of the text through the model, which is kept. Raises ModelError where
    `head_map` cannot apply."""
    embed = decoder.weights.embed
    windows = source.windows()
    if max(map(max, windows)) >= embed.size:
        raise ModelError(
            f"--head-map {head_map}: the tokenizer gives ids that this checkpoint has no embedding for; take "
            f"--head-map mean"
        )
    ids = torch.tensor(windows, dtype=torch.int64, device=embed.device)  # [W, T]

    def fit() -> Calibration:
        source.progress.start(f"Fitting {mode.name} to this model (once)", 100)
        # Tables for the text's positions, however few the pool will hold.
        own = Decoder(decoder.config, decoder.weights, embed.device, max_position=ids.shape[1])
        return calibrate(
            own, mode, ids, kind=head_map, progress=lambda share: source.progress.update(round(100 * share))
        )

    text = hashlib.sha256(repr([list(window) for window in windows]).encode()).hexdigest()
    key = f"{decoder.weights.fingerprint} {mode.kv_heads} {head_map} {text} {METHOD} {embed.dtype}"
    return load_or_fit(source.folder, key, fit)


def map_name(variant: Variant, native: int) -> str:
    """What a variant's head map is called: native, repeat, or the kind of a reduced mode's."""
    if variant.kv_heads < native:
        return variant.head_map.identity.partition(":")[0]
    return "native" if variant.kv_heads == native else "repeat"


def lossy_warnings(variants: Sequence[VariantFacts], native: int) -> list[str]:
    """What a user is told who serves fewer KV heads than the checkpoint has, `native`."""
    return [
        f"{variant.name} is lossy: {counted(variant.kv_heads)} for the checkpoint's {native} "
        f"(head map {variant.head_map}); `headroom compare` measures the cost"
        for variant in variants
        if variant.lossy
    ]
