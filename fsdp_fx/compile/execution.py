"""A captured graph at run time: which units, which place in the window, which slice.

At each call, :class:`ScheduledGraph` finds the units from the parameters that it is
given, checks once that the graph's events are the next ones of the program, and runs the
host code for that slice. Distinct slices are lowered once; what a place in a program
needs is looked up by position after the first time. Where no program says what to do
(recording, evaluation, divergence), the same host code gathers on demand.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..calls import ForwardCall
from ..context import FSDPContext, context_of_unit
from ..eager.backward import watch_pass
from ..inspection import show
from ..library import BoundProgram, BoundStep
from ..report import GraphKey
from ..torch_internals import current_autograd_node, differentiated_function
from ..units import Unit, unit_of_tensor
from ..window import Window
from .host_graph import HostGraph
from .lowering import SliceStep, graph_events, lower
from .regions import CompiledRegion, SplitGraph

__all__ = ["Direction", "ScheduledGraph"]

Direction = Literal["forward", "backward", "inference"]

_CALL = "_fsdp_fx_call"  # of an autograd node: the forward call that it belongs to

_SliceKey = tuple[tuple[SliceStep, ...], int, bool]


@dataclass(frozen=True)
class _BoundSlice:
    """Host code and the units, besides the graph's own, that it is called with."""

    run: Callable[[list[Any]], Sequence[Any]]
    others: tuple[Unit, ...]


