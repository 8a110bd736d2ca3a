"""From a folder and a few options to an engine that can run, with the facts a user is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cache.audit import audit, summary, verify
from cache.errors import CacheError
from cache.layout import KVLayout
from cache.manager import CacheManager
from cache.pool import KVPool
from cache.state import VariantSpec
from model.config import ModelConfig
from model.expected import parameter_count
from model.heads import Variant
from model.modes import Mode
from server.engine.batch import Shape
from server.engine.constraint import MatcherSource
from server.engine.device import DTypeChoice, choose_device, choose_dtype
from server.engine.engine import Engine
from server.engine.errors import ConfigError
from server.engine.facts import EngineFacts, VariantFacts
from server.engine.kernels import NativeSource
from server.engine.layout import cache_layout
from server.engine.loading import Machinery, WeightsSource, check_weights, load_machinery
from server.engine.measure import room_on_gpu
from server.engine.memory import free_memory
from server.engine.options import KERNELS, SPECULATION, EngineOptions
from server.engine.runner import ModelRunner
from server.engine.scheduler import Limits
from server.engine.sizing import DEFAULT_POOL, Context, PoolSize, fit_context, size_pool
from server.engine.speculation import choose_speculation, rows_each
from server.engine.variants import (
    CalibrationSource,
    choose_modes,
    lossy_warnings,
    make_variants,
    map_name,
    modes_of,
)

CPU_BATCH_TOKENS = 256
GPU_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Frame:
    """What `config.json` and the options settle, before any weight is read."""

    options: EngineOptions
    config: ModelConfig
    modes: tuple[Mode, ...]  # the first is the default
    device: torch.device
    dtype: DTypeChoice
    layout: KVLayout
    limits: Limits
    longest: int  # tokens of the longest sequence there can be


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is known before the pool is."""

    frame: _Frame
    machinery: Machinery
    shape: Shape


def build_engine(
    options: EngineOptions,
    model_folder: Path,
    *,
    calibration: CalibrationSource | None = None,
    variants: Sequence[Variant] = (),
    weights: WeightsSource | None = None,
    matchers: MatcherSource | None = None,
    native: NativeSource | None = None,
) -> tuple[Engine, EngineFacts]:
    """Load the checkpoint in `model_folder`, size the pool, and join the rooms.

    `calibration` is what head maps of reduced modes are fitted with; `variants` are served instead of the
    modes of `options` if there are any; `weights` makes them instead of reading the folder's;
    `matchers` makes what keeps answers within a grammar; `native` gives the operators in C++. Raises
    ModelError (checkpoint, modes) or ConfigError (options); both carry one line for the user.
    """
    frame = _frame(options, model_folder, calibration, variants)
    config, device, dtype = frame.config, frame.device, frame.dtype.dtype
    if options.kv_memory is not None:  # what cannot work is refused before the weights are read
        _fit(frame, size_pool(options.kv_memory, None, 0, on_gpu=False))
    machinery = load_machinery(
        options, model_folder, config, device, dtype, longest=frame.longest, native=native, weights=weights
    )
    made = variants or make_variants(
        frame.modes, options.head_map, machinery.decoder, machinery.own_linear, calibration
    )
    shape = Shape(options.block_size, config.num_heads, {v.name: v for v in made}, device, config.vocab_size)
    parts = _Parts(frame, machinery, shape)
    size = _size(parts)
    context = _fit(frame, size)
    engine = _join(parts, size, context, matchers)
    return engine, _facts(parts, size, context, summary(engine.report().audit))


def _frame(
    options: EngineOptions,
    model_folder: Path,
    calibration: CalibrationSource | None,
    variants: Sequence[Variant],
) -> _Frame:
    check_options(options)
    config = ModelConfig.from_folder(model_folder)
    modes = modes_of(variants, config) if variants else choose_modes(options, config, calibration)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config.torch_dtype, device)
    layout = cache_layout(config, options.block_size, dtype.dtype)
    longest = _longest(options, config, layout, modes, device)
    return _Frame(options, config, modes, device, dtype, layout, _limits(options, device), longest)


def check_options(options: EngineOptions) -> None:
    """Raises ConfigError for what needs no model and no device to be wrong."""
    check_weights(options)
    named = (("--kernels", options.kernels, KERNELS), ("--speculate", options.speculate, SPECULATION))
    for flag, name, known in named:
        if name not in known:
            raise ConfigError(f"{flag} {name}: must be {' or '.join(known)}")
    positive = {
        "--block-size": options.block_size,
        "--max-num-seqs": options.max_num_seqs,
        "--max-batch-tokens": 1 if options.max_batch_tokens is None else options.max_batch_tokens,
    }
    for flag, value in positive.items():
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be at least 1")
    if options.max_batch_tokens is not None and options.max_batch_tokens < options.max_num_seqs:
        raise ConfigError(
            f"--max-batch-tokens {options.max_batch_tokens} is less than --max-num-seqs "
            f"{options.max_num_seqs}: every running sequence needs a token in each step; raise the first or "
            f"lower the second"
        )
    if options.kv_memory is not None or options.kv_fraction is not None:
        size_pool(options.kv_memory, options.kv_fraction, 0, on_gpu=False)


def _limits(options: EngineOptions, device: torch.device) -> Limits:
    """Resolves `max_batch_tokens`."""
    tokens = options.max_batch_tokens
    if tokens is None:
        tokens = max(GPU_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS, options.max_num_seqs)
    return Limits(tokens, options.max_num_seqs)


