"""A slice of the program between the regions of a graph: straight-line host code.

:func:`lower` writes an ``fx.GraphModule`` that runs a graph's regions in order, with the
gathers, waits, frees and reductions of one slice around them. The graph names no units:
they are its first inputs, so that one graph serves identical chunks and every window.

The generated function takes one list and clears it, drops every value after its last
use, and hands each region its arguments in a list that the region clears: an activation
dies when it has been read for the last time.

This module decides nothing: which units a slice names comes from the program.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .host_graph import HostGraph, pack
from .regions import CompiledRegion, SplitGraph
from .torch_internals import boxed_codegen

__all__ = ["GraphEvent", "SliceStep", "graph_events", "lower"]


@dataclass(frozen=True)
class GraphEvent:
    """One compute event of a graph.

    Attributes:
        slot: the slot whose parameters are needed.
        begins: the region before which they must be there.
        ends: the region after which they are no longer needed.
        gradients_ready: the region after which all of the slot's gradients exist; None
            where the graph computes none.
    """

    slot: int
    begins: int
    ends: int
    gradients_ready: int | None


@dataclass(frozen=True)
class SliceStep:
    """What the host does around one event of a graph, in terms of the graph's unit inputs.

    Attributes:
        gathers: unit inputs to gather before the event's unit is waited for.
        prefetches: unit inputs to gather after that.
        frees: unit inputs to free when the unit is no longer needed.
        reduces: unit inputs to reduce when the slot's gradients exist.
        partial: those of ``reduces`` that are not all-reduced over their replicas yet.
        keeps: unit inputs whose gradients are kept full, in the reduction dtype.
    """

    gathers: tuple[int, ...] = ()
    prefetches: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    reduces: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()


def graph_events(split: SplitGraph) -> tuple[GraphEvent, ...]:
    """The compute events of a graph, in the order in which it first uses the slots.

    A slot whose gradient is computed without reading its parameters (an embedding, a
    bias) has its event where the gradient is ready: the order of events is then that of
    eager execution, whose hooks do not know what backward reads.
    """
    begins = {slot: index for index, region in enumerate(split.regions) for slot in region.begins}
    order = {slot: place for place, slot in enumerate(begins)}
    for slot, ready in split.last_gradient_region.items():
        begins.setdefault(slot, ready)
    last = len(order)
    slots = sorted(begins, key=lambda slot: (begins[slot], order.get(slot, last)))
    return tuple(
        GraphEvent(
            slot=slot,
            begins=begins[slot],
            ends=max(begins[slot], split.last_region.get(slot, begins[slot])),
            gradients_ready=split.last_gradient_region.get(slot),
        )
        for slot in slots
    )


def lower(
    split: SplitGraph,
    runs: Sequence[CompiledRegion],
    events: Sequence[GraphEvent],
    steps: Sequence[SliceStep],
    units: int,
    keeps_gradients: bool,
    title: str,
) -> HostGraph:
    """Write the host code of one slice.

    Args:
        split: the graph.
        runs: the code of each of its regions, one object per distinct region.
        events: its events, as :func:`graph_events` gives them.
        steps: what to do around each event.
        units: how many unit inputs there are: the slots, then others that the steps name.
        keeps_gradients: whether the managed parameters' gradients are added at all.
        title: what it is, for printing.

    Returns:
        A graph module whose function takes one list: a
        :class:`~fsdp_fx.residency.Residency`, the units, and the graph's inputs.
    """
    graph = fx.Graph()
    residency = graph.placeholder("residency")
    unit = [graph.placeholder(f"unit_{index}") for index in range(units)]
    values = {name: graph.placeholder(name) for name in split.placeholders}

    def call(target: fx.Node, method: str, *arguments: Any) -> None:
        graph.call_method(method, (target, *arguments))

    def begin(event: GraphEvent, step: SliceStep) -> None:
        for index in step.gathers:
            if index != event.slot:
                call(residency, "prefetch", unit[index])
        call(residency, "acquire", unit[event.slot])
        for index in step.prefetches:
            call(residency, "prefetch", unit[index])

    def end(event: GraphEvent, step: SliceStep) -> None:
        call(residency, "release", unit[event.slot])
        for index in step.frees:
            call(residency, "free", unit[index])

    def finish_gradients(event: GraphEvent, step: SliceStep) -> None:
        pairs = split.gradients.get(event.slot, ())
        if keeps_gradients and pairs:
            parameters = [values[parameter] for parameter, _ in pairs]
            gradients = graph.call_function(pack, tuple(values[name] for _, name in pairs))
            call(unit[event.slot], "add_gradients", parameters, gradients)
        for index in step.reduces:
            partial = (False,) if index in step.partial else ()
            call(residency, "reduce", unit[index], *partial)
        for index in step.keeps:
            call(residency, "keep_gradients", unit[index])

    def lend_accumulators(names: Sequence[str]) -> None:
        wanted: dict[int, list[tuple[str, str]]] = {}
        for name in names:
            if name in lent_by:
                slot, parameter = lent_by[name]
                wanted.setdefault(slot, []).append((parameter, name))
        for slot, pairs in wanted.items():
            parameters = [values[parameter] for parameter, _ in pairs]
            if keeps_gradients:
                method = "transient_gradients" if slot in reduced_at_once else "accumulators"
                lent = graph.call_method(method, (residency, unit[slot], parameters))
            else:
                lent = graph.call_method("scratch_gradients", (unit[slot], parameters))
            for place, (_, name) in enumerate(pairs):
                values[name] = graph.create_node(
                    "call_function", operator.getitem, (lent, place), name=name
                )

    lent_by = {
        name: (slot, parameter)
        for slot, pairs in split.accumulators.items()
        for parameter, name in pairs
    }
    paired = list(zip(events, steps, strict=True))
    reduced_at_once = {event.slot for event, step in paired if event.slot in step.reduces}
    begins: dict[int, list[tuple[GraphEvent, SliceStep]]] = {}
    ends: dict[int, list[tuple[GraphEvent, SliceStep]]] = {}
    finishes: dict[int, list[tuple[GraphEvent, SliceStep]]] = {}
    for event, step in paired:
        ready = event.ends if event.gradients_ready is None else event.gradients_ready
        begins.setdefault(event.begins, []).append((event, step))
        ends.setdefault(event.ends, []).append((event, step))
        finishes.setdefault(max(event.ends, ready), []).append((event, step))
    for index, (region, run) in enumerate(zip(split.regions, runs, strict=True)):
        for event, step in begins.get(index, ()):
            begin(event, step)
        lend_accumulators(region.inputs)
        arguments = graph.call_function(pack, tuple(values[name] for name in region.inputs))
        results = graph.call_function(run, (arguments,))
        for place, name in enumerate(region.outputs):
            values[name] = graph.create_node(
                "call_function", operator.getitem, (results, place), name=name
            )
        for event, step in ends.get(index, ()):
            end(event, step)
        for event, step in finishes.get(index, ()):
            finish_gradients(event, step)
    if not split.regions:
        # Nothing is computed: gradients may still be inputs that are passed on.
        for event, step in paired:
            begin(event, step)
            end(event, step)
            finish_gradients(event, step)
    outputs = split.outputs if isinstance(split.outputs, (list, tuple)) else (split.outputs,)
    graph.output(tuple(_value(output, values) for output in outputs))
    graph.set_codegen(boxed_codegen())
    return HostGraph(graph, units, title, split, runs)


def _value(output: Any, values: dict[str, fx.Node]) -> Any:
    if isinstance(output, str):
        return values[output]
    if isinstance(output, (list, tuple)):
        return type(output)(_value(each, values) for each in output)
    return output
