"""From options to a plan of work: what can be wrong is refused here, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.modes import Heads, Mode, parse_mode, parse_modes
from model.progress import Progress
from server import __version__
from server.engine.device import choose_device, choose_dtype
from server.engine.errors import ConfigError
from server.engine.memory import free_memory
from server.engine.units import format_bytes
from server.tools.compare.dry import DryModel, size_for_fixed_work, users_that_fit
from server.tools.compare.fixed_pool import FixedPoolJob, Growth, rehearse
from server.tools.compare.fixed_work import ROUNDS, FixedWorkJob
from server.tools.compare.machine import commit, now, this_machine
from server.tools.compare.options import DEFAULT_MODES, CompareOptions
from server.tools.compare.quality import QualityJob, check_text
from server.tools.compare.results import Comparison, ModeFacts, Setup
from server.tools.compare.target import Target
from server.tools.compare.work import Crowd, fixed_work

_SHORTEST = 32  # tokens: less context is no work


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to measure, in a process of its own; its result goes into the part of the comparison that
    `kind` names, under `mode` (quality has every mode at once)."""

    kind: str  # fixed_work, quality or fixed_pool
    mode: str
    label: str
    job: Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What will be measured, in order, and the comparison so far: all that is known without measuring."""

    parts: tuple[Part, ...]
    comparison: Comparison


def prepare(options: CompareOptions, name: str, folder: Path, cache_dir: Path) -> Prepared:
    """The plan for the model in `folder`, called `name`, or for its config alone if weights are random.

    Raises ModelError or ConfigError, one line each; OSError for a text that cannot be read.
    """
    config = ModelConfig.from_folder(folder)
    modes = _modes(options, config)
    _check_sizes(options, config)
    target = _target(options, config, folder, cache_dir)
    if options.quality and not target.random:
        check_text(options.text, folder)
    facts = tuple(_facts(mode, target, config) for mode in modes)
    pool = options.users * max(_dry(mode, target, config).blocks(options.context) for mode in modes)
    _check_memory(pool * target.run_layout(config).block_bytes, target)
    parts = []
    if options.quality and not target.random:  # first, as it may find out that a head map cannot be fitted
        job = QualityJob(target, tuple(mode.name for mode in modes), options.text)
        parts.append(Part("quality", "", "quality on a text", job))
    parts += _fixed_work_parts(options, target, config, modes)
    parts += _fixed_pool_parts(options, target, config, modes, pool)
    comparison = Comparison(
        headroom=__version__,
        commit=commit(),
        date=now(),
        machine=this_machine(target.device, target.threads),
        setup=_setup(options, name, target, config, pool),
        modes=facts,
        fixed_work={},
        fixed_pool={},
        quality={},
        notes=_notes(target, config, modes),
    )
    return Prepared(tuple(parts), comparison)


def _modes(options: CompareOptions, config: ModelConfig) -> tuple[Mode, ...]:
    heads = Heads(config.num_heads, config.num_kv_heads)
    if options.attention:
        return parse_modes(options.attention, heads)
    by_heads: dict[int, Mode] = {}
    for text in DEFAULT_MODES:
        mode = parse_mode(text, heads)
        by_heads.setdefault(mode.kv_heads, mode)
    return tuple(by_heads.values())


def _check_sizes(options: CompareOptions, config: ModelConfig) -> None:
    longest, shortest = config.max_position_embeddings, max(_SHORTEST, 2 * options.block_size)
    if options.context > longest:
        raise ConfigError(
            f"--context {options.context} exceeds the {longest} positions the model was made for "
            f"(max_position_embeddings); give at most {longest}"
        )
    if options.context < shortest:
        raise ConfigError(
            f"--context {options.context} is too short to measure with --block-size {options.block_size}; "
            f"give at least {shortest}"
        )
    if options.layers is not None and options.layers > config.num_layers:
        raise ConfigError(f"--layers {options.layers}: the model has {config.num_layers}; give at most that")


def _target(options: CompareOptions, config: ModelConfig, folder: Path, cache_dir: Path) -> Target:
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config.torch_dtype, device).dtype
    head_map = options.head_map or ("mean" if options.random_weights else "aligned")
    if options.random_weights and head_map != "mean":
        raise ConfigError(
            f"--head-map {head_map} is fitted to a checkpoint's own weights, and random ones have nothing to "
            "fit; take --head-map mean"
        )
    return Target(
        folder=folder,
        cache_dir=cache_dir,
        head_map=head_map,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        block_size=options.block_size,
        threads=options.threads,
        layers=(options.layers or config.num_layers) if options.random_weights else None,
        kernels=options.kernels,
        weights=options.weights,
        compiler=options.compiler,
    )


def _check_memory(pool: int, target: Target) -> None:
    """On a CPU, whose arena would be granted and then kill the process as it fills."""
    free = free_memory()
    if target.device == "cpu" and pool > free:
        raise ConfigError(
            f"the fixed pool would take {format_bytes(pool)}, and {format_bytes(free)} of memory are free; "
            "lower --context or --users, or leave the widest --attention mode out"
        )


def _dry(mode: Mode, target: Target, config: ModelConfig) -> DryModel:
    return DryModel(mode, config.num_heads, target.block_size)


def _fixed_work_parts(
    options: CompareOptions, target: Target, config: ModelConfig, modes: tuple[Mode, ...]
) -> list[Part]:
    parts = []
    tokens = max(target.batch_tokens, options.users)
    for mode in modes:
        pool = size_for_fixed_work(_dry(mode, target, config), options.users, options.context, tokens)
        job = FixedWorkJob(target, mode, options.users, options.context, pool)
        parts.append(Part("fixed_work", mode.name, f"fixed work, {mode.name}", job))
    return parts


def _fixed_pool_parts(
    options: CompareOptions, target: Target, config: ModelConfig, modes: tuple[Mode, ...], pool: int
) -> list[Part]:
    parts = []
    for mode in modes:
        dry = _dry(mode, target, config)
        growth = Growth(
            Crowd(options.context, target.block_size, pool // mode.kv_heads),
            users_that_fit(dry, pool, options.context),
        )
        steps = rehearse(dry, growth, pool, target.batch_tokens)
        job = FixedPoolJob(target, mode, growth, pool, steps)
        parts.append(Part("fixed_pool", mode.name, f"fixed pool, {mode.name}", job))
    return parts


def _facts(mode: Mode, target: Target, config: ModelConfig) -> ModeFacts:
    heads = mode.kv_heads
    return ModeFacts(
        mode=mode.name,
        kv_heads=heads,
        group=config.num_heads // heads,
        lossy=mode.lossy,
        head_map=target.head_map if mode.lossy else "native" if heads == config.num_kv_heads else "repeat",
        bytes_per_token=target.layout(config).bytes_per_token(heads),
        run_bytes_per_token=target.run_layout(config).bytes_per_token(heads),
    )


def _setup(options: CompareOptions, name: str, target: Target, config: ModelConfig, pool: int) -> Setup:
    work, layout = fixed_work(1, options.context)[0], target.run_layout(config)
    return Setup(
        model=name,
        family=config.family,
        layers=config.num_layers,
        run_layers=layout.num_layers,
        q_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        random_weights=target.random,
        device=target.device,
        dtype=target.dtype,
        head_map=target.head_map,
        block_size=target.block_size,
        block_bytes=layout.block_bytes,
        context=options.context,
        users=options.users,
        rounds=ROUNDS,
        prompt_tokens=work.prompt,
        output_tokens=work.output,
        pool_bytes=pool * layout.block_bytes,
        quality=options.quality and not target.random,
        weights=target.weights,
    )


def _notes(target: Target, config: ModelConfig, modes: tuple[Mode, ...]) -> list[str]:
    notes = []
    lossy = ", ".join(mode.name for mode in modes if mode.lossy)
    if target.random:
        notes.append("Random weights: memory and speed are those of the shape, and there is no quality.")
        if lossy:
            notes.append(
                f"Modes with fewer KV heads ({lossy}) use the head map mean, as there is no checkpoint to "
                "fit an aligned one to. The cache is the same either way."
            )
        if target.layers != config.num_layers:
            notes.append(
                f"Run with {target.layers} of {config.num_layers} layers: bytes a token are those of all, "
                "every other number is of what was run."
            )
    elif lossy:
        notes.append(
            f"Lossy: {lossy} (head map {target.head_map}); the other modes give the checkpoint's own answers."
        )
    return notes
