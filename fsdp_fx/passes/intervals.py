"""What passes have in common that keep units: merging the intervals between which one stays."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from torch import fx

from fsdp_fx.program import compute_nodes
from fsdp_fx.trace import Trace

__all__ = ["merge_intervals"]


def merge_intervals(graph: fx.Graph, trace: Trace, gathers: Collection[int]) -> None:
    """Have the intervals before take in those that begin with some uses.

    Args:
        graph: edited in place.
        trace: the trace that it schedules.
        gathers: positions of the first uses of the intervals that are taken in.
    """
    held: dict[str, fx.Node] = {}  # a unit's value
    for position, node in enumerate(compute_nodes(graph)):
        full = cast(fx.Node, node.args[0])
        if position in gathers:
            handle = cast(fx.Node, full.args[0])
            before = held[trace[position].unit]
            full.replace_all_uses_with(before)
            graph.erase_node(full)
            graph.erase_node(handle)
            full = before
        held[trace[position].unit] = full
