"""A head map fitted to a checkpoint's folder, for who needs the fit and no engine."""

from __future__ import annotations

from pathlib import Path

from model.calibration import Calibration
from model.config import ModelConfig
from model.decoder import Decoder
from model.linear import choose_linear_backend
from model.loader import load_weights
from model.modes import Mode
from server.engine.device import choose_device, choose_dtype
from server.engine.variants import CalibrationSource, fitted


def fit_folder(
    model_folder: Path,
    mode: Mode,
    head_map: str,
    calibration: CalibrationSource,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> Calibration:
    """The calibration that an engine with these options would serve `mode` by; fitted, or found where it is
    kept. The checkpoint is loaded for it. Raises ModelError or ConfigError."""
    config = ModelConfig.from_folder(model_folder)
    where = choose_device(device)
    chosen = choose_dtype(dtype, config.torch_dtype, where).dtype
    linear = choose_linear_backend(where, chosen)
    weights = load_weights(model_folder, config, device=where, dtype=chosen, linear=linear)
    return fitted(mode, head_map, Decoder(config, weights, where, max_position=1), calibration)
