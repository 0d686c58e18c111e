"""How many bytes of full parameters a program keeps resident, event by event.

Asked by printing, by :mod:`fsdp_fx.passes.verify` and by :mod:`fsdp_fx.timeline`. It
counts what the program gathers; gradients, activations, communication buffers and what
an allocator rounds up are not in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from fsdp_fx.program import Program, operation, unit_of
from fsdp_fx.trace import Trace

__all__ = [
    "Interval",
    "format_bytes",
    "intervals",
    "needed_bytes",
    "peak_resident_bytes",
    "resident_bytes",
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

    A gather that is never freed lasts until the last event.
    """
    gathered: dict[fx.Node, int] = {}
    waited: dict[fx.Node, int] = {}
    uses: dict[fx.Node, list[int]] = {}
    freed: dict[fx.Node, int] = {}
    place = 0  # of the next compute
    for node in program.graph_module.graph.nodes:
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


def resident_bytes(program: Program) -> list[int]:
    """Bytes gathered or in flight at each event's compute.

    A unit counts from its gather to its free. Around a compute, frees come first and
    gathers after them, so these values are also the highest between two computes.

    Returns:
        One value per compute, in bytes.
    """
    size = {unit.name: unit.bytes for unit in program.trace.units}
    curve: list[int] = []
    resident = 0
    for node in program.graph_module.graph.nodes:
        match operation(node):
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
