"""`headroom compare`: what each attention mode of a model saves, and what it costs."""

from __future__ import annotations

from pathlib import Path

from model.fetch import resolve_model
from server.app import model_name
from server.commands.progress import progress
from server.engine.errors import ConfigError
from server.tools.compare.files import write_json, write_markdown
from server.tools.compare.measure import measure
from server.tools.compare.options import CompareOptions, Outputs
from server.tools.compare.plot import check_matplotlib, write_plot
from server.tools.compare.prepare import Prepared, prepare
from server.tools.compare.results import Comparison
from server.tools.compare.table import print_table


def compare(
    options: CompareOptions,
    outputs: Outputs,
    model: str,
    config: Path | None,
    cache_dir: Path,
    hub_endpoint: str | None,
) -> int:
    """Measure, print the table, write the files; the exit code. `config` is the folder of a shape to run with
    random weights, in place of `model`.

    An interruption or a failure keeps what is done: it is printed and written first, and raised then. Raises
    ModelError or ConfigError, one line each, and OSError.
    """
    check_outputs(outputs)
    with progress() as shown:
        if config is None:
            folder = resolve_model(model, cache_dir=cache_dir, progress=shown, hub_endpoint=hub_endpoint)
        else:
            folder, model = config, str(config)
        shown.start("preparing", None)
        prepared = prepare(options, model_name(model, folder), folder, cache_dir)
    stopped = _measure(prepared)
    if prepared.comparison.measured:
        try:
            _write(prepared.comparison, outputs)  # first: whoever reads the table may leave
        finally:
            print_table(prepared.comparison)
    if stopped is not None:
        raise stopped
    return 0


def _measure(prepared: Prepared) -> BaseException | None:
    """What ended it early, if anything did."""
    try:
        with progress() as shown:
            measure(prepared, shown)
    except (KeyboardInterrupt, SystemExit, Exception) as error:  # Ctrl-C, SIGTERM, a failure
        return error
    return None


def check_outputs(outputs: Outputs) -> None:
    """Raises ConfigError for a file that could not be written, before hours of work say so."""
    if outputs.plot is not None:
        if outputs.plot.suffix.lower() != ".png":
            raise ConfigError(f"--plot {outputs.plot}: writes PNG; give it a name that ends in .png")
        check_matplotlib()
    files = {"--json": outputs.json, "--markdown": outputs.markdown, "--plot": outputs.plot}
    given = {flag: path for flag, path in files.items() if path is not None}
    for flag, path in given.items():
        if path.is_dir():
            raise ConfigError(f"{flag} {path}: is a folder; name a file")
        if not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
        _try_out(flag, path)
    if len({path.resolve() for path in given.values()}) < len(given):
        raise ConfigError(f"{' and '.join(given)} name the same file; give each its own")


def _try_out(flag: str, path: Path) -> None:
    """Opens it as the end of the work will: what was there stays, what was not is not left behind."""
    there = path.exists()
    if there and not path.is_file():
        return  # a device or a pipe, whose other end may not be open yet
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be written ({error.strerror}); name another place"
        ) from None
    if not there:
        path.unlink()


def _write(found: Comparison, outputs: Outputs) -> None:
    """Each file, whatever becomes of the others. Raises ConfigError for those that cannot be written."""
    files = (
        ("--json", outputs.json, write_json),
        ("--markdown", outputs.markdown, write_markdown),
        ("--plot", outputs.plot, write_plot),
    )
    wrong = []
    for flag, path, write in files:
        if path is None:
            continue
        try:
            write(found, path)
        except OSError as error:
            wrong.append(f"{flag} {path}: cannot be written ({error.strerror or error})")
    if wrong:
        raise ConfigError("; ".join(wrong))
