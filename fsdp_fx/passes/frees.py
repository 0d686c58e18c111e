"""Pass: free every unit after its last use.

One free per residency interval, as early as is safe. What an interval spans was decided
before, by :mod:`fsdp_fx.passes.gathers` and :mod:`fsdp_fx.passes.prefetch`.
"""

from __future__ import annotations

from fsdp_fx.program import Program, compute_nodes, free, place_after, unit_of, wait

__all__ = ["insert_frees"]


def insert_frees(program: Program) -> Program:
    """Free every gathered unit when the last use of its interval has ended.

    The last interval of a unit that is carried to the next window is not freed.

    Args:
        program: every compute with the value that it needs; no frees.

    Returns:
        The program with one free per wait.
    """
    trace = program.trace
    graph = program.copy_graph()
    computes = compute_nodes(graph)
    position_of = {node: position for position, node in enumerate(computes)}
    waits = graph.find_nodes(op="call_function", target=wait)
    last_of = {unit_of(full): full for full in waits}
    for full in waits:
        if unit_of(full) in program.carried and last_of[unit_of(full)] is full:
            continue
        # By end, not by position: a parent's use outlasts those of its children.
        last = max(
            (position_of[user] for user in full.users),
            key=lambda position: trace.end_order(position),
        )
        label = str(trace[last])
        with graph.inserting_after(place_after(program, computes, last, "free")):
            graph.create_node("call_function", free, (full,), {"after": label}, f"free_{label}")
    return program.with_graph(graph)
