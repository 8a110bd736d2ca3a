"""A model's folder to one with other KV heads, by the head map that serves them: checked, fitted, written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.calibration import Calibration
from model.config import ModelConfig
from model.convert import AveragedRows, RepeatedRows, Rewrite, aligned_rows, no_form
from model.convert_folder import check_out, convert_folder
from model.modes import Heads, Mode, counted, parse_mode
from model.progress import Progress
from server.engine.device import DTYPES
from server.engine.errors import ConfigError
from server.tools.plan import layout_of

REDUCING = "aligned-fixed"  # the default for fewer KV heads
Fit = Callable[[Mode, str], Calibration]  # the calibration of a mode, by a head map of that kind


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """`head_map` None: repetition for more KV heads, aligned-fixed for fewer. `dtype` auto: each tensor's."""

    attention: str
    head_map: str | None = None
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `head_map` is repeat, mean or aligned-fixed; a token is counted in `kv_dtype`."""

    out: Path
    weight_bytes: int
    files: int
    mode: Mode
    head_map: str
    native_kv_heads: int
    kv_dtype: str
    native_bytes_per_token: int
    bytes_per_token: int


def convert(folder: Path, out: Path, options: ConvertOptions, fit: Fit, progress: Progress) -> Converted:
    """Write the model in `folder` to `out` in the mode of `options`.

    `fit` is called for head map aligned-fixed alone. Raises ModelError or ConfigError, one line each, before
    anything is fitted or written where that is possible.
    """
    check_out(out)
    config = ModelConfig.from_folder(folder)
    mode, head_map = _choose(config, options)
    rewrite = _rewrite(config, mode, head_map, fit)
    dtype = None if options.dtype == "auto" else DTYPES[options.dtype]
    written = convert_folder(folder, out, config, rewrite, dtype=dtype, progress=progress)
    kv_dtype = _kv_dtype(config, options.dtype)
    layout = layout_of(config, kv_dtype, block_size=1)
    return Converted(
        out=out,
        weight_bytes=written.weight_bytes,
        files=written.files,
        mode=mode,
        head_map=head_map,
        native_kv_heads=config.num_kv_heads,
        kv_dtype=kv_dtype,
        native_bytes_per_token=layout.bytes_per_token(config.num_kv_heads),
        bytes_per_token=layout.bytes_per_token(mode.kv_heads),
    )


def _choose(config: ModelConfig, options: ConvertOptions) -> tuple[Mode, str]:
    """The mode and the head map that makes its heads. Raises ModelError or ConfigError."""
    mode = parse_mode(options.attention, Heads(config.num_heads, config.num_kv_heads))
    if mode.kv_heads == config.num_kv_heads:
        raise ConfigError(
            f"--attention {options.attention}: the checkpoint has {counted(mode.kv_heads)} already; "
            "there is nothing to convert"
        )
    if not mode.lossy:
        if options.head_map is not None:
            raise ConfigError(
                f"--head-map {options.head_map} is for fewer KV heads; {mode.name} has more than the "
                f"checkpoint's {config.num_kv_heads} and repeats them: leave --head-map out"
            )
        return mode, "repeat"
    head_map = options.head_map or REDUCING
    reason = no_form(head_map, config)
    if reason is not None:
        raise ConfigError(f"--head-map {head_map}: {reason}")
    return mode, head_map


def _rewrite(config: ModelConfig, mode: Mode, head_map: str, fit: Fit) -> Rewrite:
    if head_map == "repeat":
        return RepeatedRows(config, mode.kv_heads)
    if head_map == "mean":
        return AveragedRows(config, mode.kv_heads)
    return aligned_rows(fit(mode, head_map), config)


def _kv_dtype(config: ModelConfig, dtype: str) -> str:
    """What the new config.json names, which is what its cache will be in; float32 if it names none."""
    if dtype != "auto":
        return dtype
    return str(config.torch_dtype).removeprefix("torch.") if config.torch_dtype else "float32"
