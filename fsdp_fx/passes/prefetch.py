"""Pass: issue gathers ahead of the events that need them.

The lookahead of an event says how many of its successors are gathered at it, whatever
their phase or chunk. It is issued after the event's own wait and before its compute, so
that a gather ahead never delays the one that compute is waiting for.

Where there is memory for it is a limit here, not a choice: how long a unit stays after its
use is decided before, by :mod:`fsdp_fx.passes.residency`. Without a limit a unit that the
lookahead wants while it is still resident is not gathered again: its two intervals become one.
"""

from __future__ import annotations

from typing import cast

from torch import fx

from fsdp_fx.occupancy import used_intervals
from fsdp_fx.passes.intervals import merge_intervals
from fsdp_fx.planning.lookahead import Lookahead, hoist
from fsdp_fx.planning.measurements import Measurements
from fsdp_fx.planning.memory import kept_gradient_bytes
from fsdp_fx.planning.residency import carry
from fsdp_fx.planning.room import interval_bytes
from fsdp_fx.program import Program, compute_nodes

__all__ = ["hoist_gathers"]


def hoist_gathers(
    program: Program,
    forward: Lookahead,
    backward: Lookahead,
    measurements: Measurements | None = None,
) -> Program:
    """Move every gather to the first event whose lookahead reaches its use.

    Args:
        program: gathers on demand, without frees.
        forward: lookahead of forward events: ``None`` for exactly one event ahead, 0 for
            none, ``N`` for as many successors as fit in ``N`` elements, ``"timed"`` for as
            early as the measured durations ask for.
        backward: lookahead of backward events. The lookahead is that of the event which
            issues the gather: the last forward gathers the first backward.
        measurements: with the durations, for ``"timed"``.

    Returns:
        The program with its gathers moved, no further than its capacity allows.

    Raises:
        ValueError: ``"timed"`` without durations.
    """
    trace = program.trace
    durations = measurements.durations if measurements is not None else None
    if durations is None and "timed" in (forward, backward):
        raise ValueError('a lookahead of "timed" needs the durations of a recorded window')
    there = used_intervals(program)
    room = None
    if program.capacity is not None:
        reductions = [position for position, step in enumerate(program.steps) if step.reduces]
        room = [
            capacity - resident - kept
            for capacity, resident, kept in zip(
                program.capacity,
                interval_bytes(trace, carry(trace, there, program.carried)),
                kept_gradient_bytes(trace, reductions),
                strict=True,
            )
        ]
    hoisting = hoist(
        trace,
        there,
        forward,
        backward,
        room=room,
        durations=durations,
        carried=program.carried,
    )
    graph = program.copy_graph()
    merge_intervals(graph, trace, hoisting.merged)
    computes = compute_nodes(graph)
    for use, place in hoisting.issued.items():
        if place < use:
            full = cast(fx.Node, computes[use].args[0])
            computes[place].prepend(cast(fx.Node, full.args[0]))
    return program.with_graph(graph)
