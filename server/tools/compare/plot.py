"""One picture of a comparison: what a token and the same work take, what a pool yields, what it costs.

Colours are Okabe and Ito's, which people of every colour vision tell apart; each mode has a marker too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from server.engine.errors import ConfigError
from server.engine.units import format_bytes, plural
from server.tools.compare.results import Comparison, FixedWork

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GREY = "#555555"
_INCHES_A_MODE = 1.35  # of a panel: what the longest label under or over a bar takes
_LEAST_PLACES = 3  # that a panel of bars has room for: one bar alone is no wall


def check_matplotlib() -> None:
    """Raises ConfigError, with what to install, where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed; install it with: pip install "
            "'matplotlib>=3.10' (or Headroom's extra [plot])"
        ) from None


def write_plot(found: Comparison, path: Path) -> None:
    """A PNG of `draw`."""
    draw(found).savefig(path, format="png", dpi=110)


def draw(found: Comparison) -> Figure:
    """Four panels, as wide as the modes need."""
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        from matplotlib.figure import Figure

        wide = max(12.0, 2 * (_INCHES_A_MODE * len(found.modes) + 1))
        figure = Figure(figsize=(wide, 8.6), layout="constrained")  # no pyplot: no display, no global state
        axes = figure.subplots(2, 2)
        figure.suptitle(_title(found), fontsize=15, fontweight="bold", x=0.01, ha="left")
        figure.supxlabel(_footer(found), fontsize=8, color=_GREY, x=0.01, ha="left")
        _draw_token(axes[0, 0], found)
        _draw_peak(axes[0, 1], found)
        _draw_curve(axes[1, 0], found)
        _draw_quality(axes[1, 1], found)
        return figure


def _title(found: Comparison) -> str:
    weights = " with random weights" if found.setup.random_weights else ", one checkpoint"
    return f"{found.setup.model}{weights}, {plural(len(found.modes), 'attention mode')}"


def _footer(found: Comparison) -> str:
    setup, machine = found.setup, found.machine
    where = machine.gpu or f"{machine.cpu}, {plural(machine.threads, 'thread')}"
    layers = "" if setup.run_layers == setup.layers else f", {setup.run_layers} of {setup.layers} layers run"
    version = f"Headroom {found.headroom}" + (f" at {found.commit}" if found.commit else "")
    return f"{setup.dtype}{layers}, {where}, torch {machine.torch}, {version}, {found.date[:10]}"


def _names(found: Comparison) -> list[str]:
    heads = [plural(mode.kv_heads, "KV head") for mode in found.modes]
    return [
        f"{mode.mode}{' (lossy)' if mode.lossy else ''}\n{count}"
        for mode, count in zip(found.modes, heads, strict=True)
    ]


def _style(found: Comparison, mode: str) -> tuple[str, str]:
    place = [facts.mode for facts in found.modes].index(mode)
    return _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]


def _bars(axes: Axes, found: Comparison, values: list[float], labels: list[str]) -> None:
    colours = [_style(found, mode.mode)[0] for mode in found.modes]
    bars = axes.bar(_names(found), values, color=colours, width=0.6)
    axes.bar_label(bars, labels, padding=3, fontweight="bold")
    axes.margins(y=0.2)
    _places(axes, len(values))


def _places(axes: Axes, count: int) -> None:
    """Room for `count` modes beside each other, at 0, 1, ..."""
    more = max(0, _LEAST_PLACES - count) / 2
    axes.set_xlim(-0.5 - more, count - 0.5 + more)


def _draw_token(axes: Axes, found: Comparison) -> None:
    sizes = [float(mode.bytes_per_token) for mode in found.modes]
    axes.set_title("What one token takes in the cache", loc="left")
    axes.set_ylabel("bytes a token")
    _bars(axes, found, sizes, [f"{size:,.0f}" for size in sizes])
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_peak(axes: Axes, found: Comparison) -> None:
    setup = found.setup
    axes.set_title("What the same work takes", loc="left")
    who = "1 user" if setup.users == 1 else f"{setup.users:,} users, each"
    axes.set_xlabel(f"{who} with {setup.prompt_tokens:,} tokens in and {setup.output_tokens:,} out")
    axes.set_ylabel("MiB of cache held by users, at the peak")
    done = [found.fixed_work.get(mode.mode) for mode in found.modes]
    sizes = [0 if work is None else work.peak_live_bytes for work in done]
    labels = ["not measured" if work is None else _peak_label(work) for work in done]
    _bars(axes, found, [size / 2**20 for size in sizes], labels)


