"""Pass: issue gathers ahead of the events that need them.

The lookahead of an event says how many of its successors are gathered at it, whatever
their phase or chunk. It is issued after the event's own wait and before its compute, so
that a gather ahead never delays the one that compute is waiting for.

How long a unit stays after its use is not decided here, with one exception: a unit that
the lookahead wants while it is still resident is not gathered again, its two intervals
become one.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import cast

from torch import fx

from fsdp_fx.program import Program, compute_nodes
from fsdp_fx.trace import Trace

__all__ = ["hoist_gathers", "reach"]


def hoist_gathers(program: Program, forward: int | None, backward: int | None) -> Program:
    """Move every gather to the first event whose lookahead reaches its use.

    Args:
        program: gathers on demand, without frees.
        forward: budget of forward events: ``None`` for exactly one event ahead, 0 for
            none, ``N`` for as many successors as fit in ``N`` elements.
        backward: the same for backward events. The budget is that of the event which
            issues the gather: the last forward gathers the first backward.

    Returns:
        The program with its gathers moved, and merged where the unit is still resident.
    """
    trace = program.trace
    graph = program.copy_graph()
    computes = compute_nodes(graph)
    furthest = list(accumulate(reach(trace, forward, backward), max))
    held: dict[str, tuple[fx.Node, int]] = {}  # a unit's value, and where its uses end
    for position, node in enumerate(computes):
        unit, end = trace[position].unit, trace.ends[position]
        full = cast(fx.Node, node.args[0])
        before, until = held.get(unit, (None, -1))
        if full is not before:  # a new interval begins with this event
            handle = cast(fx.Node, full.args[0])
            issue = bisect_left(furthest, position)
            if before is not None and issue <= until:
                # Wanted again before it would be freed: keep it instead.
                full.replace_all_uses_with(before)
                graph.erase_node(full)
                graph.erase_node(handle)
                full = before
            elif issue < position:
                computes[issue].prepend(handle)
        held[unit] = full, max(end, until)
    return program.with_graph(graph)


def reach(trace: Trace, forward: int | None, backward: int | None) -> list[int]:
    """For each event, the position of the last event that its lookahead covers.

    Args:
        trace: the window.
        forward: budget of forward events, see :func:`hoist_gathers`.
        backward: budget of backward events.

    Returns:
        One position per event: its own if it looks at nothing, at most the last.
    """
    elements = {unit.name: unit.elements for unit in trace.units}
    last = len(trace) - 1
    result = [0] * len(trace)
    upcoming: dict[str, int] = {}  # units by their next use, the nearest first
    for position in reversed(range(len(trace))):
        event = trace[position]
        budget = forward if event.phase == "F" else backward
        if budget is None:
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
        upcoming.pop(event.unit, None)
        upcoming = {event.unit: position, **upcoming}
    return result
