"""A comparison in words and cells, as the terminal and Markdown both show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.engine.units import format_bytes, plural
from server.tools.compare.results import Comparison, FixedWork, ModeFacts

_STEADY = 1.5  # times: rounds on an idle machine differ by less
_NONE = "–"  # not measured


@dataclass(frozen=True, slots=True)
class Measure:
    """One row: what it is called, and its cell for a mode."""

    name: str
    cell: Callable[[ModeFacts], str]


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that belong together, and a line about how they were measured."""

    title: str
    about: str
    rows: tuple[Measure, ...]


def sections(found: Comparison) -> tuple[Section, ...]:
    """The whole table: what is known of each mode, the two experiments, and quality if it was asked for."""
    parts = [_shape(found), _fixed_work(found), _fixed_pool(found)]
    if found.setup.quality:
        parts.append(_quality(found))
    return tuple(parts)


def headline(found: Comparison) -> tuple[str, ...]:
    """What was compared, where, and with what."""
    setup, machine = found.setup, found.machine
    run = "" if setup.run_layers == setup.layers else f" ({setup.run_layers} of them run)"
    weights = "random weights, " if setup.random_weights else ""
    quantised = "" if setup.weights == "none" else f", {setup.weights} weights"
    where = machine.gpu or f"{machine.cpu}, {machine.threads} of {machine.cores} cores"
    version = found.headroom + (f" at {found.commit}" if found.commit else "")
    return (
        f"{setup.model}: {setup.family}, {plural(setup.layers, 'layer')}{run}, "
        f"{plural(setup.q_heads, 'query head')} and {plural(setup.kv_heads, 'KV head')} of {setup.head_dim}; "
        f"{weights}{setup.dtype}{quantised}",
        f"{where}; torch {machine.torch}",
        f"Headroom {version}; {found.date}",
    )


def ending(found: Comparison) -> tuple[str, ...]:
    """Notes, whether the times can be trusted, and what is missing of a comparison that was cut short."""
    notes = (*found.notes, *_busy(found))
    if found.complete:
        return (*notes, f"Measured in {found.seconds:.0f} s.")
    return (*notes, f"Stopped after {found.seconds:.0f} s; where there is a {_NONE}, nothing was measured.")


def _busy(found: Comparison) -> tuple[str, ...]:
    """A word about modes whose rounds of the same work were not equally fast: something else was running."""
    unsteady = [
        name for name, work in found.fixed_work.items() if max(work.rounds) > _STEADY * min(work.rounds)
    ]
    if not unsteady:
        return ()
    return (
        f"The rounds of {', '.join(unsteady)} differ by more than {_STEADY:g} times: this machine was busy, "
        "and the times mean little. Bytes and users are right all the same.",
    )


def _shape(found: Comparison) -> Section:
    return Section(
        "Cache",
        "",
        (
            Measure("KV heads", lambda mode: str(mode.kv_heads)),
            Measure("answers", lambda mode: f"lossy, {mode.head_map}" if mode.lossy else "exact"),
            Measure("bytes a token", lambda mode: f"{mode.bytes_per_token:,}"),
        ),
    )


def _fixed_work(found: Comparison) -> Section:
    setup = found.setup

    def row(name: str, cell: Callable[[FixedWork], str]) -> Measure:
        done = found.fixed_work
        return Measure(name, lambda mode: cell(done[mode.mode]) if mode.mode in done else _NONE)

    return Section(
        "A. The same work",
        f"{plural(setup.users, 'user')}, {setup.prompt_tokens} tokens in and {setup.output_tokens} out, "
        f"{setup.rounds} rounds; each mode in a pool as large as its peak",
        (
            row("peak live bytes", lambda work: f"{work.peak_live_bytes:,}"),
            row("device bytes", lambda work: _count(work.device_bytes)),
            row("first token, p50 ms", lambda work: _ms(work.ttft_ms.p50)),
            row("first token, p99 ms", lambda work: _ms(work.ttft_ms.p99)),
            row("between tokens, p50 ms", lambda work: _ms(work.itl_ms.p50)),
            row("between tokens, p99 ms", lambda work: _ms(work.itl_ms.p99)),
            row("output tokens/s", lambda work: _ms(work.output_tokens_per_second)),
        ),
    )


def _fixed_pool(found: Comparison) -> Section:
    setup, done = found.setup, found.fixed_pool

    def users(mode: ModeFacts) -> str:
        return str(done[mode.mode].users) if mode.mode in done else _NONE

    def rate(mode: ModeFacts) -> str:
        return _ms(done[mode.mode].curve[-1].tokens_per_second) if mode.mode in done else _NONE

    beyond = {pool.next_user for pool in done.values()} or {"preempted"}
    return Section(
        "B. The same pool",
        f"{format_bytes(setup.pool_bytes)}; users that fill {setup.context} tokens each at once; one more is "
        f"{' or '.join(_BEYOND[word] for word in sorted(beyond))}",
        (Measure("users that fit", users), Measure("tokens/s of them all", rate)),
    )


_BEYOND = {"preempted": "preempted", "waited": "kept waiting"}


def _quality(found: Comparison) -> Section:
    done = found.quality
    row = next(iter(done.values()), None)
    about = "" if row is None else f"measured on {row.text} ({row.licence}), {row.positions:,} positions"
    return Section(
        "Quality",
        about,
        (
            Measure("perplexity", lambda m: _digits(done[m.mode].perplexity) if m.mode in done else _NONE),
            Measure("KL to native, nats", lambda m: f"{done[m.mode].kl:.3f}" if m.mode in done else _NONE),
            Measure("same top-1 token", lambda m: _share(done[m.mode].top1) if m.mode in done else _NONE),
        ),
    )


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.2f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
