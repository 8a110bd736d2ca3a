"""From a folder and a few options to an engine that can run, with the facts a user is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cache.errors import CacheError
from cache.layout import KVLayout, LayerGroup
from cache.manager import CacheManager
from cache.pool import KVPool
from cache.state import VariantSpec
from model.attention.base import AttentionBackend
from model.attention.choose import choose_attention_backend
from model.config import ModelConfig
from model.decoder import Decoder
from model.heads import NativeHeads, Variant
from model.linear import LinearBackend, choose_linear_backend
from model.loader import load_weights
from server.engine.batch import Shape
from server.engine.device import DTypeChoice, choose_device, choose_dtype
from server.engine.engine import Engine
from server.engine.errors import ConfigError
from server.engine.facts import EngineFacts, VariantFacts
from server.engine.measure import room_on_gpu
from server.engine.memory import free_memory
from server.engine.options import EngineOptions
from server.engine.runner import ModelRunner
from server.engine.scheduler import Limits
from server.engine.sizing import DEFAULT_POOL, Context, PoolSize, fit_context, size_pool

CPU_BATCH_TOKENS = 256
GPU_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is known before the pool is."""

    config: ModelConfig
    limits: Limits
    dtype: DTypeChoice
    layout: KVLayout
    shape: Shape
    decoder: Decoder
    attention: AttentionBackend
    linear: LinearBackend


def build_engine(options: EngineOptions, model_folder: Path) -> tuple[Engine, EngineFacts]:
    """Load the checkpoint in `model_folder`, size the pool, and join the rooms.

    Raises ModelError (checkpoint) or ConfigError (options); both carry one line for the user.
    """
    _check(options)
    config = ModelConfig.from_folder(model_folder)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config.torch_dtype, device)
    group = LayerGroup(tuple(range(config.num_layers)), config.num_kv_heads, config.head_dim)
    layout = KVLayout((group,), options.block_size, dtype.dtype)
    variants = options.variants or (Variant("native", NativeHeads(config.num_kv_heads)),)
    shape = Shape(options.block_size, config.num_heads, {v.name: v for v in variants}, device)
    if options.kv_memory is not None:  # what cannot work is refused before the weights are read
        _fit(options, config, layout, shape, size_pool(options.kv_memory, None, 0, on_gpu=False))
    linear = choose_linear_backend(device, dtype.dtype)
    weights = load_weights(model_folder, config, device=device, dtype=dtype.dtype, linear=linear)
    longest = _longest(options, config, layout, shape)
    decoder = Decoder(config, weights, device, max_position=longest)
    attention = choose_attention_backend(device, dtype.dtype)
    parts = _Parts(config, _limits(options, device), dtype, layout, shape, decoder, attention, linear)
    size = _size(options, parts, longest)
    context = _fit(options, config, layout, shape, size)
    return _join(options, parts, size, context), _facts(parts, size, context)


def _check(options: EngineOptions) -> None:
    """Options that need nothing else to be wrong."""
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


def _longest(options: EngineOptions, config: ModelConfig, layout: KVLayout, shape: Shape) -> int:
    """Tokens of the longest sequence that there can be, whose positions need tables: what the model allows,
    or less, where it is known already that no pool will hold it (a context of a billion costs nothing)."""
    longest = min(options.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    most = options.kv_memory
    if most is None and options.kv_fraction is None and shape.device.type != "cuda":
        most = DEFAULT_POOL
    if most is None:
        return longest
    blocks = layout.total_blocks(most)
    fits = max(layout.tokens_that_fit(blocks, variant.kv_heads) for variant in shape.variants.values())
    return max(1, min(longest, fits))  # where not even one fits, `_fit` says so


def _size(options: EngineOptions, parts: _Parts, longest: int) -> PoolSize:
    on_gpu = parts.shape.device.type == "cuda"
    if options.kv_memory is not None:
        free = 0  # not asked
    elif on_gpu:
        free = room_on_gpu(
            parts.decoder, parts.attention, parts.layout, parts.shape,
            parts.limits.max_batch_tokens, parts.limits.max_num_seqs, longest,
        )  # fmt: skip
    else:
        free = free_memory()
    return size_pool(options.kv_memory, options.kv_fraction, free, on_gpu)


def _fit(
    options: EngineOptions, config: ModelConfig, layout: KVLayout, shape: Shape, size: PoolSize
) -> Context:
    variants = tuple(shape.variants.values())
    return fit_context(layout, size, variants, options.max_model_len, config.max_position_embeddings)


def _join(options: EngineOptions, parts: _Parts, size: PoolSize, context: Context) -> Engine:
    variants = tuple(parts.shape.variants.values())
    try:
        pool = KVPool(parts.layout, parts.layout.total_blocks(size.nbytes), parts.shape.device)
    except CacheError as error:
        raise ConfigError(f"{error} (--kv-memory, or --kv-fraction)") from error
    manager = CacheManager(
        parts.layout,
        pool,
        max_seqs=options.max_num_seqs,
        max_seq_len=max(context.by_variant.values()),
        max_kv_heads=max(variant.kv_heads for variant in variants),
        variants=[VariantSpec(variant.name, variant.kv_heads) for variant in variants],
        q_heads=parts.config.num_heads,
        prefix_cache=options.prefix_cache,
    )
    runner = ModelRunner(parts.decoder, pool, parts.attention)
    return Engine(runner, manager, parts.shape, parts.limits, context.by_variant)


def _facts(parts: _Parts, size: PoolSize, context: Context) -> EngineFacts:
    config, layout = parts.config, parts.layout
    total = layout.total_blocks(size.nbytes)
    return EngineFacts(
        family=config.family,
        fingerprint=parts.decoder.weights.fingerprint,
        num_layers=config.num_layers,
        q_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        group=config.group,
        head_dim=config.head_dim,
        vocab_rows=config.vocab_size,
        eos_ids=config.eos_token_ids,
        weight_bytes=parts.decoder.weights.nbytes,
        device=str(parts.shape.device),
        dtype=str(parts.dtype.dtype).removeprefix("torch."),
        dtype_reason=parts.dtype.reason,
        layout=layout,
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        pool_bytes=total * layout.block_bytes,
        pool_reason=size.reason,
        total_blocks=total,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=context.length,
        clamped_from=context.clamped_from,
        max_num_seqs=parts.limits.max_num_seqs,
        max_batch_tokens=parts.limits.max_batch_tokens,
        attention_backend=parts.attention.name,
        attention_reason=parts.attention.reason,
        linear_backend=parts.linear.name,
        linear_reason=parts.linear.reason,
        variants=tuple(_variant(v, config, layout, total, context) for v in parts.shape.variants.values()),
        warnings=context.warnings,
    )


def _variant(
    variant: Variant, config: ModelConfig, layout: KVLayout, total: int, context: Context
) -> VariantFacts:
    fits, longest = layout.tokens_that_fit(total, variant.kv_heads), context.by_variant[variant.name]
    return VariantFacts(
        name=variant.name,
        kv_heads=variant.kv_heads,
        group=config.num_heads // variant.kv_heads,
        bytes_per_token=layout.bytes_per_token(variant.kv_heads),
        tokens_that_fit=fits,
        full_length_users=fits / longest if longest else 0.0,
        max_len=longest,
    )
