"""What is compared, as plain data that a new process can take, and the engine it makes of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cache.layout import KVLayout
from model.config import ModelConfig, read_json_object
from model.linear import LinearBackend
from model.modes import Mode
from model.progress import Progress
from model.random_weights import random_weights
from model.weights import ModelWeights
from server.engine.build import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, build_engine
from server.engine.device import DTYPES
from server.engine.engine import Engine
from server.engine.facts import EngineFacts
from server.engine.kernels import native_source
from server.engine.layout import cache_layout
from server.engine.options import EngineOptions
from server.text.calibration import calibration_source

_SEED = 0  # of random weights


@dataclass(frozen=True, slots=True)
class Target:
    """One model on one device. `device` and `dtype` are settled; `layers` are those run with random weights,
    None for a checkpoint's own weights, which are all there."""

    folder: Path
    cache_dir: Path
    head_map: str
    device: str
    dtype: str
    block_size: int
    threads: int | None
    layers: int | None
    kernels: str = "auto"
    weights: str = "none"
    compiler: str | None = None  # as `CXX` spells it, None is the system's

    @property
    def random(self) -> bool:
        """Whether the weights are random."""
        return self.layers is not None

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step, as `serve` would have them."""
        return GPU_BATCH_TOKENS if self.device == "cuda" else CPU_BATCH_TOKENS

    def layout(self, config: ModelConfig, layers: int | None = None) -> KVLayout:
        """The cache's layout for `layers` layers of `config` (default: all)."""
        return cache_layout(config, self.block_size, DTYPES[self.dtype], layers)

    def run_layout(self, config: ModelConfig) -> KVLayout:
        """The layout of what is run, which may have fewer layers than `config`."""
        return self.layout(config, self.layers)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run needs of its engine: `blocks` are physical, a sequence has up to `context` tokens."""

    blocks: int
    users: int
    context: int
    batch_tokens: int
    prefix_cache: bool


def make_engine(target: Target, mode: Mode, demand: Demand, progress: Progress) -> tuple[Engine, EngineFacts]:
    """The real engine in one attention mode, over exactly `demand.blocks` blocks; `progress` is told of
    a head map that has to be fitted."""
    if target.threads is not None:
        torch.set_num_threads(target.threads)
    config = ModelConfig.from_folder(target.folder)
    options = EngineOptions(
        device=target.device,
        dtype=target.dtype,
        kv_memory=demand.blocks * target.run_layout(config).block_bytes,
        block_size=target.block_size,
        max_num_seqs=demand.users,
        max_batch_tokens=max(demand.batch_tokens, demand.users),
        prefix_cache=demand.prefix_cache,
        attention=(mode.name,),
        head_map=target.head_map,
        kernels=target.kernels,
        weights=target.weights,
    )
    native = native_source(target.cache_dir, progress, target.compiler)
    if target.layers is None:
        source = calibration_source(target.folder, target.cache_dir, progress)
        return build_engine(options, target.folder, calibration=source, native=native)
    with _cut_config(target.folder, target.layers) as folder:
        return build_engine(options, folder, weights=_random, native=native)


def _random(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, linear: LinearBackend
) -> ModelWeights:
    return random_weights(config, device=device, dtype=dtype, linear=linear, seed=_SEED)


@contextmanager
def _cut_config(folder: Path, layers: int) -> Iterator[Path]:
    """A folder with nothing but the config of `folder`, cut to its first `layers` layers."""
    values = dict(read_json_object(folder / "config.json"))
    values["num_hidden_layers"] = layers
    if isinstance(kinds := values.get("layer_types"), list):
        values["layer_types"] = kinds[:layers]
    with tempfile.TemporaryDirectory(prefix="headroom-compare-") as name:
        (Path(name) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield Path(name)
