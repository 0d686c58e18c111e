"""How many bytes of full parameters and gradients a program keeps resident, event by event.

Asked by the passes, by printing, by :mod:`fsdp_fx.passes.verify` and by
:mod:`fsdp_fx.timeline`. It counts what the program gathers, and full gradients that wait for
their reduction; the gradients that a running backward computes, activations, communication
buffers and what an allocator rounds up are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx

from fsdp_fx.program import Program, operation, unit_of
from fsdp_fx.trace import Trace

__all__ = [
    "Interval",
    "contributions",
    "format_bytes",
    "intervals",
    "kept_gradient_bytes",
    "needed_bytes",
    "on_demand",
    "peak_resident_bytes",
    "resident_bytes",
    "used_intervals",
]


@dataclass(frozen=True)
class Interval:
    """A time in which a unit is resident, in positions of the trace.

    Args:
        unit: name of the unit.
        gathered: the event at which the gather is issued.
        waited: the event that waits for it; ``gathered`` if it was on demand.
        uses: the events that compute with it.
        freed: the last event at which the unit is resident.
    """

    unit: str
    gathered: int
    waited: int
    uses: tuple[int, ...]
    freed: int


def intervals(program: Program) -> tuple[Interval, ...]:
    """The residency intervals of ``program``, in the order of their gathers.

    A gather that is never freed lasts until the last event. The first interval of a unit
    that is carried from window to window begins with the window.
    """
    gathered: dict[fx.Node, int] = {}
    waited: dict[fx.Node, int] = {}
    uses: dict[fx.Node, list[int]] = {}
    freed: dict[fx.Node, int] = {}
    place = 0  # of the next compute
    for node in program.graph.nodes:
        match operation(node):
            case "gather":
                gathered[node], uses[node] = place, []
            case "wait":
                waited[node.args[0]] = place
            case "compute":
                for full in node.args:
                    uses[full.args[0]].append(place)
                place += 1
            case "free":
                freed[node.args[0].args[0]] = place - 1
    last = len(program.trace) - 1
    for name in program.carried:
        first = next((node for node in gathered if unit_of(node) == name), None)
        if first is not None:
            gathered[first] = 0
    return tuple(
        Interval(
            unit=unit_of(node),
            gathered=start,
            waited=waited.get(node, last),
            uses=tuple(uses[node]),
            freed=freed.get(node, last),
        )
        for node, start in gathered.items()
    )


def used_intervals(program: Program) -> tuple[Interval, ...]:
    """The residency intervals of a program without frees: each to the end of its last use."""
    ends = program.trace.ends
    return tuple(
        replace(interval, freed=max(ends[use] for use in interval.uses))
        for interval in intervals(program)
    )


def resident_bytes(program: Program) -> list[int]:
    """Bytes gathered or in flight at each event's compute.

    A unit counts from its gather to its free; one that is carried from window to window
    counts from the start. Around a compute, frees come first and gathers after them, so
    these values are also the highest between two computes.

    Returns:
        One value per compute, in bytes.
    """
    size = {unit.name: unit.bytes for unit in program.trace.units}
    curve: list[int] = []
    there = set(program.carried)
    resident = sum(size[name] for name in there)
    for node in program.graph.nodes:
        match operation(node):
            case "gather" if unit_of(node) in there:
                there.remove(unit_of(node))
            case "gather":
                resident += size[unit_of(node)]
            case "free":
                resident -= size[unit_of(node)]
            case "compute":
                curve.append(resident)
    return curve


def peak_resident_bytes(program: Program) -> int:
    """The highest value of :func:`resident_bytes`; 0 for a program without events."""
    return max(resident_bytes(program), default=0)


def needed_bytes(trace: Trace) -> list[int]:
    """Bytes of the units in use at each event: no schedule can hold less.

    Returns:
        One value per event, in bytes.
    """
    size = {unit.name: unit.bytes for unit in trace.units}
    ending: dict[int, list[str]] = {}
    running: Counter[str] = Counter()
    curve: list[int] = []
    needed = 0
    for position, event in enumerate(trace):
        if running[event.unit] == 0:
            needed += size[event.unit]
        running[event.unit] += 1
        ending.setdefault(trace.ends[position], []).append(event.unit)
        curve.append(needed)
        for unit in ending.pop(position, ()):
            running[unit] -= 1
            if running[unit] == 0:
                needed -= size[unit]
    return curve


def kept_gradient_bytes(trace: Trace, reductions: Iterable[int]) -> list[int]:
    """Bytes of full gradients that wait for their reduction at each event's compute.

    A gradient waits from the end of a use after which it could be reduced and is not
    (:attr:`Trace.reduces`) until its reduction is issued: also while a later backward of its
    unit adds to it.

    Args:
        trace: the window.
        reductions: positions of the events after which their units are reduced.

    Returns:
        One value per event, in bytes.
    """
    size = {unit.name: unit.gradient_bytes for unit in trace.units}
    reduced = set(reductions)
    change = [0] * (len(trace) + 1)
    kept: dict[str, int] = {}
    for position in contributions(trace):
        unit, place = trace[position].unit, trace.ends[position] + 1
        if position in reduced:
            change[place] -= kept.pop(unit, 0)
        elif unit not in kept:
            kept[unit] = size[unit]
            change[place] += size[unit]
    return list(accumulate(change[:-1]))


def contributions(trace: Trace) -> list[int]:
    """The events after which gradients of trainable units can be reduced, by when they end."""
    trainable = {unit.name for unit in trace.units if unit.trainable}
    return sorted(
        (position for position in trace.reduces if trace[position].unit in trainable),
        key=lambda position: (trace.ends[position], trace.end_ranks[position]),
    )


def on_demand(trace: Trace) -> tuple[Interval, ...]:
    """The residency intervals where every gather is on demand and every free early.

    Uses of a unit that overlap (a parent that calls itself, two microbatches of one owner at
    once) share an interval.
    """
    uses: list[list[int]] = []
    ends: list[int] = []
    held: dict[str, int] = {}  # a unit's last interval
    for position, event in enumerate(trace):
        index = held.get(event.unit, -1)
        if index >= 0 and ends[index] >= position:
            uses[index].append(position)
            ends[index] = max(ends[index], trace.ends[position])
        else:
            held[event.unit] = len(uses)
            uses.append([position])
            ends.append(trace.ends[position])
    return tuple(
        Interval(trace[used[0]].unit, used[0], used[0], tuple(used), end)
        for used, end in zip(uses, ends, strict=True)
    )


def format_bytes(count: int) -> str:
    """``count`` bytes for people, in powers of 1024: ``"1.5 MiB"``."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for suffix in ("KiB", "MiB", "GiB"):
        value /= 1024
        # 1023.95 would print as 1024.0.
        if value < 1023.95:
            return f"{value:.1f} {suffix}"
    return f"{value / 1024:.1f} TiB"
