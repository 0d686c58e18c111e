"""How far ahead gathers are issued.

Two answers: by events or elements (:func:`reach`), and by time (:func:`latest_starts`).
:func:`hoist` turns either into places, under the memory that there is. How long a unit stays
after its use is a separate question: :mod:`fsdp_fx.planning.residency`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.memory import Interval
from fsdp_fx.trace import Trace

__all__ = ["Hoisting", "Lookahead", "covered_from", "hoist", "latest_starts", "reach"]

Lookahead = int | Literal["timed"] | None
"""Of the events of one phase: ``None`` for exactly one event ahead, 0 for none, ``N`` for as
many successors as fit in ``N`` elements, ``"timed"`` for as early as the measured durations
ask for, and at least one event."""


@dataclass(frozen=True)
class Hoisting:
    """Where gathers are issued.

    Args:
        issued: by the event that first uses an interval, the event at which its gather is
            issued.
        merged: first uses of intervals that begin before the unit would be freed: it stays.
    """

    issued: Mapping[int, int]
    merged: frozenset[int]


def reach(trace: Trace, forward: Lookahead, backward: Lookahead) -> list[int]:
    """For each event, the position of the last event that its lookahead covers.

    Args:
        trace: the window.
        forward: lookahead of forward events. What ``"timed"`` covers at any rate is one
            event ahead.
        backward: lookahead of backward events. The lookahead is that of the event which
            issues the gather: the last forward gathers the first backward.

    Returns:
        One position per event: its own if it looks at nothing, at most the last.
    """
    elements = {unit.name: unit.elements for unit in trace.units}
    last = len(trace) - 1
    result = [0] * len(trace)
    upcoming: dict[str, int] = {}  # units by their next use, the nearest first
    counts = any(isinstance(option, int) and option for option in (forward, backward))
    for position in reversed(range(len(trace))):
        event = trace[position]
        budget = forward if event.phase == "F" else backward
        if budget is None or budget == "timed":
            result[position] = min(position + 1, last)
        elif budget == 0:
            result[position] = position
        else:
            # The event's own unit is there already and costs nothing.
            others = {unit: use for unit, use in upcoming.items() if unit != event.unit}
            spent = accumulate(elements[unit] for unit in others)
            over = (
                use for use, total in zip(others.values(), spent, strict=True) if total > budget
            )
            result[position] = next(over, last + 1) - 1
        if counts:
            upcoming.pop(event.unit, None)
            upcoming = {event.unit: position, **upcoming}
    return result


def covered_from(trace: Trace, forward: Lookahead, backward: Lookahead) -> list[int]:
    """For each event, the first event whose lookahead covers it: its own if none does."""
    furthest = list(accumulate(reach(trace, forward, backward), max))
    return [bisect_left(furthest, position) for position in range(len(trace))]


def latest_starts(
    trace: Trace, intervals: Sequence[Interval], durations: Durations, carried: frozenset[str]
) -> dict[int, int]:
    """The last event at which each gather may be issued so that compute need not wait for it.

    Time runs as if compute never waited. Gathers run one after the other, in the order of
    their uses: one must start so early that it, and those behind it, are done in time.

    Args:
        trace: the window.
        intervals: the residency intervals.
        durations: how long things take.
        carried: units whose first interval needs no gather.

    Returns:
        By the event that waits, a position before it, or its own if that is the first event.
    """
    begins = [0, *accumulate(durations.compute)]
    first: set[str] = set()
    needed: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.waited):
        if interval.unit in carried and interval.unit not in first:
            first.add(interval.unit)
        else:
            needed.append(interval)
    result: dict[int, int] = {}
    start = begins[-1]
    for interval in reversed(needed):
        start = min(start, begins[interval.waited]) - durations.gathers[interval.unit]
        at = bisect_right(begins, start) - 1
        result[interval.waited] = max(min(at, interval.waited - 1), 0)
    return result


def hoist(
    trace: Trace,
    intervals: Sequence[Interval],
    forward: Lookahead,
    backward: Lookahead,
    *,
    room: Sequence[int] | None = None,
    durations: Durations | None = None,
    carried: frozenset[str] = frozenset(),
) -> Hoisting:
    """Decide where each gather is issued.

    Args:
        trace: the window.
        intervals: the residency intervals, gathered on demand, in order.
        forward: lookahead of forward events.
        backward: lookahead of backward events.
        room: bytes that are still free at each event while nothing is gathered ahead; None
            for no limit. Then a unit that is wanted again before it would be freed stays;
            with a limit that is for :mod:`fsdp_fx.planning.residency` to decide.
        durations: how long things take, for a lookahead by time.
        carried: units whose first interval needs no gather.

    Returns:
        The places. Gathers are issued in the order of their uses, each as early as its
        lookahead asks for and the room allows.
    """
    covered = covered_from(trace, forward, backward)
    wanted: dict[int, int] = {}
    if durations is not None and "timed" in (forward, backward):
        wanted = latest_starts(trace, intervals, durations, carried)
    size = {unit.name: unit.bytes for unit in trace.units}
    free = list(room) if room is not None else None
    phases = {"F": forward, "B": backward}
    issued: dict[int, int] = {}
    merged: set[int] = set()
    until: dict[str, int] = {}  # where each unit's interval before ends
    earliest = 0  # so that no gather overtakes one that is needed before
    for interval in sorted(intervals, key=lambda each: each.waited):
        use, unit = interval.waited, interval.unit
        before = until.get(unit, -1)
        until[unit] = max(before, interval.freed)
        if before < 0 and unit in carried:
            issued[use] = use  # in the first window only
            continue
        target = covered[use]
        if free is None and before >= 0 and target <= before:
            merged.add(use)
            continue
        lowest = max(earliest, before + 1)
        place = use
        for position in range(use - 1, max(lowest, min(target, wanted.get(use, use))) - 1, -1):
            if free is not None and free[position] < size[unit]:
                break
            # A place further ahead than events or elements ask for is one by time.
            if position >= target or phases[trace[position].phase] == "timed":
                place = position
        if free is not None:
            for position in range(place, use):
                free[position] -= size[unit]
        issued[use] = earliest = place
    return Hoisting(issued, frozenset(merged))
