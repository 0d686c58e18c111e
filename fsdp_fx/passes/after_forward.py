"""Pass: keep a unit after its forward where ``reshard_after_forward=False`` says so.

Merges its interval with the one that comes next, whatever that costs: it is the user's choice,
and beyond any budget. What else stays is :mod:`fsdp_fx.passes.residency`'s to choose.
"""

from __future__ import annotations

from fsdp_fx.occupancy import used_intervals
from fsdp_fx.passes.intervals import merge_intervals
from fsdp_fx.planning.residency import after_forward
from fsdp_fx.program import Program

__all__ = ["keep_after_forward"]


def keep_after_forward(program: Program) -> Program:
    """Have units that are kept after their forward stay until their next use.

    Args:
        program: gathers on demand, no frees.
    """
    gathers = after_forward(program.trace, used_intervals(program))
    if not gathers:
        return program
    graph = program.copy_graph()
    merge_intervals(graph, program.trace, gathers)
    return program.with_graph(graph)