class ScheduledGraph:
    """One AOTAutograd graph, cut into compiled regions.

    Args:
        number: number of the captured graph, for display.
        direction: which of the captured graph's graphs it is.
        split: the graph.
        runs: the code of its regions.
        slots: placeholder to slot, of the managed parameters that the graph takes.
        borrowed: placeholders of parameters whose units eager hooks hold: their units
            are not scheduled by the graph, only checked to be there.
        differentiable: whether a backward graph belongs to it.
    """

    def __init__(
        self,
        number: int,
        direction: Direction,
        split: SplitGraph,
        runs: Sequence[CompiledRegion],
        slots: Mapping[str, int],
        borrowed: Sequence[str],
        differentiable: bool,
    ) -> None:
        self.number = number
        self.direction: Direction = direction
        self._split = split
        self._runs = tuple(runs)
        self._events = graph_events(split)
        self._differentiable = differentiable
        places = {name: place for place, name in enumerate(split.placeholders)}
        self._places_of_slot: list[list[int]] = []
        for name, slot in sorted(slots.items(), key=lambda item: (item[1], places[item[0]])):
            while len(self._places_of_slot) <= slot:
                self._places_of_slot.append([])
            self._places_of_slot[slot].append(places[name])
        self._borrowed = [places[name] for name in borrowed]
        self._index = {event.slot: index for index, event in enumerate(self._events)}
        # For each event, the last event that has begun when its unit is given up.
        begins = [event.begins for event in self._events]  # in order
        self._ends = tuple(
            bisect.bisect_right(begins, max(event.ends, event.begins)) - 1 for event in self._events
        )
        self._variants: dict[_SliceKey, tuple[str, HostGraph]] = {}
        self._plain: HostGraph | None = None
        self._checked: weakref.WeakSet[Unit] = weakref.WeakSet()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph on ``inputs``, which is cleared, in its place in the window."""
        units = self._bind(inputs)
        context = context_of_unit(units[0]) if units else self._context_of_borrowed(inputs)
        if context is None:
            return self._without_schedule(units)([None, *inputs])
        window = context.window
        backward = self.direction == "backward"
        call = self._backward_call(window) if backward else self._forward_call(window)
        if not backward:
            call.captured += 1
        accumulates = self._accumulates(units, inputs) if backward else None
        keeps = accumulates is not False
        if accumulates:
            window.note_accumulation()
        if self._differentiable and not backward:
            for event in self._events:
                unit = units[event.slot]
                call.outstanding[unit] = call.outstanding.get(unit, 0) + 1
        complete = tuple(
            backward and window.contribute(units[event.slot], call, accumulates=keeps)
            for event in self._events
        )
        start = window.cursor
        held = [(unit, unit.holds, unit.unsharded or unit.in_flight) for unit in units]
        position: int | None = None
        if self._events:
            position = window.begin_slice(
                [units[event.slot] for event in self._events],
                "B" if backward else "F",
                self._ends,
                call,
            )
        if position is None:
            if call.training and backward:
                window.note_reductions(start, [i for i, done in enumerate(complete) if done])
            # An evaluation frees what it has brought in, and nothing that was there before.
            frees = tuple(call.training or not there for _, _, there in held)
            bound = self._on_demand(context, units, call, complete, frees, keeps)
        else:
            assert window.following is not None
            if backward:
                # Contributions that are still missing here did not come when it was recorded.
                steps = window.following.steps[position : position + len(complete)]
                complete = tuple(
                    done or (step.contributed and step.unit.contributed)
                    for done, step in zip(complete, steps, strict=True)
                )
            bound = self._slice(context, window.following, position, units, call, complete, keeps)
        lent = self._lend(window, inputs)
        arguments = [window.residency, *units, *bound.others, *inputs]
        inputs.clear()
        try:
            result = bound.run(arguments)
        except BaseException:
            if not call.training:  # nobody calls abort() after that
                for unit, holds, there in held:
                    self._give_up(window, unit, unit.holds - holds, frees=not there)
                for unit in lent:
                    self._give_up(window, unit, 1)
                if backward:
                    for unit in units:
                        unit.drop_unwritten_gradients()
            raise
        for unit in lent:
            self._give_up(window, unit, 1)
        return result

    @staticmethod
    def _give_up(window: Window, unit: Unit, uses: int, frees: bool = True) -> None:
        for _ in range(uses):
            window.residency.release(unit)
        if frees:
            window.residency.free(unit)

    def _without_schedule(self, units: Sequence[Unit]) -> Callable[[list[Any]], Sequence[Any]]:
        """The regions in order and nothing else, for a graph without managed parameters."""
        if units:
            raise ReferenceError(
                f"graph {self.number} {self.direction} ran after its FSDPContext was deleted: "
                "keep the context as long as its chunks"
            )
        if self._plain is None:
            title = f"{self.direction} without units"
            self._plain = lower(self._split, self._runs, (), (), 0, False, title)
        return self._plain.forward

    # Units

    def _bind(self, inputs: Sequence[Any]) -> list[Unit]:
        units = []
        for slot, places in enumerate(self._places_of_slot):
            unit = unit_of_tensor(inputs[places[0]]) if places else None
            if unit is None:
                raise RuntimeError(
                    f"graph {self.number} {self.direction}: the parameter of unit input {slot} "
                    "belongs to no adopted unit: was its module released, or deleted?"
                )
            if unit not in self._checked:
                for place in places[1:]:
                    if unit_of_tensor(inputs[place]) is not unit:
                        raise RuntimeError(
                            f"graph {self.number} {self.direction} was captured for a chunk whose "
                            f"parameters are grouped differently than those of {unit.spec.name}: "
                            "call fully_shard() on the same modules in every chunk of a class, or "
                            "give the chunks different classes"
                        )
                self._checked.add(unit)
            units.append(unit)
        return units

    def _context_of_borrowed(self, inputs: Sequence[Any]) -> FSDPContext | None:
        for place in self._borrowed:
            unit = unit_of_tensor(inputs[place])
            if unit is not None:
                return context_of_unit(unit)
        return None

    def _lend(self, window: Window, inputs: Sequence[Any]) -> list[Unit]:
        """Units that eager hooks should hold but do not: gathered for this call alone.

        A gradient that reaches the graph other than through the module's outputs passes
        the module's hooks by.
        """
        lent: list[Unit] = []
        for place in self._borrowed:
            unit = unit_of_tensor(inputs[place])
            if unit is not None and not unit.holds and unit not in lent:
                window.residency.acquire(unit)
                lent.append(unit)
        return lent

    def _forward_call(self, window: Window) -> ForwardCall:
        if not window.current:
            return ForwardCall("", window.number, -1, training=False)
        call = window.current[-1]
        if self._differentiable:
            node = differentiated_function()
            if node is not None:
                setattr(node, _CALL, call)
        return call

    def _backward_call(self, window: Window) -> ForwardCall:
        """The forward call that this is the backward of.

        Not the one that hooks have entered last: several may be differentiated in one pass,
        and a pass may begin at something else than the outputs of a module that has hooks.
        """
        call: ForwardCall | None = getattr(current_autograd_node(), _CALL, None)
        if call is None:
            return window.backward_call or ForwardCall("", window.number, -1, training=False)
        if call is not window.backward_call:
            window.enter_backward(call)
        if window.on_pass_end is not None:
            watch_pass(window, window.on_pass_end)
        return call

    def _accumulates(self, units: Sequence[Unit], inputs: Sequence[Any]) -> bool | None:
        """Whether the autograd pass adds gradients to parameters: ``autograd.grad()`` does not.

        None if the graph has no trainable parameter to ask.
        """
        for unit, places in zip(units, self._places_of_slot, strict=True):
            for place in places:
                accumulates = unit.accumulates(inputs[place])
                if accumulates is not None:
                    return accumulates
        return None

    # Slices

    def _on_demand(
        self,
        context: FSDPContext,
        units: Sequence[Unit],
        call: ForwardCall,
        complete: Sequence[bool],
        frees: Sequence[bool],
        keeps: bool,
    ) -> _BoundSlice:
        per_backward = context.window.reduce_gradients != "per_window" or not call.training
        held_back = [context.window.keeps_partial_sums(unit, call) for unit in units]
        steps = tuple(
            SliceStep(
                frees=(event.slot,) if frees[event.slot] else (),
                reduces=(event.slot,) if done and per_backward else (),
                partial=(event.slot,) if done and per_backward and held_back[event.slot] else (),
                keeps=(event.slot,) if done and not per_backward else (),
            )
            for event, done in zip(self._events, complete, strict=True)
        )
        name = "on demand" if all(frees) else f"evaluation {len(self._variants)}"
        return _BoundSlice(self._variant(context, call, steps, units, keeps, name), ())

    def _slice(
        self,
        context: FSDPContext,
        following: BoundProgram,
        position: int,
        units: Sequence[Unit],
        call: ForwardCall,
        complete: tuple[bool, ...],
        keeps: bool,
    ) -> _BoundSlice:
        slices = following.slices.setdefault(self, {})
        key = (position, complete, keeps)
        bound = slices.get(key)
        if bound is None:
            stop = position + len(self._events)
            steps = following.steps[position:stop]
            bound = self._bind_slice(context, steps, units, call, complete, keeps)
            slices[key] = bound
        assert isinstance(bound, _BoundSlice)
        return bound

    def _bind_slice(
        self,
        context: FSDPContext,
        steps: Sequence[BoundStep],
        units: Sequence[Unit],
        call: ForwardCall,
        complete: Sequence[bool],
        keeps: bool,
    ) -> _BoundSlice:
        inputs = {unit: index for index, unit in enumerate(units)}
        others: list[Unit] = []

        def refer(named: Sequence[Unit]) -> tuple[int, ...]:
            for unit in named:
                if unit not in inputs:
                    inputs[unit] = len(inputs)
                    others.append(unit)
            return tuple(inputs[unit] for unit in named)

        slice_steps = tuple(
            SliceStep(
                gathers=refer(step.gathers),
                prefetches=refer(step.prefetches),
                frees=refer(step.frees),
                reduces=refer(step.reduces),
                partial=refer([u for u in step.reduces if u in step.partial]),
                keeps=refer([step.unit] if done and step.unit not in step.reduces else []),
            )
            for step, done in zip(steps, complete, strict=True)
        )
        name = f"slice {len(self._variants)}"
        return _BoundSlice(
            self._variant(context, call, slice_steps, list(inputs), keeps, name), tuple(others)
        )

    def _variant(
        self,
        context: FSDPContext,
        call: ForwardCall,
        steps: tuple[SliceStep, ...],
        units: Sequence[Unit],
        keeps: bool,
        name: str,
    ) -> Callable[[list[Any]], Sequence[Any]]:
        key = (steps, len(units), keeps)
        made = key not in self._variants
        if made:
            title = f"graph {self.number} {self.direction}, {name}"
            graph = lower(self._split, self._runs, self._events, steps, len(units), keeps, title)
            self._variants[key] = (name, graph)
        name, graph = self._variants[key]
        graph.note_call(f"{call}, {self.direction}", [unit.spec for unit in units])
        context.report.graphs.setdefault(
            GraphKey(call.chunk, self.direction, self.number, name), graph
        )
        if made:
            show("graph_code", graph.title, partial(graph.print_readable, False, regions=False))
        return graph.forward
