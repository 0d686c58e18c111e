"""A timeline as a picture, drawn with matplotlib (the ``viz`` extra).

From top to bottom: the calls that compute, gathers, reductions, a lane for each unit, and
memory. What is drawn is :class:`~fsdp_fx.timeline.lanes.Lanes`; here is only how.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fsdp_fx.planning.memory import format_bytes
from fsdp_fx.timeline.lanes import Collective, Lanes, State, rows_of, title
from fsdp_fx.trace import Call

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure"]

_INK = "#263238"
_FAINT = "#b0bec5"
_COLORS: dict[State, str] = {
    "in flight": "#f2c14e",
    "F": "#3d7ea6",
    "B": "#c8553d",
    "held": "#cfd8dc",
}
_LEGEND: dict[State, str] = {
    "in flight": "gather in flight",
    "F": "in use, forward",
    "B": "in use, backward",
    "held": "held, not in use",
}
_GATHERS = {"ahead": _COLORS["in flight"], "on demand": "#c77d0a"}
_REDUCTIONS = {"full": "#6a4c93", "partial": "#b79fd6"}
_GRADIENT = "#dcc6ea"
_PARAMETERS = "#bfdad2"
_CAPACITY = "#ad1457"

# Heights in inches. Gathers that overlap share their lane, up to a height.
_CALLS, _UNIT, _ROW, _LANE, _MEMORY = 0.42, 0.26, 0.17, 0.9, 1.25
_GAP = 0.1
# A capacity of more than so many times the peak would flatten the curve.
_TALLEST = 4
_LEGEND_COLUMN, _LEGEND_ROW = 1.75, 0.19
_LABELS = 1.7  # what is left and right of the axes
_LETTER = 0.07  # the width of a letter at 7 points, generously


@dataclass(frozen=True)
class _Scale:
    """How time becomes a place in the picture.

    Args:
        unit: how much time is one on the axis.
        inches: how long that is.
        label: what the axis is called.
        dense: whether an event is too narrow for outlines and large marks.
    """

    unit: float
    inches: float
    label: str
    dense: bool

    def at(self, time: int) -> float:
        return time / self.unit

    def span(self, start: int, stop: int) -> tuple[float, float]:
        """Start and width, as matplotlib wants them."""
        return start / self.unit, (stop - start) / self.unit


def figure(lanes: Lanes, caption: str | None = None) -> Figure:
    """The picture.

    Args:
        lanes: what to draw.
        caption: what the title begins with.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib: pip install fsdp-fx[viz]"
        ) from error

    events, units = len(lanes.program.trace), len(lanes.program.trace.units)
    gathers = rows_of([each for each in lanes.gathers if each.start < each.stop])
    reductions = rows_of(lanes.reductions)
    heights = [
        _CALLS,
        *(min(_ROW * max(len(rows), 1), _LANE) + 0.1 for rows in (gathers, reductions)),
        _UNIT * max(units, 1),
        _MEMORY,
    ]
    width = min(max(9.5, 0.13 * events + 2), 40.0)
    entries = list(_legend(lanes))
    columns = max(int((width - _LABELS) / _LEGEND_COLUMN), 1)
    legend_rows = math.ceil(len(entries) / columns)
    above, below = 0.35 + _LEGEND_ROW * legend_rows, 0.5
    inner = sum(heights) + _GAP * (len(heights) - 1)
    height = inner + above + below
    result = Figure(figsize=(width, height))
    # One axes per kind of lane: labels of one never reach into another.
    compute, gathering, reducing, resident, memory = result.subplots(
        len(heights),
        1,
        sharex=True,
        height_ratios=heights,
        gridspec_kw={
            "hspace": _GAP / (sum(heights) / len(heights)),
            "left": 0.75 * _LABELS / width,
            "right": 1 - 0.25 * _LABELS / width,
            "bottom": below / height,
            "top": 1 - above / height,
        },
    )
    scale = _scale(lanes, width - _LABELS)
    _draw_calls(compute, lanes, scale)
    _draw_collectives(gathering, "gathers", gathers, _GATHERS, scale)
    _draw_collectives(reducing, "reductions", reductions, _REDUCTIONS, scale)
    _draw_units(resident, lanes, scale)
    _draw_memory(memory, lanes, scale)
    for axes in (compute, gathering, reducing, resident, memory):
        _draw_phases(axes, lanes, scale)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    for axes in (compute, gathering, reducing, resident):
        axes.tick_params(axis="x", length=0, labelbottom=False)
        axes.spines["bottom"].set_visible(False)
    memory.set_xlim(0, max(scale.at(lanes.stop), scale.at(1)))
    memory.set_xlabel(scale.label, fontsize=8)
    memory.tick_params(axis="x", labelsize=8)
    if lanes.simulated is None:
        memory.xaxis.get_major_locator().set_params(integer=True)
    if entries:
        compute.legend(
            handles=entries,
            loc="lower left",
            bbox_to_anchor=(0, 1.02),
            ncols=columns,
            fontsize=8,
            frameon=False,
            handlelength=1.2,
            borderaxespad=0,
            columnspacing=1.2,
            labelspacing=0.35,
        )
    # The pad is in points.
    compute.set_title(
        title(lanes, caption), loc="left", fontsize=9, pad=8 + 72 * _LEGEND_ROW * legend_rows
    )
    return result


