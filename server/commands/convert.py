"""`headroom convert`: write a model's folder again with other KV heads."""

from __future__ import annotations

import argparse
from pathlib import Path

from model.convert_folder import check_out
from model.fetch import resolve_model
from server.commands.progress import progress
from server.engine.units import format_bytes, plural
from server.tools.convert import Converted, ConvertOptions, convert
from server.tools.fitting import fitter


def run_convert(args: argparse.Namespace, cache_dir: Path, hub_endpoint: str | None) -> int:
    """Fetch if need be, convert, say what was written; the exit code. Raises ModelError or ConfigError."""
    out = Path(args.out).expanduser()
    check_out(out)  # before a download, and again later
    with progress() as shown:
        folder = resolve_model(args.model, cache_dir=cache_dir, progress=shown, hub_endpoint=hub_endpoint)
        options = ConvertOptions(args.attention, args.head_map, args.dtype)
        done = convert(folder, out, options, fitter(folder, cache_dir, shown), shown)
    print(told(done))
    return 0


def told(done: Converted) -> str:
    """One line for people about what was written."""
    where = plural(done.files, "file")
    kind = "the answers stay the same (repeated heads)"
    if done.mode.lossy:
        kind = f"lossy, the answers change (head map {done.head_map})"
    return (
        f"wrote {done.out}: {format_bytes(done.weight_bytes)} of weights in {where}; "
        f"KV heads {done.native_kv_heads} → {done.mode.kv_heads}; cache {done.native_bytes_per_token:,} → "
        f"{done.bytes_per_token:,} bytes a token ({done.kv_dtype}); {kind}"
    )