def _longest(
    options: EngineOptions,
    config: ModelConfig,
    layout: KVLayout,
    modes: Sequence[Mode],
    device: torch.device,
) -> int:
    """Tokens of the longest sequence that there can be, whose positions need tables: what the model allows,
    or less, where it is known already that no pool will hold it (a context of a billion costs nothing)."""
    longest = min(options.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    most = options.kv_memory
    if most is None and options.kv_fraction is None and device.type != "cuda":
        most = DEFAULT_POOL
    if most is None:
        return longest
    blocks = layout.total_blocks(most)
    fits = max(layout.tokens_that_fit(blocks, mode.kv_heads) for mode in modes)
    return max(1, min(longest, fits))  # where not even one fits, `_fit` says so


def _size(parts: _Parts) -> PoolSize:
    frame = parts.frame
    options, limits = frame.options, frame.limits
    on_gpu = frame.device.type == "cuda"
    if options.kv_memory is not None:
        free = 0  # not asked
    elif on_gpu:
        free = room_on_gpu(
            parts.machinery.decoder, parts.machinery.attention, frame.layout, parts.shape,
            limits.max_batch_tokens, limits.max_num_seqs * rows_each(options.speculate), frame.longest,
        )  # fmt: skip
    else:
        free = free_memory()
    return size_pool(options.kv_memory, options.kv_fraction, free, on_gpu)


def _fit(frame: _Frame, size: PoolSize) -> Context:
    asked = frame.options.max_model_len
    return fit_context(frame.layout, size, frame.modes, asked, frame.config.max_position_embeddings)


def _pool(frame: _Frame, size: PoolSize) -> KVPool:
    """The arena, of the size that the formula says: its own storage and the device confirm it."""
    try:
        pool = KVPool(frame.layout, frame.layout.total_blocks(size.nbytes), frame.device)
    except CacheError as error:
        raise ConfigError(f"{error} (--kv-memory, or --kv-fraction)") from error
    try:
        verify(audit(frame.layout, pool))
    except CacheError as error:
        raise ConfigError(str(error)) from error
    return pool


def _join(parts: _Parts, size: PoolSize, context: Context, matchers: MatcherSource | None) -> Engine:
    frame = parts.frame
    pool = _pool(frame, size)
    manager = CacheManager(
        frame.layout,
        pool,
        max_seqs=frame.options.max_num_seqs,
        max_seq_len=max(context.by_mode.values()),
        max_kv_heads=max(mode.kv_heads for mode in frame.modes),
        variants=[VariantSpec(mode.name, mode.kv_heads) for mode in frame.modes],
        q_heads=frame.config.num_heads,
        prefix_cache=frame.options.prefix_cache,
    )
    machinery = parts.machinery
    runner = ModelRunner(
        machinery.decoder, pool, machinery.attention, machinery.sampler, machinery.scorer, machinery.cores
    )
    drafts = choose_speculation(frame.options.speculate)
    return Engine(
        runner, manager, parts.shape, frame.limits, context.by_mode, frame.options.debug, matchers, drafts
    )  # fmt: skip


def _facts(parts: _Parts, size: PoolSize, context: Context, audited: str) -> EngineFacts:
    frame, machinery = parts.frame, parts.machinery
    config, layout = frame.config, frame.layout
    total = layout.total_blocks(size.nbytes)
    variants = tuple(_variant(parts, mode, total, context) for mode in frame.modes)
    return EngineFacts(
        family=config.family,
        fingerprint=machinery.decoder.weights.fingerprint,
        num_layers=config.num_layers,
        q_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        group=config.group,
        head_dim=config.head_dim,
        vocab_rows=config.vocab_size,
        eos_ids=config.eos_token_ids,
        weight_bytes=machinery.decoder.weights.nbytes + sum(variant.weight_bytes for variant in variants),
        weight_kind=machinery.linear.kind,
        parameters=parameter_count(config),
        device=str(frame.device),
        dtype=str(frame.dtype.dtype).removeprefix("torch."),
        dtype_reason=frame.dtype.reason,
        layout=layout,
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        pool_bytes=total * layout.block_bytes,
        pool_reason=size.reason,
        pool_audit=audited,
        total_blocks=total,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=context.length,
        clamped_from=context.clamped_from,
        max_num_seqs=frame.limits.max_num_seqs,
        max_batch_tokens=frame.limits.max_batch_tokens,
        attention_backend=machinery.attention.name,
        attention_reason=machinery.attention.reason,
        linear_backend=machinery.linear.name,
        linear_reason=machinery.linear.reason,
        speculate=frame.options.speculate,
        variants=variants,
        warnings=(*context.warnings, *lossy_warnings(variants, config.num_kv_heads)),
    )


def _variant(parts: _Parts, mode: Mode, total: int, context: Context) -> VariantFacts:
    layout, config = parts.frame.layout, parts.frame.config
    variant = parts.shape.variants[mode.name]
    fits, longest = layout.tokens_that_fit(total, mode.kv_heads), context.by_mode[mode.name]
    return VariantFacts(
        name=mode.name,
        kv_heads=mode.kv_heads,
        group=config.num_heads // mode.kv_heads,
        bytes_per_token=layout.bytes_per_token(mode.kv_heads),
        tokens_that_fit=fits,
        full_length_users=fits / longest if longest else 0.0,
        max_len=longest,
        lossy=mode.lossy,
        head_map=map_name(variant, config.num_kv_heads),
        identity=variant.head_map.identity,
        weight_bytes=variant.head_map.nbytes,
    )
