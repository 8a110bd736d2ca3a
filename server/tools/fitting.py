"""The calibration of a model that nobody serves: the one `serve` keeps, or one made here and kept for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model.calibration import Calibration
from model.config import ModelConfig
from model.decoder import Decoder
from model.linear_choice import choose_linear_backend
from model.loader import load_weights
from model.modes import Mode
from model.progress import Progress
from server.engine.device import choose_device, choose_dtype
from server.engine.variants import fitted
from server.text.calibration import calibration_source


def fitter(folder: Path, cache_dir: Path, progress: Progress) -> Callable[[Mode, str], Calibration]:
    """A function of mode and head map: the fit to the model in `folder`, on the device and in the dtype that
    `serve` would choose. It loads the weights; raises ModelError where the map cannot apply."""

    def fit(mode: Mode, head_map: str) -> Calibration:
        config = ModelConfig.from_folder(folder)
        device = choose_device("auto")
        dtype = choose_dtype("auto", config.torch_dtype, device).dtype
        linear = choose_linear_backend(device, dtype)
        weights = load_weights(folder, config, device=device, dtype=dtype, linear=linear)
        # `fitted` makes the tables of positions that the text needs.
        decoder = Decoder(config, weights, device, max_position=1)
        return fitted(mode, head_map, decoder, calibration_source(folder, cache_dir, progress))

    return fit
