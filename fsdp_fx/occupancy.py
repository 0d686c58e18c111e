"""What a program holds, and when: its intervals, its memory curve, its outline.

Read from the graph, for the passes, for the proof, for printing and for pictures. What may
be planned without a graph is in :mod:`fsdp_fx.planning`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fsdp_fx.planning.memory import Interval
from fsdp_fx.planning.outline import Outline
from fsdp_fx.program import Program, operation, unit_of

__all__ = ["intervals", "outline_of", "peak_resident_bytes", "resident_bytes", "used_intervals"]


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


def outline_of(program: Program) -> Outline:
    """What the graph of ``program`` does, as an outline."""
    trace = program.trace
    reduced = [
        (trace.ends[position], trace.end_ranks[position], position)
        for position, step in enumerate(program.steps)
        if step.reduces
    ]
    return Outline(
        trace=trace,
        intervals=intervals(program),
        reductions=tuple(position for _, _, position in sorted(reduced)),
        carried=program.carried,
    )
