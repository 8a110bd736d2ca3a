"""`make cache-page`: measure the default model in three attention modes, and write it into the docs.

    python -m loadtest.cache_page [--model MODEL] [--compare "FLAGS"] [--render]

`headroom compare` runs in a process of its own. Its JSON is kept in loadtest/results/, its picture in docs/,
and what lies between the markers of docs/cache.md and README.md is written anew from them. With `--render`
nothing is measured: the pages are written from the JSON that is there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loadtest import page
from loadtest.command import ROOT, parser_of, read_json
from loadtest.page import Found, lines, number, table
from server.engine.units import format_bytes

RESULT = "loadtest/results/cache-modes.json"
PICTURE = "docs/cache-modes.png"
PICTURE_BYTES = 200_000  # a page should be quick
BEGIN = "<!-- measured: `make cache-page` writes what follows -->"

Mode = Mapping[str, Any]
Columns = Mapping[str, Callable[[Mode], str]]  # by their headings, how a cell is filled


def cache_page(found: Found) -> str:
    """The block of docs/cache.md: both experiments, quality, the picture, and where it was measured."""
    setup = found["setup"]
    quality = found["modes"][0]["quality"]
    work: Columns = {
        "KV heads": lambda mode: str(mode["kv_heads"]),
        "bytes a token": lambda mode: f"{mode['bytes_per_token']:,}",
        "peak live bytes": lambda mode: f"{mode['fixed_work']['peak_live_bytes']:,}",
        "arena, by the system": lambda mode: f"{mode['fixed_work']['device_bytes']:,}",
        "first token": lambda mode: _spread(mode["fixed_work"]["ttft_ms"]),
        "between tokens": lambda mode: _spread(mode["fixed_work"]["itl_ms"]),
        "output tokens/s": lambda mode: number(mode["fixed_work"]["output_tokens_per_second"]),
    }
    pool: Columns = {
        "users that fit": lambda mode: str(mode["fixed_pool"]["users"]),
        "tokens/s of them all": lambda mode: number(_full(mode)),
        "perplexity": lambda mode: number(mode["quality"]["perplexity"], 2),
        "KL to native, nats": lambda mode: f"{mode['quality']['kl']:.3f}",
        "same likeliest token": lambda mode: f"{100 * mode['quality']['top1']:.1f} %",
    }
    return "\n\n".join(
        [
            lines(f"{_where(found)} Times are the median and the 99th percentile in ms."),
            f"The same work: {setup['users']} users, each with {setup['prompt_tokens']} tokens in and "
            f"{setup['output_tokens']} out.",
            _modes(found, work),
            lines(
                f"The same pool of {format_bytes(setup['pool_bytes'])}, filled by users of "
                f"{setup['context']} tokens each; and quality on {quality['text']} ({quality['licence']}), "
                f"{quality['positions']:,} positions."
            ),
            _modes(found, pool),
            f"![{_caption(found)}](cache-modes.png)",
        ]
    )


def readme(found: Found) -> str:
    """The block of README.md: a row a mode, and the picture."""
    setup = found["setup"]
    columns: Columns = {
        "KV heads": lambda mode: str(mode["kv_heads"]),
        "bytes a token": lambda mode: f"{mode['bytes_per_token']:,}",
        f"{setup['users']} users hold": lambda mode: format_bytes(mode["fixed_work"]["peak_live_bytes"]),
        f"users in {format_bytes(setup['pool_bytes'])}": lambda mode: str(mode["fixed_pool"]["users"]),
        "tokens/s of them all": lambda mode: number(_full(mode)),
        "KL to native, nats": lambda mode: f"{mode['quality']['kl']:.3f}",
    }
    return "\n\n".join(
        [
            lines(
                f"{_where(found)} Users have {setup['context']} tokens each; "
                "[docs/cache.md](docs/cache.md#measured) has the rest."
            ),
            _modes(found, columns),
            f"![{_caption(found)}]({PICTURE})",
        ]
    )


BLOCKS: Mapping[str, Callable[[Found], str]] = {"docs/cache.md": cache_page, "README.md": readme}


def render(root: Path) -> None:
    """Write the pages under `root` from its JSON."""
    found = read_json(root / RESULT)
    for name, block in BLOCKS.items():
        page.fill(root / name, block(found), BEGIN)


def compare(model: str, flags: list[str], root: Path) -> None:
    """Run `headroom compare`, keep its JSON and picture. SystemExit if it failed, and nothing is changed."""
    with tempfile.TemporaryDirectory(prefix="headroom-cache-page-") as name:
        result, picture = Path(name) / "found.json", Path(name) / "picture.png"
        command = [sys.executable, "-m", "server.cli", "compare", model, *flags]
        done = subprocess.run([*command, "--json", result, "--plot", picture], cwd=ROOT)
        if done.returncode:
            raise SystemExit(
                f"headroom compare ended with code {done.returncode}; the pages are as they were"
            )
        shrink(picture)
        if picture.stat().st_size > PICTURE_BYTES:
            raise SystemExit(
                f"the picture has {picture.stat().st_size:,} bytes; {PICTURE_BYTES:,} are allowed"
            )
        (root / RESULT).parent.mkdir(exist_ok=True)
        (root / RESULT).write_bytes(result.read_bytes())
        (root / PICTURE).write_bytes(picture.read_bytes())


def shrink(picture: Path) -> None:
    """Write the PNG again with a palette of its 256 colours: a third of the size, and no eye sees it."""
    from PIL import Image  # comes with matplotlib

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(picture, format="PNG", optimize=True)


def _modes(found: Found, columns: Columns) -> str:
    """A row a mode."""
    rows = []
    for mode in found["modes"]:
        name = f"`{mode['mode']}`" + (f", lossy ({mode['head_map']})" if mode["lossy"] else "")
        rows.append((name, *(cell(mode) for cell in columns.values())))
    return table(("mode", *columns), rows)


def _where(found: Found) -> str:
    """One sentence: what was measured, on which machine, with which software, and when."""
    machine, setup = found["machine"], found["setup"]
    memory = "" if machine["memory_bytes"] is None else f", {format_bytes(machine['memory_bytes'])} of memory"
    cores = f"{machine['threads']} of {machine['cores']} cores"
    place = machine["gpu"] or f"{machine['cpu']} ({cores}{memory})"
    version = found["headroom"] + (f" at `{found['commit']}`" if found["commit"] else "")
    return (
        f"{setup['model']} in {setup['dtype']} on {place}; PyTorch {machine['torch']}, Headroom {version}, "
        f"{found['date'][:10]}."
    )


def _caption(found: Found) -> str:
    names = ", ".join(mode["mode"] for mode in found["modes"])
    return (
        f"{found['setup']['model']} as {names}: cache of a token and of the same work, "
        "tokens per second over users, quality"
    )


def _full(mode: Mode) -> float:
    """Tokens per second with as many users as fit."""
    return float(mode["fixed_pool"]["curve"][-1]["tokens_per_second"])


def _spread(times: Mapping[str, float]) -> str:
    return f"{number(times['p50'])}, {number(times['p99'])}"


def main() -> int:
    """Measure unless told not to, then write the pages; the exit code."""
    parser = parser_of("cache_page", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="what to measure (default: %(default)s)")
    parser.add_argument("--compare", default="", metavar="FLAGS", help="more flags for headroom compare")
    parser.add_argument("--render", action="store_true", help="write the pages from the JSON that is there")
    options = parser.parse_args()
    if not options.render:
        compare(options.model, shlex.split(options.compare), ROOT)
    render(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
