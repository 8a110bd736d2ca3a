"""The text that head maps are fitted to, as the ids of a checkpoint's tokenizer, and where fits are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from model.config import ModelConfig
from model.progress import Progress
from server.engine.variants import CalibrationSource
from server.text.samples import calibration_windows
from server.text.tokenizer import Tokenizer


def calibration_source(
    folder: Path,
    cache_dir: Path,
    progress: Progress,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> CalibrationSource:
    """For the checkpoint in `folder`, whose tokenizer is read when it is needed unless `tokenizer` has it.
    Fits are kept under `cache_dir`, the user's cache. Asking for the windows raises ModelError."""

    def windows() -> Sequence[Sequence[int]]:
        longest = ModelConfig.from_folder(folder).max_position_embeddings
        words = Tokenizer.from_folder(folder) if tokenizer is None else tokenizer()
        return calibration_windows(words, longest)

    return CalibrationSource(windows, cache_dir / "calibrations", progress)
