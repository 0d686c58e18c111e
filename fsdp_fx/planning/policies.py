"""Plans to compare the planner's with: what others do who do not know the whole window.

:func:`on_demand` keeps nothing, :func:`least_recently_used` keeps what was used last,
:func:`keep_everything` keeps all. Each makes an :class:`~fsdp_fx.planning.outline.Outline`, to
be counted and simulated beside the planner's (:mod:`fsdp_fx.planning.planner`); the package
runs none of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from fsdp_fx.planning.lookahead import covered_from, reach
from fsdp_fx.planning.memory import Interval, contributions
from fsdp_fx.planning.memory import on_demand as gathered_on_demand
from fsdp_fx.planning.outline import Outline
from fsdp_fx.trace import Trace

__all__ = ["keep_everything", "least_recently_used", "on_demand"]

Reductions = Literal["per_backward", "per_window"]


def on_demand(trace: Trace, *, reduce_gradients: Reductions = "per_backward") -> Outline:
    """Gather every unit where it is needed, and free it after.

    Args:
        trace: the window.
        reduce_gradients: after each backward of a unit, or after the last of the window.
    """
    return Outline(trace, gathered_on_demand(trace), _reductions(trace, reduce_gradients))


def least_recently_used(
    trace: Trace,
    budget: int,
    *,
    forward_prefetch: int | None = None,
    backward_prefetch: int | None = None,
    reduce_gradients: Reductions = "per_backward",
) -> Outline:
    """Keep the units that were used last, as many as fit.

    What a cache does that does not know what comes: a unit stays until another needs its room,
    and the one whose last use ended first goes first, whether it is needed again or not. Units
    in use and units that the lookahead covers are not in the budget, as for the planner.

    Args:
        trace: the window.
        budget: bytes of full parameters that may stay beyond those at each event.
        forward_prefetch: the lookahead at a forward: ``None`` for one event, 0 for none, ``N``
            for as many of the next units as fit in ``N`` elements.
        backward_prefetch: the same at a backward.
        reduce_gradients: after each backward of a unit, or after the last of the window. Full
            gradients are not in the budget.

    Raises:
        ValueError: the budget is negative.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes: use 0 or more")
    size = {unit.name: unit.bytes for unit in trace.units}
    furthest = list(accumulate(reach(trace, forward_prefetch, backward_prefetch), max))
    ending: dict[int, list[int]] = {}  # positions, by the place where their use ends
    for position in sorted(range(len(trace)), key=lambda each: trace.end_order(each)):
        ending.setdefault(trace.ends[position], []).append(position)

    found: list[_Residency] = []
    resident: OrderedDict[str, _Residency] = OrderedDict()  # the longest unused first
    needed: Counter[str] = Counter()  # uses that run, or that the lookahead covers
    idle = 0  # bytes of resident units that are not needed
    closed: dict[int, Interval] = {}
    covered = 0  # events before this one have been looked at
    for position, event in enumerate(trace):
        for ahead in range(covered, furthest[position] + 1):
            unit = trace[ahead].unit
            if unit not in resident:
                resident[unit] = _Residency(unit, position, ahead)
                found.append(resident[unit])
            elif needed[unit] == 0:
                idle -= size[unit]
            needed[unit] += 1
        covered = furthest[position] + 1
        if idle > budget:
            for unit in [unit for unit in resident if needed[unit] == 0]:
                evicted = resident.pop(unit)
                closed[id(evicted)] = evicted.closed(position - 1)
                idle -= size[unit]
                if idle <= budget:
                    break
        resident[event.unit].use(position, trace.ends[position])
        for ended in ending.get(position, ()):
            unit = trace[ended].unit
            resident.move_to_end(unit)
            needed[unit] -= 1
            if needed[unit] == 0:
                idle += size[unit]
    last = len(trace) - 1
    return Outline(
        trace,
        tuple(closed.get(id(residency)) or residency.closed(last) for residency in found),
        _reductions(trace, reduce_gradients),
    )


def keep_everything(
    trace: Trace,
    *,
    forward_prefetch: int | None = None,
    backward_prefetch: int | None = None,
    reduce_gradients: Reductions = "per_window",
) -> Outline:
    """Gather every unit once, and free it after its last use.

    Args:
        trace: the window.
        forward_prefetch: the lookahead at a forward, see :func:`least_recently_used`.
        backward_prefetch: the same at a backward.
        reduce_gradients: after the last backward of a unit in the window, or after each.
    """
    issued = covered_from(trace, forward_prefetch, backward_prefetch)
    kept: dict[str, _Residency] = {}
    for position, (event, end) in enumerate(zip(trace.events, trace.ends, strict=True)):
        if event.unit not in kept:
            kept[event.unit] = _Residency(event.unit, issued[position], position)
        kept[event.unit].use(position, end)
    return Outline(
        trace,
        tuple(residency.closed(residency.until) for residency in kept.values()),
        _reductions(trace, reduce_gradients),
    )


@dataclass
class _Residency:
    """An interval whose end is not known yet.

    Args:
        unit: name of the unit.
        gathered: the event at which the gather is issued.
        waited: the event that waits for it.
    """

    unit: str
    gathered: int
    waited: int
    uses: list[int] = field(default_factory=list)
    until: int = -1

    def use(self, position: int, end: int) -> None:
        """Compute uses the unit from ``position`` to ``end``."""
        self.uses.append(position)
        self.until = max(self.until, end)

    def closed(self, freed: int) -> Interval:
        """The interval, if the unit is freed after ``freed``."""
        return Interval(self.unit, self.gathered, self.waited, tuple(self.uses), freed)


def _reductions(trace: Trace, when: Reductions) -> tuple[int, ...]:
    """Positions to reduce after, in the order in which their uses end."""
    positions = contributions(trace)
    if when == "per_window":
        last = {trace[position].unit: position for position in positions}
        positions = [position for position in positions if last[trace[position].unit] == position]
    return tuple(positions)
