"""Pass: reduce gradients once all their contributions are in.

Either after every microbatch's backward of a unit, or once per window; over the
replicas of a unit once per window at any rate. Which gradients there is memory to keep full
until a later backward, so that they need no reduction of their own, is decided after this, by
:mod:`fsdp_fx.passes.residency`.
"""

from __future__ import annotations

from typing import Literal

from torch.fx.node import Argument

from fsdp_fx.planning.memory import contributions
from fsdp_fx.program import Program, compute_nodes, place_after, reduce

__all__ = ["ReduceGradients", "insert_reductions"]

ReduceGradients = Literal["per_backward", "per_window", "planned"]


def insert_reductions(program: Program, when: ReduceGradients) -> Program:
    """Reduce the gradients of every trainable unit.

    Args:
        program: a program without reductions.
        when: ``"per_window"`` only for the last position of each unit in
            ``trace.reduces``, otherwise for all of them.

    Returns:
        The program with its reductions. The last one of a replicated unit in the window
        all-reduces; the partial sums of those before it wait for that.
    """
    trace = program.trace
    graph = program.copy_graph()
    computes = compute_nodes(graph)
    positions = contributions(trace)
    if when == "per_window":
        positions = list({trace[position].unit: position for position in positions}.values())
    last = {trace[position].unit: position for position in positions}
    replicated = {unit.name for unit in trace.units if unit.replicas > 1}
    for position in positions:
        event = trace[position]
        arguments: dict[str, Argument] = {"after": str(event)}
        if event.unit in replicated and position != last[event.unit]:
            arguments["all_reduce"] = False
        with graph.inserting_after(place_after(program, computes, position, "reduce")):
            graph.create_node("call_function", reduce, (event.unit,), arguments, f"reduce_{event}")
    return program.with_graph(graph)
