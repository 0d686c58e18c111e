"""The comparison in the terminal: a table, with rich where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from fsdp_fx.forecast.comparison import Budget, Forecast, Policy, Progress, RankForecast
from fsdp_fx.forecast.quantities import format_time
from fsdp_fx.planning.memory import format_bytes

__all__ = ["budget_text", "by_policy", "show", "table_lines"]

_LEFT = 1  # columns that are text


def budget_text(budget: Budget | None) -> str:
    """A budget for people; a dash for policies that know none."""
    if budget is None:
        return "–"
    return budget if isinstance(budget, str) else format_bytes(budget)


def show(title: str, forecasts: Sequence[Forecast], floor: int, per_rank: bool) -> None:
    """Print the comparison.

    Args:
        title: what was planned for.
        forecasts: what each policy costs.
        floor: nanoseconds of a step without communication.
        per_rank: whether to show every pipeline rank; else the worst of them, and the mean.
    """
    header, rows = _by_rank(forecasts) if per_rank else by_policy(forecasts)
    notes = [
        f"A step without communication takes {format_time(floor)}.",
        "exposed: nothing but waiting for gathers and reductions, which have the whole bandwidth each.",
        "peak: full parameters and kept full gradients.",
    ]
    if len(forecasts[0].ranks) > 1:
        notes.insert(2, "bubble: waiting for other pipeline ranks.")
        if not per_rank:
            notes.append("Each number is that of the worst pipeline rank (and the mean).")
    if importlib.util.find_spec("rich"):
        _print_rich(title, header, rows, "\n".join(notes))
    else:
        print(title, *table_lines(header, rows), *notes, sep="\n")


@contextmanager
def progress_line() -> Iterator[Progress | None]:
    """Says in the terminal what is planned, in one line that is gone after; nothing in a file."""
    if not sys.stderr.isatty():
        yield None
        return

    def progress(policy: Policy, budget: Budget | None, rank: int) -> None:
        kept = "" if budget is None else f", budget {budget_text(budget)}"
        sys.stderr.write(f"\r\x1b[Kplanning {policy}{kept}, rank {rank}")
        sys.stderr.flush()

    try:
        yield progress
    finally:
        sys.stderr.write("\r\x1b[K")


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in plain text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if column < _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _print_rich(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column < _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "optimum" else None)
    console = Console(highlight=False)
    # Nothing is cut: in a narrow terminal lines wrap, in a file they are long.
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)
    console.print(notes, markup=False, soft_wrap=True)


_Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def by_policy(forecasts: Sequence[Forecast]) -> _Table:
    """One row for each policy and budget: of each number the worst pipeline rank's."""
    several = len(forecasts[0].ranks) > 1
    names = _names(several)
    rows = [
        (
            forecast.policy,
            budget_text(forecast.budget),
            *_cells(forecast.ranks, several),
            format_time(forecast.nanoseconds),
        )
        for forecast in forecasts
    ]
    return ("policy", "budget", *names, "step"), rows


def _by_rank(forecasts: Sequence[Forecast]) -> _Table:
    several = len(forecasts[0].ranks) > 1
    rows = [
        (
            forecast.policy,
            budget_text(forecast.budget),
            str(index),
            *_cells((rank,), several),
            format_time(forecast.nanoseconds),
        )
        for forecast in forecasts
        for index, rank in enumerate(forecast.ranks)
    ]
    return ("policy", "budget", "rank", *_names(several), "step"), rows


def _names(several: bool) -> tuple[str, ...]:
    bubble = ("bubble",) if several else ()
    return ("gathers", "gathered", "reductions", "peak", "exposed", *bubble)


def _cells(ranks: Sequence[RankForecast], several: bool) -> tuple[str, ...]:
    bubble = (_times([rank.bubble for rank in ranks]),) if several else ()
    return (
        f"{max(rank.gathers for rank in ranks):,}",
        format_bytes(max(rank.bytes_gathered for rank in ranks)),
        f"{max(rank.reductions for rank in ranks):,}",
        format_bytes(max(rank.peak_bytes for rank in ranks)),
        _times([rank.exposed for rank in ranks]),
        *bubble,
    )


def _times(durations: Sequence[int]) -> str:
    worst = format_time(max(durations))
    return f"{worst} ({format_time(fmean(durations))})" if len(durations) > 1 else worst
