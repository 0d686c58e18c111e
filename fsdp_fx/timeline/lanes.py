"""What a timeline shows, before anyone draws it: spans of time by lane.

Time is counted in events, the position of an event being its time, or in nanoseconds, if
durations say how long things take and :mod:`fsdp_fx.planning.simulation` when they happen.
Everything else is the same: a :class:`_Clock` maps the positions of a program to time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsdp_fx.occupancy import outline_of
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.memory import Interval, contributions
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.simulation import RankSimulation, simulate
from fsdp_fx.program import Program
from fsdp_fx.trace import Trace

__all__ = [
    "Collective",
    "Kept",
    "Lanes",
    "Memory",
    "Segment",
    "State",
    "lanes_of",
    "rows_of",
    "title",
]

State = Literal["in flight", "F", "B", "held"]


@dataclass(frozen=True)
class Segment:
    """A time in which a unit is resident in one state.

    Args:
        unit: name of the unit.
        state: ``"in flight"``, in use by a forward (``"F"``) or backward (``"B"``), or
            ``"held"``: gathered and not in use.
        start: its beginning; in events the position of its first event.
        stop: its end; in events the position after its last event.
    """

    unit: str
    state: State
    start: int
    stop: int


@dataclass(frozen=True)
class Collective:
    """A gather or a reduction.

    In events nobody knows how long one takes: a gather then lasts from its issue to its
    wait, which is no time if it is on demand, and a reduction lasts one event.

    Args:
        unit: name of the unit.
        kind: of a gather ``"ahead"`` or ``"on demand"``; of a reduction ``"full"``, or
            ``"partial"`` if it leaves out the all-reduce over replicas.
        event: position of the event that waits for the gather, or after whose use the
            reduction comes.
        start: when it starts.
        stop: when it ends.
    """

    unit: str
    kind: Literal["ahead", "on demand", "full", "partial"]
    event: int
    start: int
    stop: int


@dataclass(frozen=True)
class Kept:
    """A time in which a full gradient waits for the next backward of its unit.

    Args:
        unit: name of the unit.
        start: when the use ended whose reduction was put off.
        stop: when its next reduction starts.
    """

    unit: str
    start: int
    stop: int


@dataclass(frozen=True)
class Memory:
    """What is resident from a moment on.

    Args:
        start: the moment.
        parameters: bytes of full parameters, gathered or in flight.
        gradients: bytes of full gradients that are kept for a later reduction.
    """

    start: int
    parameters: int
    gradients: int


@dataclass(frozen=True)
class Lanes:
    """Everything that a timeline shows.

    Args:
        program: the program.
        simulated: what its simulation came to; None if time is counted in events.
        starts: when the compute of each event starts.
        ends: when it ends.
        gathers: the gathers, in the order of their issue.
        reductions: the reductions, in the order of their issue.
        segments: where units are resident, by unit in adoption order, then by time.
        kept: where full gradients are kept, in the order in which they begin.
        memory: at least one for each event, the last for the time after the last event.
        stop: the end of the last of all.
    """

    program: Program
    simulated: RankSimulation | None
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    segments: tuple[Segment, ...]
    kept: tuple[Kept, ...]
    memory: tuple[Memory, ...]
    stop: int

    def boundary(self, position: int) -> int:
        """When compute is done with every event before ``position``."""
        return _Clock(self.starts, self.ends).boundary(position)


def title(lanes: Lanes, caption: str | None) -> str:
    """What a timeline is called: its numbers of events, units and chunks, after the caption."""
    trace = lanes.program.trace
    counts = [
        (len(trace), "event"),
        (len(trace.units), "unit"),
        (len({unit.chunk for unit in trace.units}), "chunk"),
    ]
    text = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    return f"{caption}: {text}" if caption else text


def rows_of(spans: Sequence[Collective]) -> list[list[Collective]]:
    """Spans that overlap in rows of their own; one row if none do.

    Args:
        spans: collectives, by their start.

    Returns:
        Rows, in each of which one ends before the next one starts.
    """
    rows: list[list[Collective]] = []
    for span in spans:
        for row in rows:
            if row[-1].stop <= span.start:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def lanes_of(program: Program, durations: Durations | None = None) -> Lanes:
    """Everything that a timeline of a program shows.

    Args:
        program: a program that verifies.
        durations: how long things take; without them time is counted in events.

    Raises:
        ValueError: the durations are not those of the program's trace.
    """
    outline = outline_of(program)
    trace = program.trace
    simulated = None if durations is None else simulate([outline], [durations]).ranks[0]
    if simulated is None:
        starts = tuple(range(len(trace)))
        ends = tuple(range(1, len(trace) + 1))
    else:
        starts, ends = simulated.starts, simulated.ends
    clock = _Clock(starts, ends)
    gathers = tuple(_gathers(outline, clock, simulated))
    reductions = tuple(_reductions(program, outline, clock, simulated))
    stop = max([clock.boundary(len(trace)), *(each.stop for each in reductions)])
    segments = _segments(outline, clock, stop)
    kept = tuple(_kept(outline, clock))
    return Lanes(
        program=program,
        simulated=simulated,
        starts=starts,
        ends=ends,
        gathers=gathers,
        reductions=reductions,
        segments=segments,
        kept=kept,
        memory=_memory(outline, clock, segments, kept, stop),
        stop=stop,
    )


@dataclass(frozen=True)
class _Clock:
    """Maps positions of a trace to time.

    Args:
        starts: when the compute of each event starts.
        ends: when it ends.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def boundary(self, position: int) -> int:
        """When compute is done with every event before ``position``."""
        return self.ends[position - 1] if position else 0


