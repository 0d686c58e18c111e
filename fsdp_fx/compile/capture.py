"""How a Dynamo graph becomes forward, backward and inference graphs.

A thin layer over AOTAutograd: it names the region compilers, picks the decompositions
that each wants, and says which placeholder of an AOTAutograd graph is which flat input.

It knows nothing of units, gathers or the program; :mod:`fsdp_fx.compile.partition` decides
what is saved between forward and backward and :mod:`fsdp_fx.compile.regions` cuts the
graphs that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import fx

from . import torch_internals

__all__ = [
    "GraphCompiler",
    "ParameterOutputError",
    "PartitionFn",
    "RegionCompilerName",
    "aot_backend",
    "decomposition_table",
    "inference_graph",
    "placeholder_inputs",
    "static_inputs",
]

GraphCompiler: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Graph and example inputs in, a callable with the same inputs out, best a boxed one."""

RegionCompilerName: TypeAlias = Literal["inductor", "eager"] | GraphCompiler
"""What compiles a region."""

PartitionFn: TypeAlias = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""AOTAutograd's ``partition_fn``: a joint graph in, a forward and a backward graph out."""


class ParameterOutputError(RuntimeError):
    """A graph returns, or writes to, the storage of a managed parameter."""


def decomposition_table(
    region_compiler: RegionCompilerName, *, fallback_random: bool = True
) -> Mapping[Any, Callable[..., Any]] | None:
    """The decompositions to capture with.

    Inductor's for Inductor; none for "eager", whose results are then bitwise those of the
    eager model, and none for a callable, which may decompose on its own.
    """
    if region_compiler != "inductor":
        return None
    return torch_internals.inductor_decompositions(fallback_random=fallback_random)


def aot_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition_fn: PartitionFn,
    fw_compiler: GraphCompiler,
    bw_compiler: GraphCompiler,
    inference_compiler: GraphCompiler,
    decompositions: Mapping[Any, Callable[..., Any]] | None,
    parameter_inputs: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Runs AOTAutograd on a Dynamo graph, as a Dynamo backend does.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs; position ``i`` is flat AOTAutograd input ``i``.
        partition_fn: usually from :func:`fsdp_fx.compile.partition.make_partition_fn`.
        fw_compiler: called at once, with the forward graph.
        bw_compiler: called with the backward graph, usually at the first backward.
        inference_compiler: called instead of both where no gradient is needed.
        decompositions: usually :func:`decomposition_table` of the region compiler.
        parameter_inputs: flat input index to slot, of the managed parameters; if given, a
            graph that returns a view of one is refused. (A parameter returned as it is never
            enters the graph: Dynamo hands it over by itself.)

    Raises:
        ParameterOutputError: when the graph is compiled; see ``parameter_inputs``.
    """

    def refuse_parameter_outputs() -> None:
        positions = torch_internals.parameter_alias_outputs(parameter_inputs or {})
        if positions:
            raise ParameterOutputError(
                f"output {', '.join(map(str, positions))} of the compiled function is a view of "
                "a managed parameter; its storage is freed after the call. Return a copy "
                "(`.clone()`) instead"
            )

    def forward_compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_parameter_outputs()
        torch_internals.clear_donated_buffers()
        return fw_compiler(graph, inputs)

    def graph_compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_parameter_outputs()
        return inference_compiler(graph, inputs)

    backend = torch_internals.aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=bw_compiler,
        inference_compiler=graph_compiler,
        partition_fn=partition_fn,
        decompositions=dict(decompositions) if decompositions is not None else None,
    )
    return backend(gm, example_inputs)


def placeholder_inputs(gm: fx.GraphModule) -> dict[str, int]:
    """Placeholder name to flat input index, for every placeholder that is a flat input.

    Holds in the joint, forward, backward and inference graphs. In a backward graph the
    parameters that it needs are there; saved activations and tangents are not. The parts of
    a tensor subclass map to the index of the whole.
    """
    found: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        index = torch_internals.flat_input_index(node)
        if index is not None:
            found[node.name] = index
    return found


def static_inputs(example_inputs: Sequence[Any]) -> frozenset[int]:
    """The flat indices of inputs that belong to a module: its parameters and its buffers."""
    return frozenset(
        index
        for index, value in enumerate(example_inputs)
        if torch_internals.is_static_input(value)
    )


def inference_graph(
    gm: fx.GraphModule, region_compiler: RegionCompilerName, *, fallback_random: bool = True
) -> fx.GraphModule:
    """Prepares an inference graph for :func:`~fsdp_fx.compile.regions.split`.

    What the partition function does to a joint graph that concerns no gradient: Inductor's
    passes over the whole graph, if Inductor compiles the regions. Else nothing.
    """
    if region_compiler != "inductor":
        return gm
    return torch_internals.run_joint_graph_passes(gm, fallback_random=fallback_random)
