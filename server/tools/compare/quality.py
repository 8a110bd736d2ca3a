"""The quality of every mode on a text, as a job for a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from model.config import ModelConfig
from model.progress import Progress
from server.engine.kernels import native_source
from server.engine.options import EngineOptions
from server.engine.scoring import load_scoring
from server.text.calibration import calibration_source
from server.text.tokenizer import Tokenizer
from server.tools.compare.target import Target
from server.tools.quality import (
    WINDOW,
    QualityRow,
    QualityText,
    measure_quality,
    own_text,
    shipped_text,
)

_SHARES = 1000  # units of the progress bar


@dataclass(frozen=True, slots=True)
class QualityJob:
    """All modes on one text: native's predictions are computed once for all."""

    target: Target
    modes: tuple[str, ...]
    text: Path | None

    def __call__(self, progress: Progress) -> tuple[QualityRow, ...]:
        """A row a mode. Raises ModelError or ConfigError."""
        target = self.target
        if target.threads is not None:
            torch.set_num_threads(target.threads)
        options = EngineOptions(
            device=target.device,
            dtype=target.dtype,
            attention=self.modes,
            head_map=target.head_map,
            kernels=target.kernels,
            weights=target.weights,
        )
        text = load_text(self.text, target.folder)
        source = calibration_source(target.folder, target.cache_dir, progress)
        native = native_source(target.cache_dir, progress, target.compiler)
        scoring = load_scoring(options, target.folder, max(map(len, text.windows)), source, native)
        progress.start("", _SHARES)
        return measure_quality(scoring, [text], progress=lambda share: progress.update(int(share * _SHARES)))


def load_text(path: Path | None, folder: Path) -> QualityText:
    """The user's text, or the shipped one. Raises ConfigError, ModelError, OSError."""
    longest = min(WINDOW, ModelConfig.from_folder(folder).max_position_embeddings)
    tokenizer = Tokenizer.from_folder(folder)
    return shipped_text(tokenizer, longest) if path is None else own_text(path, tokenizer, longest)


def check_text(path: Path | None, folder: Path) -> None:
    """Raises what `load_text` would, before anything is measured."""
    load_text(path, folder)
