"""Compiles a plain module through the FSDP-free part of the compile backend.

A stand-in for what gathers and frees: with ``poison`` the parameters hold NaN except from the
region that begins their slot to the last region that needs it, in forward and backward alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fsdp_fx.compile.capture import (
    RegionCompilerName,
    aot_backend,
    decomposition_table,
    inference_graph,
    placeholder_inputs,
    static_inputs,
)
from fsdp_fx.compile.partition import make_partition_fn
from fsdp_fx.compile.regions import RegionCompiler, SplitGraph, split


def slots_by_child(model: nn.Module, children: Sequence[nn.Module]) -> dict[nn.Parameter, int]:
    """Slot i for the parameters of child i; the first child that has a shared one keeps it."""
    slots: dict[nn.Parameter, int] = {}
    for slot, child in enumerate(children):
        for parameter in child.parameters():
            slots.setdefault(parameter, slot)
    for parameter in model.parameters():
        slots.setdefault(parameter, len(children))
    return slots


@dataclass
class Graph:
    kind: str
    gm: fx.GraphModule
    split: SplitGraph
    slots: dict[str, int]
    neutral: list[str]


@dataclass
class RegionBackend:
    """A ``torch.compile`` backend that runs the regions of each graph in order."""

    slots: Mapping[nn.Parameter, int]
    region_compiler: RegionCompilerName = "eager"
    poison: bool = False
    fallback_random: bool = True
    return_gradients: bool = True
    after_region: Callable[[str, int, dict[str, Any]], None] = lambda kind, index, values: None
    graphs: list[Graph] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compiler = RegionCompiler(self.region_compiler, fallback_random=self.fallback_random)
        self.contents: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        if self.poison:
            for parameter, slot in self.slots.items():
                content = (parameter, parameter.detach().clone())
                self.contents.setdefault(slot, []).append(content)
                self._free(slot)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        slot_of = {id(parameter): slot for parameter, slot in self.slots.items()}
        managed = {i: slot_of[id(x)] for i, x in enumerate(example_inputs) if id(x) in slot_of}
        neutral = static_inputs(example_inputs) - managed.keys()

        def lower(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
            def compile_graph(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
                if kind == "inference":
                    graph = inference_graph(
                        graph, self.region_compiler, fallback_random=self.fallback_random
                    )
                inputs = placeholder_inputs(graph)
                slots = {n: managed[i] for n, i in inputs.items() if i in managed}
                static = [n for n, i in inputs.items() if i in neutral]
                pieces = split(graph, slots, neutral=static)
                self.graphs.append(Graph(kind, graph, pieces, slots, static))
                return self._executor(kind, pieces)

            return compile_graph

        return aot_backend(
            gm,
            example_inputs,
            partition_fn=make_partition_fn(
                managed,
                region_compiler=self.region_compiler,
                fallback_random=self.fallback_random,
            ),
            fw_compiler=lower("forward"),
            bw_compiler=lower("backward"),
            parameter_inputs=managed,
            inference_compiler=lower("inference"),
            decompositions=decomposition_table(
                self.region_compiler, fallback_random=self.fallback_random
            ),
        )

    def only(self, kind: str) -> Graph:
        (graph,) = [graph for graph in self.graphs if graph.kind == kind]
        return graph

    def _executor(self, kind: str, pieces: SplitGraph) -> Callable[[list[Any]], Any]:
        compiled = [self.compiler(region) for region in pieces.regions]
        kept = {value for pairs in pieces.gradients.values() for _, value in pairs}
        kept.update(v for v in pieces.outputs if isinstance(v, str))

        def run(arguments: list[Any]) -> Any:
            values = dict(zip(pieces.placeholders, arguments, strict=True))
            arguments.clear()
            for index, (region, function) in enumerate(zip(pieces.regions, compiled, strict=True)):
                for slot in region.begins:
                    self._gather(slot)
                inputs = [values[name] for name in region.inputs]
                for name in region.inputs:
                    if pieces.last_use[name] == index and name not in kept:
                        del values[name]
                values.update(zip(region.outputs, function(inputs), strict=True))
                assert inputs == []
                for slot, last in pieces.last_region.items():
                    if last == index:
                        self._free(slot)
                self.after_region(kind, index, values)
            outputs = [values[v] if isinstance(v, str) else v for v in pieces.outputs]
            if self.return_gradients:
                for pairs in pieces.gradients.values():
                    for parameter, value in pairs:
                        outputs[pieces.gradient_positions[parameter]] = values[value]
            return tuple(outputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    # `.data` has its own version counter, as FSDP's gathers have none: autograd checks the
    # version of the parameters that it saved.
    def _gather(self, slot: int) -> None:
        for parameter, content in self.contents.get(slot, ()):
            parameter.data.copy_(content)

    def _free(self, slot: int) -> None:
        for parameter, _ in self.contents.get(slot, ()):
            parameter.data.fill_(float("nan"))