def _scale(lanes: Lanes, inches: float) -> _Scale:
    total = max(lanes.stop, 1)
    dense = inches / max(len(lanes.program.trace), 1) < 0.07
    if lanes.simulated is None:
        label = "event (schedule order, not measured time)"
        return _Scale(1, inches / total, label, dense)
    name, unit = next(
        ((name, unit) for name, unit in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)) if total >= unit),
        ("ns", 1.0),
    )
    label = f"{name} (simulated from given durations)"
    return _Scale(unit, inches / (total / unit), label, dense)


def _draw_calls(axes: Axes, lanes: Lanes, scale: _Scale) -> None:
    from matplotlib.patheffects import withStroke

    for call in lanes.program.trace.calls:
        color = _COLORS[call.phase]
        start, width = scale.span(lanes.starts[call.start], lanes.ends[call.stop - 1])
        # The whole call lightly, so that where compute waits still belongs to it.
        axes.broken_barh([(start, width)], (-0.45, 0.9), facecolors=color, alpha=0.25, lw=0)
        axes.broken_barh(
            [scale.span(*busy) for busy in _busy(lanes, call)],
            (-0.45, 0.9),
            facecolors=color,
            edgecolors="white",
            linewidth=0.3 if scale.dense else 1.0,
        )
        if label := _call_label(call, width * scale.inches):
            axes.text(
                start + width / 2,
                0,
                label,
                ha="center",
                va="center",
                color="white",
                fontsize=7,
                linespacing=0.95,
                path_effects=[withStroke(linewidth=2.4, foreground=color)],
            )
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([0], ["compute\n(microbatch)"], fontsize=8)


def _busy(lanes: Lanes, call: Call) -> Iterator[tuple[int, int]]:
    """The stretches of a call in which compute does not wait."""
    start = stop = lanes.starts[call.start]
    for position in range(call.start, call.stop):
        if lanes.starts[position] > stop:
            yield start, stop
            start = lanes.starts[position]
        stop = lanes.ends[position]
    yield start, stop


def _call_label(call: Call, inches: float) -> str:
    """The longest label of a call that fits its box, possibly none."""
    short = f"{call.phase}{call.microbatch}"
    for label in (f"{call.chunk} {short}", f"{call.chunk}\n{short}", short, short[1:]):
        if max(map(len, label.split("\n"))) * _LETTER <= inches:
            return label
    return ""


