"""Pictures of a program: what computes, what is resident, what is reduced, and when.

:func:`save_timeline` draws a program as PNG or SVG with matplotlib (the ``viz`` extra),
or writes it for Perfetto and ``chrome://tracing`` as JSON, which needs nothing.

Time is counted in events: nothing here is measured, every compute is drawn one event
wide, and a gather in flight spans the events between its issue and its wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_fx.planning.memory import Interval, format_bytes, intervals, resident_bytes
from fsdp_fx.program import Program
from fsdp_fx.trace import Call, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Segment", "save_timeline", "segments"]

State = Literal["in flight", "F", "B", "held"]

_COLORS: dict[State, str] = {
    "in flight": "#f2c14e",
    "F": "#3d7ea6",
    "B": "#c8553d",
    "held": "#cfd8dc",
}
_MEMORY = "#80b5a5"
_LEGEND: dict[State, str] = {
    "in flight": "gather in flight",
    "F": "in use, forward",
    "B": "in use, backward",
    "held": "held, not in use",
}
_INK = "#263238"
_LANE_INCHES = 0.26
_EVENT_MICROSECONDS = 1000


@dataclass(frozen=True)
class Segment:
    """A run of events in which a unit is resident in one state.

    Args:
        unit: name of the unit.
        state: ``"in flight"``, in use by a forward (``"F"``) or backward (``"B"``), or
            ``"held"``: gathered and not in use.
        start: position of its first event.
        stop: position after its last event.
    """

    unit: str
    state: State
    start: int
    stop: int


def save_timeline(
    program: Program, path: str | os.PathLike[str], *, caption: str | None = None
) -> None:
    """Draw ``program`` into a file.

    Args:
        program: a program that verifies.
        path: a file that ends in ``.png`` or ``.svg`` for a picture, in ``.json`` for
            the Chrome trace format, in which one event takes 1 ms.
        caption: what the title says besides the numbers of events, units and chunks, for
            example the rank.

    Raises:
        ValueError: the file ends in something else.
        ImportError: a picture is wanted and matplotlib is not installed.
    """
    target = Path(path)
    match target.suffix.lower():
        case ".json":
            target.write_text(json.dumps(_chrome_trace(program, caption)))
        case ".png" | ".svg":
            _figure(program, caption).savefig(target, dpi=120, bbox_inches="tight")
        case suffix:
            raise ValueError(
                f"cannot save a timeline as {suffix or 'a file without suffix'}: "
                f"use .png, .svg or .json"
            )


def segments(program: Program) -> tuple[Segment, ...]:
    """Where each unit is resident, and in which state.

    Where forward and backward of one unit overlap, the use that began last counts. A
    gather on demand has no segment in flight: it is waited for where it is issued.

    Returns:
        Segments by unit in adoption order, then by time; those of a unit are disjoint.
    """
    order = {unit.name: index for index, unit in enumerate(program.trace.units)}
    found = [
        segment for interval in intervals(program) for segment in _split(program.trace, interval)
    ]
    return tuple(sorted(found, key=lambda segment: (order[segment.unit], segment.start)))


def _split(trace: Trace, interval: Interval) -> Iterator[Segment]:
    """The segments of one interval: runs of positions in equal state."""
    states: list[State] = ["held"] * (interval.freed + 1 - interval.gathered)
    states[: interval.waited - interval.gathered] = ["in flight"] * (
        interval.waited - interval.gathered
    )
    for use in interval.uses:
        for position in range(use, min(trace.ends[use], interval.freed) + 1):
            states[position - interval.gathered] = trace[use].phase
    start = 0
    for index in range(1, len(states) + 1):
        if index == len(states) or states[index] != states[start]:
            yield Segment(
                interval.unit,
                states[start],
                interval.gathered + start,
                interval.gathered + index,
            )
            start = index


def _on_demand(program: Program) -> list[tuple[str, int]]:
    """Unit and position of the gathers that compute has to wait for."""
    return [
        (interval.unit, interval.gathered)
        for interval in intervals(program)
        if interval.gathered == interval.waited
    ]


def _reductions(program: Program) -> list[tuple[str, int]]:
    """Unit and position of the event after which each reduction starts."""
    trace = program.trace
    return [
        (unit, trace.ends[position])
        for position, step in enumerate(program.steps)
        for unit in step.reduces
    ]


# Pictures


def _figure(program: Program, caption: str | None = None) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib: pip install fsdp-fx[viz]"
        ) from error

    events, units = len(program.trace), len(program.trace.units)
    lanes = _LANE_INCHES * (units + 1.6)
    figure = Figure(figsize=(min(max(9.5, 0.13 * events + 2), 40.0), lanes + 2.6))
    # One axes per kind of lane: labels of one never reach into another.
    compute, resident, memory = figure.subplots(
        3,
        1,
        sharex=True,
        height_ratios=(1.6 * _LANE_INCHES, units * _LANE_INCHES, 1.1),
        gridspec_kw={"hspace": 0.08},
    )
    # Inches per event, by which labels are fitted.
    scale = figure.get_figwidth() * 0.775 / max(events, 1)
    _draw_compute(compute, program, scale)
    _draw_units(resident, program)
    _draw_memory(memory, program)
    for axes in (compute, resident, memory):
        _draw_phases(axes, program)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    for axes in (compute, resident):
        axes.tick_params(axis="x", length=0, labelbottom=False)
        axes.spines["bottom"].set_visible(False)
    memory.set_xlim(0, max(events, 1))
    memory.set_xlabel("event (schedule order, not measured time)", fontsize=8)
    memory.tick_params(axis="x", labelsize=8)
    memory.xaxis.get_major_locator().set_params(integer=True)
    _draw_legend(compute, program)
    compute.set_title(_title(program, caption), loc="left", fontsize=9, pad=24)
    return figure


def _title(program: Program, caption: str | None) -> str:
    trace = program.trace
    counts = [
        (len(trace), "event"),
        (len(trace.units), "unit"),
        (len({unit.chunk for unit in trace.units}), "chunk"),
    ]
    title = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    return f"{caption}: {title}" if caption else title


def _draw_compute(axes: Axes, program: Program, scale: float) -> None:
    trace = program.trace
    for call in trace.calls:
        width = call.stop - call.start
        axes.broken_barh(
            [(call.start, width)],
            (-0.45, 0.9),
            facecolors=_COLORS[call.phase],
            edgecolors="white",
            linewidth=1.0,
        )
        if label := _call_label(call, width * scale):
            axes.text(
                call.start + width / 2,
                0,
                label,
                ha="center",
                va="center",
                color="white",
                fontsize=7,
            )
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([0], ["compute\n(microbatch)"], fontsize=8)
    axes.tick_params(axis="y", length=0)


def _call_label(call: Call, inches: float) -> str:
    """The longest label of a call that fits its box, possibly none."""
    short = f"{call.phase}{call.microbatch}"
    letter = 0.07  # inches at 7 points, generously
    for label in (f"{call.chunk} {short}", f"{call.chunk}\n{short}", short, short[1:]):
        if max(map(len, label.split("\n"))) * letter <= inches:
            return label
    return ""


def _draw_units(axes: Axes, program: Program) -> None:
    units = program.trace.units
    lane = {unit.name: index for index, unit in enumerate(units)}
    for segment in segments(program):
        axes.broken_barh(
            [(segment.start, segment.stop - segment.start)],
            (lane[segment.unit] - 0.36, 0.72),
            facecolors=_COLORS[segment.state],
            edgecolors="white",
            linewidth=0.4,
        )
    reductions = [(position + 1, lane[unit]) for unit, position in _reductions(program)]
    # At the upper edge of the lane, where no reduction is.
    demands = [(position, lane[unit] - 0.3) for unit, position in _on_demand(program)]
    for points, marker, size in ((reductions, "D", 13), (demands, "v", 34)):
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            marker=marker,
            s=size,
            color=_INK,
            edgecolors="white",
            linewidth=0.5,
            zorder=3,
            clip_on=False,
        )
    axes.set_ylim(len(units) - 0.5, -0.5)
    axes.set_yticks(range(len(units)), [unit.name for unit in units], fontsize=8)
    axes.tick_params(axis="y", length=0)


def _draw_memory(axes: Axes, program: Program) -> None:
    curve = resident_bytes(program)
    if not curve:
        return
    edges = range(len(curve) + 1)
    axes.stairs(curve, edges, fill=True, color=_MEMORY, alpha=0.5)
    axes.stairs(curve, edges, color=_INK, linewidth=1.0)
    peak = max(curve)
    axes.set_ylim(0, 1.15 * max(peak, 1))
    axes.set_yticks([0, peak], ["0", format_bytes(peak)], fontsize=8)
    axes.set_ylabel("resident", fontsize=8)
    axes.grid(axis="y", color="#b0bec5", linewidth=0.5)
    axes.set_axisbelow(True)


def _draw_phases(axes: Axes, program: Program) -> None:
    """Shade backward calls; mark calls faintly and changes of phase strongly."""
    before: Call | None = None
    for call in program.trace.calls:
        if call.phase == "B":
            axes.axvspan(call.start, call.stop, color=_COLORS["B"], alpha=0.07, zorder=0, lw=0)
        if before is not None:
            changed = before.phase != call.phase
            axes.axvline(
                call.start,
                color=_INK if changed else "#b0bec5",
                linewidth=0.9 if changed else 0.5,
                zorder=0.5,
            )
        before = call


def _draw_legend(axes: Axes, program: Program) -> None:
    """What the marks mean, of those that occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {segment.state for segment in segments(program)}
    entries: list[Patch | Line2D] = [
        Patch(facecolor=_COLORS[state], label=text)
        for state, text in _LEGEND.items()
        if state in found
    ]
    for occurs, marker, size, text in (
        (_on_demand(program), "v", 6, "gather on demand"),
        (_reductions(program), "D", 4, "reduction starts"),
    ):
        if occurs:
            entries.append(
                Line2D([], [], color=_INK, marker=marker, linestyle="", ms=size, label=text)
            )
    if not entries:
        return
    axes.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        ncols=6,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        borderaxespad=0,
        columnspacing=1.4,
    )