def _peak_label(work: FixedWork) -> str:
    return f"{format_bytes(work.peak_live_bytes)}\nat {work.output_tokens_per_second:,.0f} tokens/s"


def _draw_curve(axes: Axes, found: Comparison) -> None:
    setup = found.setup
    axes.set_title(
        f"What a pool of {format_bytes(setup.pool_bytes)} yields, users near {setup.context:,} tokens each",
        loc="left",
    )
    if not found.fixed_pool:
        _empty(axes, "not measured")
        return
    axes.set_xlabel(
        "users decoding at once\n× is as many as fit: with one more, somebody is pushed out or waits"
    )
    axes.set_ylabel("tokens per second, all users together")
    for mode, pool in found.fixed_pool.items():
        colour, marker = _style(found, mode)
        users = [point.users for point in pool.curve]
        rates = [point.tokens_per_second for point in pool.curve]
        axes.plot(users, rates, color=colour, marker=marker, linewidth=2)
        axes.plot(users[-1:], rates[-1:], "x", color="black", markersize=11, zorder=5)
        axes.annotate(
            f"{mode}: {plural(users[-1], 'user')}, {rates[-1]:,.0f} tokens/s",
            (users[-1], rates[-1]), xytext=(8, -4), textcoords="offset points", fontsize=9, zorder=6,
            bbox={"facecolor": "white", "edgecolor": colour, "pad": 1.5, "alpha": 0.85},
        )  # fmt: skip
    most = max(pool.users for pool in found.fixed_pool.values())
    ticks = [1 << n for n in range(most.bit_length())]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.8, most * 8)  # room for the last label
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_quality(axes: Axes, found: Comparison) -> None:
    axes.set_title("What it costs: quality beside memory", loc="left")
    if not found.quality:
        asked = "no quality: random weights" if found.setup.random_weights else "not asked for"
        _empty(axes, "not measured" if found.setup.quality else asked)
        return
    from matplotlib.patches import Patch

    widest = max(mode.bytes_per_token for mode in found.modes)
    text = next(iter(found.quality.values())).text
    measured = [mode for mode in found.modes if mode.mode in found.quality]
    for place, mode in enumerate(measured):
        row, colour = found.quality[mode.mode], _style(found, mode.mode)[0]
        share = 100 * mode.bytes_per_token / widest
        memory = axes.bar(place - 0.2, share, 0.36, color=colour)
        same = axes.bar(
            place + 0.2, 100 * row.top1, 0.36, color="white", edgecolor=colour, hatch="///", linewidth=2
        )
        axes.bar_label(memory, [f"{share:.0f} %\ncache"], padding=3)
        axes.bar_label(same, [f"{100 * row.top1:.0f} %\nsame"], padding=3)
    _places(axes, len(measured))
    axes.set_xticks(
        range(len(measured)),
        [f"{mode.mode}\nperplexity {_short(found.quality[mode.mode].perplexity)}\n"
         f"KL {found.quality[mode.mode].kl:.2f} nats" for mode in measured],
    )  # fmt: skip
    axes.set_ylabel("percent")
    axes.set_ylim(0, 145)
    keys = [
        Patch(facecolor=_GREY, edgecolor=_GREY, label="cache a token, of what the widest mode takes"),
        Patch(
            facecolor="white",
            edgecolor=_GREY,
            hatch="///",
            label=f"same likeliest token as native, on {text}",
        ),
    ]
    axes.legend(handles=keys, loc="upper left", frameon=False, fontsize=9)
    axes.set_yticks(range(0, 101, 25))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", color=_GREY, fontsize=12, transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