def _draw_collectives(
    axes: Axes,
    name: str,
    rows: Sequence[Sequence[Collective]],
    colors: dict[str, str],
    scale: _Scale,
) -> None:
    count = max(len(rows), 1)
    for index, row in enumerate(rows):
        for kind, color in colors.items():
            axes.broken_barh(
                [scale.span(each.start, each.stop) for each in row if each.kind == kind],
                (index - 0.42, 0.84),
                facecolors=color,
                edgecolors="white",
                linewidth=0 if scale.dense else 0.5,
            )
        if _ROW * count > _LANE + 0.01:
            continue  # too low for text
        for each in row:
            start, width = scale.span(each.start, each.stop)
            if len(each.unit) * _LETTER <= width * scale.inches:
                axes.text(
                    start + width / 2,
                    index,
                    each.unit,
                    ha="center",
                    va="center",
                    color="white" if each.kind == "full" else _INK,
                    fontsize=6.5,
                )
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_yticks([(count - 1) / 2], [name], fontsize=8)


def _draw_units(axes: Axes, lanes: Lanes, scale: _Scale) -> None:
    units = lanes.program.trace.units
    lane = {unit.name: index for index, unit in enumerate(units)}
    # Gradients have a strip of the lane to themselves, if there are any.
    top, height = (-0.4, 0.56) if lanes.kept else (-0.36, 0.72)
    spans: dict[tuple[str, State], list[tuple[float, float]]] = {}
    for segment in lanes.segments:
        spans.setdefault((segment.unit, segment.state), []).append(
            scale.span(segment.start, segment.stop)
        )
    for (unit, state), found in spans.items():
        axes.broken_barh(
            found,
            (lane[unit] + top, height),
            facecolors=_COLORS[state],
            edgecolors="white",
            linewidth=0 if scale.dense else 0.4,
        )
    for unit in {each.unit for each in lanes.kept}:
        axes.broken_barh(
            [scale.span(each.start, each.stop) for each in lanes.kept if each.unit == unit],
            (lane[unit] + 0.19, 0.22),
            facecolors=_GRADIENT,
            edgecolors="white",
            linewidth=0 if scale.dense else 0.4,
        )
    middle = top + height / 2
    reductions = {
        kind: [
            (scale.at(lanes.ends[lanes.program.trace.ends[each.event]]), lane[each.unit] + middle)
            for each in lanes.reductions
            if each.kind == kind
        ]
        for kind in _REDUCTIONS
    }
    # At the upper edge of the lane, where no reduction is.
    demands = [
        (scale.at(lanes.boundary(each.event)), lane[each.unit] + top + 0.06)
        for each in lanes.gathers
        if each.kind == "on demand"
    ]
    for points, marker, size, face in (
        (reductions["full"], "D", 15, _REDUCTIONS["full"]),
        (reductions["partial"], "D", 15, _REDUCTIONS["partial"]),
        (demands, "v", 34, _GATHERS["on demand"]),
    ):
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            marker=marker,
            s=size / 3 if scale.dense else size,
            facecolor=face,
            edgecolors=_INK,
            linewidth=0.3 if scale.dense else 0.6,
            zorder=3,
            clip_on=False,
        )
    for place, marker in ((0, "<"), (lanes.stop, ">")):
        axes.scatter(
            [scale.at(place)] * len(lanes.program.carried),
            [lane[unit] + middle for unit in lanes.program.carried],
            marker=marker,
            s=30,
            color=_COLORS["F"],
            zorder=4,
            clip_on=False,
        )
    axes.set_ylim(len(units) - 0.5, -0.5)
    axes.set_yticks(range(len(units)), [unit.name for unit in units], fontsize=8)


