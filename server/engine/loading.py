"""From a checkpoint to what runs it: weights in the form that a backend reads, the decoder, its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model.attention.base import AttentionBackend
from model.attention.choose import choose_attention_backend
from model.config import ModelConfig
from model.decoder import Decoder
from model.layers_native import native_layers
from model.linear import LinearBackend
from model.linear_choice import choose_linear_backend
from model.loader import load_weights
from model.logprobs import Scorer
from model.native.cores import Cores
from model.sampler import Sampler
from model.sampler_native import choose_sampler, choose_scorer
from model.weights import ModelWeights
from server.engine.errors import ConfigError
from server.engine.kernels import NativeSource, choose_native
from server.engine.options import WEIGHTS, EngineOptions

# Makes the weights of a config, for a device, in a dtype, packed by a backend.
WeightsSource = Callable[[ModelConfig, torch.device, torch.dtype, LinearBackend], ModelWeights]


@dataclass(frozen=True, slots=True)
class Machinery:
    """A checkpoint, ready to run."""

    decoder: Decoder
    attention: AttentionBackend
    linear: LinearBackend  # of the checkpoint's weights
    own_linear: LinearBackend  # of what head maps fit, which is never quantised
    sampler: Sampler
    scorer: Scorer
    cores: Cores


def load_machinery(
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    longest: int,
    native: NativeSource | None,
    weights: WeightsSource | None = None,
) -> Machinery:
    """`folder`'s checkpoint on `device`, for positions below `longest`; `weights` makes its weights instead
    of the folder, `native` gives the operators in C++. Raises ModelError."""
    check_weights(options)
    kernels = choose_native(options.kernels, device, native)
    own_linear = choose_linear_backend(device, dtype, kernels)
    linear = choose_linear_backend(device, dtype, kernels, options.weights)
    if weights is None:
        loaded = load_weights(folder, config, device=device, dtype=dtype, linear=linear)
    else:
        loaded = weights(config, device, dtype, linear)
    layers = native_layers(config, loaded, kernels)
    attention = choose_attention_backend(
        device, dtype, block_size=options.block_size, head_dim=config.head_dim, native=kernels
    )
    decoder = Decoder(config, loaded, device, max_position=longest, layers=layers)
    whole = layers is not None and attention.name == "native"
    cores = Cores(kernels if whole else "PyTorch's operators do most of the work")
    sampler, scorer = choose_sampler(kernels), choose_scorer(kernels)
    return Machinery(decoder, attention, linear, own_linear, sampler, scorer, cores)


def check_weights(options: EngineOptions) -> None:
    """Raises ConfigError for a kind of weights that there is not."""
    if options.weights not in WEIGHTS:
        raise ConfigError(f"--weights {options.weights}: must be one of {', '.join(WEIGHTS)}")