def _gathers(
    outline: Outline, clock: _Clock, simulated: RankSimulation | None
) -> Iterator[Collective]:
    for index, interval in enumerate(outline.gathers):
        kind: Literal["ahead", "on demand"] = (
            "ahead" if interval.gathered < interval.waited else "on demand"
        )
        if simulated is None:
            start, stop = clock.starts[interval.gathered], clock.starts[interval.waited]
        else:
            start, stop = simulated.gathers[index].start, simulated.gathers[index].stop
        yield Collective(interval.unit, kind, interval.waited, start, stop)


def _reductions(
    program: Program, outline: Outline, clock: _Clock, simulated: RankSimulation | None
) -> Iterator[Collective]:
    trace = program.trace
    for index, position in enumerate(outline.reductions):
        unit = trace[position].unit
        kind: Literal["full", "partial"] = (
            "partial" if unit in program.steps[position].partial else "full"
        )
        if simulated is None:
            start = clock.boundary(trace.ends[position] + 1)
            stop = start + 1
        else:
            start, stop = simulated.reductions[index].start, simulated.reductions[index].stop
        yield Collective(unit, kind, position, start, stop)


def _segments(outline: Outline, clock: _Clock, stop: int) -> tuple[Segment, ...]:
    """The segments of every unit; those of carried ones until ``stop``."""
    order = {unit.name: index for index, unit in enumerate(outline.trace.units)}
    gathered = {id(interval) for interval in outline.gathers}
    last = {interval.unit: interval for interval in outline.intervals}
    found: list[Segment] = []
    for interval in outline.intervals:
        there = id(interval) not in gathered
        segments = list(_split(outline.trace, clock, interval, there))
        if interval.unit in outline.carried and interval is last[interval.unit]:
            end = segments[-1]
            if end.state == "held":
                segments.pop()
                segments.append(replace(end, stop=stop))
            else:
                segments.append(Segment(interval.unit, "held", end.stop, stop))
        found += (segment for segment in segments if segment.start < segment.stop)
    return tuple(sorted(found, key=lambda segment: (order[segment.unit], segment.start)))


def _split(trace: Trace, clock: _Clock, interval: Interval, there: bool) -> Iterator[Segment]:
    """The segments of one interval: runs of positions in equal state.

    Args:
        trace: the window.
        clock: its time.
        interval: the interval.
        there: whether the unit is there at the beginning, without a gather.
    """
    arrival = clock.starts[interval.waited]
    if there:
        yield Segment(interval.unit, "held", 0, arrival)
    elif interval.gathered < interval.waited:
        yield Segment(interval.unit, "in flight", clock.starts[interval.gathered], arrival)
    else:
        yield Segment(interval.unit, "in flight", clock.boundary(interval.gathered), arrival)
    states: list[State] = ["held"] * (interval.freed + 1 - interval.waited)
    for use in interval.uses:
        for position in range(use, min(trace.ends[use], interval.freed) + 1):
            states[position - interval.waited] = trace[use].phase
    start = 0
    for index in range(1, len(states) + 1):
        if index == len(states) or states[index] != states[start]:
            yield Segment(
                interval.unit,
                states[start],
                clock.boundary(interval.waited + start) if start else arrival,
                clock.boundary(interval.waited + index),
            )
            start = index


def _kept(outline: Outline, clock: _Clock) -> Iterator[Kept]:
    """Where full gradients wait: from a use whose reduction is put off to the next one."""
    trace = outline.trace
    reduced = set(outline.reductions)
    since: dict[str, int] = {}
    for position in contributions(trace):
        unit, place = trace[position].unit, trace.ends[position] + 1
        if position not in reduced:
            since.setdefault(unit, place)
        elif (start := since.pop(unit, place)) < place:
            yield Kept(unit, clock.boundary(start), clock.boundary(place))
    for unit, start in since.items():  # of a program that has no reductions yet
        yield Kept(unit, clock.boundary(start), clock.boundary(len(trace)))


def _memory(
    outline: Outline,
    clock: _Clock,
    segments: tuple[Segment, ...],
    kept: tuple[Kept, ...],
    stop: int,
) -> tuple[Memory, ...]:
    """What is resident, at every event and wherever it changes, up to the last event."""
    size = {unit.name: unit for unit in outline.trace.units}
    parameters: defaultdict[int, int] = defaultdict(int)
    gradients: defaultdict[int, int] = defaultdict(int)
    for segment in segments:
        parameters[segment.start] += size[segment.unit].bytes
        parameters[segment.stop] -= size[segment.unit].bytes
    for unit in outline.carried:  # their last segments end with everything, but they stay
        parameters[stop] += size[unit].bytes
    for each in kept:
        gradients[each.start] += size[each.unit].kept_gradient_bytes
        gradients[each.stop] -= size[each.unit].kept_gradient_bytes
    times = {clock.boundary(position) for position in range(len(outline.trace) + 1)}
    result: list[Memory] = []
    now = Memory(0, 0, 0)
    for time in sorted(times | parameters.keys() | gradients.keys()):
        if time in times or parameters[time] or gradients[time]:
            now = Memory(time, now.parameters + parameters[time], now.gradients + gradients[time])
            result.append(now)
    return tuple(result)
