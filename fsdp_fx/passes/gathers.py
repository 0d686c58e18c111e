"""Pass: gather every unit on demand.

Puts a gather and its wait directly before the compute that needs them. Moving gathers
ahead is :mod:`fsdp_fx.passes.prefetch`'s; freeing is :mod:`fsdp_fx.passes.frees`'s.
"""

from __future__ import annotations

from torch import fx

from fsdp_fx.program import Program, compute_nodes, gather, wait

__all__ = ["insert_gathers"]


def insert_gathers(program: Program) -> Program:
    """Give every compute the full parameters of its unit.

    An event whose unit is still in use by an earlier event (a parent that calls itself,
    two microbatches of one owner at once) shares that event's value.

    Args:
        program: computes without arguments, one per event.

    Returns:
        The program with one gather and one wait per interval.
    """
    trace = program.trace
    graph = program.copy_graph()
    held: dict[str, tuple[fx.Node, int]] = {}  # a unit's value, and where its uses end
    for position, node in enumerate(compute_nodes(graph)):
        event = trace[position]
        end = trace.ends[position]
        if event.unit in held and held[event.unit][1] >= position:
            full, held_until = held[event.unit]
            end = max(end, held_until)
        else:
            with graph.inserting_before(node):
                handle = graph.create_node(
                    "call_function", gather, (event.unit,), {}, f"gather_{event}"
                )
                full = graph.create_node("call_function", wait, (handle,), {}, f"wait_{event}")
        held[event.unit] = full, end
        node.args = (full,)
    return program.with_graph(graph)