# Chrome trace format


def _chrome_trace(program: Program, caption: str | None = None) -> dict[str, Any]:
    trace = program.trace
    lane = {unit.name: index + 1 for index, unit in enumerate(trace.units)}
    sizes = {unit.name: unit.bytes for unit in trace.units}
    rows: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": _title(program, caption)}}
    ]
    for name, thread in [("compute", 0), *lane.items()]:
        rows.append(_row("M", thread, name="thread_name", args={"name": name}))
        rows.append(_row("M", thread, name="thread_sort_index", args={"sort_index": thread}))
    for position, event in enumerate(trace):
        numbers = {"microbatch": event.microbatch, "position": position}
        rows.append(_span(0, str(event), event.phase, position, position + 1, numbers))
    for segment in segments(program):
        name = "in use" if segment.state in ("F", "B") else segment.state
        args = {"unit": segment.unit, "bytes": sizes[segment.unit]}
        rows.append(
            _span(lane[segment.unit], name, segment.state, segment.start, segment.stop, args)
        )
    for unit, position in _on_demand(program):
        rows.append(_instant(lane[unit], "gather on demand", position))
    for unit, position in _reductions(program):
        rows.append(_instant(lane[unit], "reduce", position + 1))
    for position, value in enumerate([*resident_bytes(program), 0]):
        time = position * _EVENT_MICROSECONDS
        rows.append(_row("C", 0, name="resident bytes", ts=time, args={"bytes": value}))
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {"time": "1 ms per event; schedule order, not measured time"},
    }


def _row(phase: str, thread: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": 0, "tid": thread, **fields}


def _span(
    thread: int, name: str, category: str, start: int, stop: int, args: dict[str, Any]
) -> dict[str, Any]:
    return _row(
        "X",
        thread,
        name=name,
        cat=category,
        ts=start * _EVENT_MICROSECONDS,
        dur=(stop - start) * _EVENT_MICROSECONDS,
        args=args,
    )


def _instant(thread: int, name: str, position: int) -> dict[str, Any]:
    return _row("i", thread, name=name, ts=position * _EVENT_MICROSECONDS, s="t")
