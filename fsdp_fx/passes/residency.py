"""Pass: keep units and full gradients resident where there is memory for them.

Merges the intervals of a unit whose gap it is kept through, and takes out the reductions of
gradients that are kept. What is worth it is decided by :mod:`fsdp_fx.planning.residency`; how
far ahead the gathers that are left are issued, by :mod:`fsdp_fx.passes.prefetch`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from fsdp_fx.occupancy import used_intervals
from fsdp_fx.passes.intervals import merge_intervals
from fsdp_fx.planning.lookahead import Lookahead, covered_from
from fsdp_fx.planning.measurements import Measurements
from fsdp_fx.planning.memory import kept_gradient_bytes, needed_bytes
from fsdp_fx.planning.residency import keep, lookahead_bytes
from fsdp_fx.planning.room import budgeted_room, bytes_beyond_peak, interval_bytes
from fsdp_fx.program import Program, reduce

__all__ = ["MemoryBudget", "keep_resident"]

MemoryBudget = int | str | None


def keep_resident(
    program: Program,
    budget: MemoryBudget,
    forward: Lookahead,
    backward: Lookahead,
    gradients: bool,
    frozen: bool,
    measurements: Measurements,
) -> Program:
    """Keep what saves the most bytes of communication within the budget.

    Args:
        program: gathers on demand but for what is kept at any rate, every reduction that the user's choice asks for, no frees.
        budget: bytes of full parameters and full gradients that may stay beyond the units in
            use and those that the lookahead covers; ``"auto"`` for the recorded room, of
            which the lookahead takes its part, ``"auto+4GiB"`` for so much more; None for nothing, and no limit.
        forward: lookahead of forward events.
        backward: lookahead of backward events.
        gradients: whether full gradients may be kept.
        frozen: whether frozen units may be kept for the next window.
        measurements: with the recorded room, for ``"auto"``.

    Returns:
        The program with its capacity.

    Raises:
        ValueError: ``"auto"`` without a recorded room.
    """
    if budget is None:
        return program
    trace = program.trace
    there = used_intervals(program)
    covered = covered_from(trace, forward, backward)
    needed = interval_bytes(trace, there)
    beyond = bytes_beyond_peak(budget)
    if beyond is not None:
        if measurements.room is None:
            raise ValueError(f'memory_budget="{budget}" needs the memory of a recorded window')
        # The window that was metered kept nothing after a forward.
        room = [
            max(0, left + beyond - (used - least))
            for left, used, least in zip(
                measurements.room, needed, needed_bytes(trace), strict=True
            )
        ]
    else:
        assert isinstance(budget, int)
        room = budgeted_room(budget, lookahead_bytes(trace, there, covered))
    reductions = [position for position, step in enumerate(program.steps) if step.reduces]
    kept = keep(
        trace,
        there,
        covered,
        room,
        gradients=gradients,
        recorded=measurements.gradients if beyond is not None else None,
        carries=frozen,
    )
    graph = program.copy_graph()
    merge_intervals(graph, trace, kept.gathers)
    for node in graph.find_nodes(op="call_function", target=reduce):
        if program.positions[cast(str, node.kwargs["after"])] in kept.reductions:
            graph.erase_node(node)
    # The capacity is for gradients at their own size: less where they take more of the room.
    waiting = kept_gradient_bytes(trace, [at for at in reductions if at not in kept.reductions])
    taken = kept.gradient_bytes or [0] * len(trace)
    return replace(
        program.with_graph(graph),
        capacity=tuple(
            left + used + gradient - counted
            for left, used, gradient, counted in zip(room, needed, waiting, taken, strict=True)
        ),
        carried=kept.carried,
        unproven=kept.unproven,
    )
