"""A program without its graph: when units are resident and when they are reduced.

What planning compares, simulates and draws. An :class:`Outline` of a program is what
:func:`outline_of` reads from its graph; plans that nobody runs (for machines that nobody has
at hand, or for comparison) are made as outlines at once, by :mod:`fsdp_fx.planning.residency`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_fx.planning.memory import Interval
from fsdp_fx.trace import Trace

__all__ = ["Outline"]


@dataclass(frozen=True)
class Outline:
    """When units are resident, and when their gradients are reduced.

    Args:
        trace: the window.
        intervals: the residency intervals, in the order in which their gathers are issued.
            The gather of an interval that begins with a carried unit is none after the
            first window: the unit is there.
        reductions: positions of the backward events after whose use the event's unit is
            reduced, in the order in which the reductions are issued. At one place frees
            come before them.
        carried: frozen units that stay resident from one window to the next: their last
            interval ends with the window and their first begins with it.
    """

    trace: Trace
    intervals: tuple[Interval, ...]
    reductions: tuple[int, ...]
    carried: frozenset[str] = frozenset()

    @property
    def gathers(self) -> tuple[Interval, ...]:
        """The intervals that are gathered for in every window but the first."""
        first: set[str] = set()
        result = []
        for interval in self.intervals:
            if interval.unit in self.carried and interval.unit not in first:
                first.add(interval.unit)
            else:
                result.append(interval)
        return tuple(result)

    @property
    def bytes_gathered(self) -> int:
        """Bytes of full parameters that the gathers of one window produce."""
        size = {unit.name: unit.bytes for unit in self.trace.units}
        return sum(size[interval.unit] for interval in self.gathers)

    @property
    def bytes_reduced(self) -> int:
        """Bytes of full gradients that the reductions of one window take."""
        size = {unit.name: unit.gradient_bytes for unit in self.trace.units}
        return sum(size[self.trace[position].unit] for position in self.reductions)