def _draw_memory(axes: Axes, lanes: Lanes, scale: _Scale) -> None:
    if not lanes.program.trace.events:
        return
    edges = [scale.at(each.start) for each in lanes.memory]
    values = list(lanes.memory)
    if lanes.stop > values[-1].start:
        edges.append(scale.at(lanes.stop))
    else:
        values.pop()
    parameters = [each.parameters for each in values]
    both = [each.parameters + each.gradients for each in values]
    axes.stairs(parameters, edges, fill=True, color=_PARAMETERS)
    if lanes.kept:
        axes.stairs(both, edges, baseline=parameters, fill=True, color=_GRADIENT)
    axes.stairs(both, edges, color=_INK, linewidth=0.6 if scale.dense else 1.0)
    peak = _peak(lanes)
    ticks = {0: "0", peak: format_bytes(peak)}
    highest = peak
    if capacity := lanes.program.capacity:
        places = [scale.at(lanes.boundary(position)) for position in range(len(capacity) + 1)]
        axes.stairs(capacity, places, baseline=None, color=_CAPACITY, linewidth=1.0, ls=(0, (4, 2)))
        if (allowed := max(capacity)) <= _TALLEST * peak:
            highest = max(peak, allowed)
        if peak + 0.15 * highest < allowed <= highest:
            ticks[allowed] = format_bytes(allowed)
    axes.set_ylim(0, 1.15 * max(highest, 1))
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.grid(axis="y", color=_FAINT, linewidth=0.5)
    axes.set_axisbelow(True)


def _peak(lanes: Lanes) -> int:
    return max((each.parameters + each.gradients for each in lanes.memory), default=0)


def _draw_phases(axes: Axes, lanes: Lanes, scale: _Scale) -> None:
    """Shade backward calls; mark calls faintly and changes of phase strongly."""
    calls = lanes.program.trace.calls
    whole = axes.get_xaxis_transform()  # y from 0 to 1
    axes.broken_barh(
        [
            scale.span(lanes.boundary(call.start), lanes.boundary(call.stop))
            for call in calls
            if call.phase == "B"
        ],
        (0, 1),
        transform=whole,
        color=_COLORS["B"],
        alpha=0.07,
        zorder=0,
        lw=0,
    )
    for changes, color, width in ((False, _FAINT, 0.5), (True, _INK, 0.4 if scale.dense else 0.9)):
        axes.vlines(
            [
                scale.at(lanes.boundary(call.start))
                for before, call in pairwise(calls)
                if (before.phase != call.phase) == changes
            ],
            0,
            1,
            transform=whole,
            color=color,
            linewidth=width,
            zorder=0.5,
        )


def _legend(lanes: Lanes) -> Iterator[Artist]:
    """What colours and marks mean, of those that occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {segment.state for segment in lanes.segments}
    for state, text in _LEGEND.items():
        if state in found:
            yield Patch(facecolor=_COLORS[state], label=text)
    kinds = {each.kind for each in (*lanes.gathers, *lanes.reductions)}
    for occurs, marker, size, face, text in (
        ("on demand" in kinds, "v", 6, _GATHERS["on demand"], "gather on demand"),
        ("full" in kinds, "D", 4, _REDUCTIONS["full"], "reduction starts"),
        ("partial" in kinds, "D", 4, _REDUCTIONS["partial"], "partial reduction starts"),
        (bool(lanes.program.carried), ">", 5, _COLORS["F"], "carried between windows"),
    ):
        if occurs:
            yield Line2D(
                [],
                [],
                ls="",
                marker=marker,
                ms=size,
                markerfacecolor=face,
                markeredgecolor=_INK,
                markeredgewidth=0.6,
                label=text,
            )
    if lanes.kept:
        yield Patch(facecolor=_GRADIENT, label="full gradient kept")
    if lanes.program.trace.events:
        yield Patch(facecolor=_PARAMETERS, label="full parameters")
    if capacity := lanes.program.capacity:
        allowed = max(capacity)
        hidden = allowed > _TALLEST * _peak(lanes)
        yield Line2D(
            [],
            [],
            color=_CAPACITY,
            ls=(0, (4, 2)),
            lw=1.0,
            label=f"capacity, up to {format_bytes(allowed)}"
            + (" (beyond the top)" if hidden else ""),
        )
