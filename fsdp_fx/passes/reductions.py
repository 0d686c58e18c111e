"""Pass: reduce gradients once all their contributions are in.

Either after every microbatch's backward of a unit, or once per window; over the
replicas of a unit once per window at any rate. It does not decide whether there is memory to keep full gradients until then.
"""

from __future__ import annotations

from typing import Literal

from torch.fx.node import Argument

from fsdp_fx.program import Program, compute_nodes, end_order, place_after, reduce

__all__ = ["ReduceGradients", "insert_reductions"]

ReduceGradients = Literal["per_backward", "per_window"]


def insert_reductions(program: Program, when: ReduceGradients) -> Program:
    """Reduce the gradients of every trainable unit.

    Args:
        program: a program without reductions. Frees are in it already: at one place the
            free comes first, so that the reduction's buffers find its memory.
        when: ``"per_backward"`` for each position in ``trace.reduces``,
            ``"per_window"`` only for the last of each unit.

    Returns:
        The program with its reductions. The last one of a replicated unit in the window
        all-reduces; the partial sums of those before it wait for that.
    """
    trace = program.trace
    graph = program.copy_graph()
    computes = compute_nodes(graph)
    trainable = {unit.name for unit in trace.units if unit.trainable}
    positions = [position for position in trace.reduces if trace[position].unit in trainable]
    positions.sort(key=lambda position: end_order(trace, position))
    if when == "per_window":
        positions = list({trace[position].unit: position for position in positions}.values())
    last = {trace[position].unit: position for position in positions}
    replicated = {unit.name for unit in trace.units if unit.replicas > 1}
    for position in positions:
        event = trace[position]
        arguments: dict[str, Argument] = {"after": str(event)}
        if event.unit in replicated and position != last[event.unit]:
            arguments["all_reduce"] = False
        with graph.inserting_after(place_after(program, computes, position)):
            graph.create_node("call_function", reduce, (event.unit,), arguments, f"reduce_{event}")
    return program.with_graph(graph)
