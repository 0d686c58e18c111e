"""Bytes of full parameters and gradients over a window, event by event.

What a trace needs in any case, and what intervals of residency and put-off reductions add to
it. The gradients that a running backward computes, activations, communication buffers and what
an allocator rounds up are not in it. What a program's graph holds: :mod:`fsdp_fx.occupancy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from fsdp_fx.trace import Trace

__all__ = [
    "Interval",
    "contributions",
    "format_bytes",
    "kept_gradient_bytes",
    "needed_bytes",
    "on_demand",
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
    size = {unit.name: unit.kept_gradient_bytes for unit in trace.units}
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
