"""What is saved between a forward and its backward.

AOTAutograd hands over a joint graph; the partition function made here splits it so that

- every managed parameter whose gradient is computed is an input of the backward graph, even
  where the backward does not read it (an embedding's weight, a bias): the gradient passes
  through :func:`reduce_grad`, which names its parameter;
- nothing that is computed from parameters alone is saved, be it a view (its storage is freed
  in between) or a copy (it would keep the full parameter in memory): such chains are computed
  again in the backward;
- what a checkpoint computes again reads each buffer as it was in the forward, also where the
  graph has written to it since.

It knows slots only as "managed"; where a graph is cut is the business of
:mod:`fsdp_fx.compile.regions`, which also peels :func:`reduce_grad` off again.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from . import torch_internals
from .capture import (
    ParameterOutputError,
    PartitionFn,
    RegionCompilerName,
    placeholder_inputs,
)

__all__ = [
    "SavedCopy",
    "SavedParameterError",
    "is_alias",
    "is_gradient_mark",
    "is_pure",
    "make_partition_fn",
    "mutated_nodes",
    "parameter_chains",
    "reduce_grad",
    "refuse_parameter_writes",
    "saved_parameter_copies",
    "written_inputs",
]

log = logging.getLogger(__name__)


@torch.library.custom_op("fsdp_fx::reduce_grad", mutates_args=())
def reduce_grad(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Marks ``grad`` as the gradient of ``param`` in a graph. It is peeled off, never run."""
    raise RuntimeError(
        "fsdp_fx::reduce_grad only marks a gradient in a graph; the graph that holds it must be "
        "lowered by fsdp_fx.compile, not run"
    )


@reduce_grad.register_fake
def _(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


def is_gradient_mark(node: fx.Node) -> bool:
    """Whether a node is a call of :func:`reduce_grad`."""
    return node.target is torch.ops.fsdp_fx.reduce_grad.default


class SavedParameterError(RuntimeError):
    """A value that a forward saves for its backward is made from parameters alone."""


# --- which values are made from parameters alone --------------------------------------

# Collectives must run as often, and in the order, that the program says.
_COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d"})


def is_pure(node: fx.Node) -> bool:
    """Whether a call may be repeated or moved: no mutation, no randomness, no collective."""
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return (
            not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
            and target.namespace not in _COLLECTIVE_NAMESPACES
            and target is not torch.ops.fsdp_fx.reduce_grad.default
        )
    # Arithmetic on SymInts and unpacking; a higher-order operator is neither.
    return getattr(target, "__module__", None) in ("_operator", "math", "torch")


def is_alias(node: fx.Node) -> bool:
    """Whether the result of a call may share storage with one of its inputs."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem or target is torch.ops.aten._unsafe_view.default:
        return True  # _unsafe_view does alias, whatever its schema says
    return isinstance(target, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in target._schema.returns
    )


def mutated_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value some operator of the graph writes to."""
    mutated: set[fx.Node] = set()
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        for position, argument in enumerate(target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if position < len(node.args):
                value = node.args[position]
            else:
                value = node.kwargs.get(argument.name)
            written = value if isinstance(value, list | tuple) else (value,)
            mutated.update(entry for entry in written if isinstance(entry, fx.Node))
    return mutated


def written_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders that a graph writes to: in it, or by an output that is the new value."""
    flat_inputs = placeholder_inputs(gm)
    descs = gm.graph.output_node().meta.get("desc", ())
    indices = {torch_internals.mutated_input_index(desc) for desc in descs}
    written = mutated_nodes(gm.graph)
    return [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if node in written or flat_inputs.get(node.name, -1) in indices
    ]


def refuse_parameter_writes(gm: fx.GraphModule, parameters: Collection[fx.Node]) -> None:
    """Refuses a graph that writes to managed parameters, in it or when it is over.

    Raises:
        ParameterOutputError: it does.
    """
    written = [node for node in written_inputs(gm) if node in parameters]
    if written:
        named = ", ".join(f"{node.name}{_shape_text(node)}" for node in written)
        raise ParameterOutputError(
            f"the graph writes to the managed parameters {named}; the gathered copy is freed "
            "afterwards, so the change would be lost: change sharded parameters, between calls"
        )


def _shape_text(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def parameter_chains(
    graph: fx.Graph,
    parameters: Collection[fx.Node],
    neutral: Collection[fx.Node] = (),
    *,
    repeatable_only: bool = True,
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The nodes that are computed from parameters alone, each with the parameters it reads.

    Args:
        graph: any AOTAutograd graph.
        parameters: placeholders of parameters.
        neutral: placeholders that do not count, since they are there anyway: buffers,
            unmanaged parameters. SymInts, constants and what is computed from neutral values
            are neutral too, unless the graph writes to them.
        repeatable_only: leave out what cannot be repeated, such as dropout on a weight.
    """
    sources = set(parameters)
    changing = mutated_nodes(graph)
    neutral_values = set(neutral) - sources - changing
    chains: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta.get("val"), int | torch.SymInt | torch.SymFloat):
                neutral_values.add(node)
        elif node.op == "get_attr":
            if node not in changing:
                neutral_values.add(node)
        elif node.op == "call_function" and node not in changing:
            if repeatable_only and not is_pure(node):
                continue
            inputs = node.all_input_nodes
            if not all(i in sources or i in chains or i in neutral_values for i in inputs):
                continue
            read: dict[fx.Node, None] = {}
            for entry in inputs:
                read.update(dict.fromkeys((entry,) if entry in sources else chains.get(entry, ())))
            if read:
                chains[node] = tuple(read)
            else:
                neutral_values.add(node)
    return chains


@dataclass(frozen=True)
class SavedCopy:
    """A saved value that is made from parameters alone."""

    name: str
    parameters: tuple[str, ...]
    repeatable: bool

    def __str__(self) -> str:
        return f"{self.name} (made from {', '.join(self.parameters)})"


def saved_parameter_copies(
    fw_gm: fx.GraphModule,
    num_fwd_outputs: int,
    parameters: Collection[str],
    neutral: Collection[str] = (),
) -> list[SavedCopy]:
    """The values that a forward graph saves and that are made from parameters alone.

    The parameters themselves do not count: saving one keeps no storage alive.

    Args:
        fw_gm: the forward graph.
        num_fwd_outputs: how many of its outputs come before the saved values.
        parameters: names of the managed parameters' placeholders.
        neutral: names of buffers' placeholders; see :func:`parameter_chains`.
    """
    graph = fw_gm.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    sources = [placeholders[name] for name in parameters if name in placeholders]
    others = [placeholders[name] for name in neutral if name in placeholders]
    repeatable = parameter_chains(graph, sources, others)
    made = parameter_chains(graph, sources, others, repeatable_only=False)
    saved = _graph_outputs(fw_gm)[num_fwd_outputs:]
    return [
        SavedCopy(node.name, tuple(source.name for source in made[node]), node in repeatable)
        for node in saved
        if isinstance(node, fx.Node) and node in made
    ]


# --- the partition --------------------------------------------------------------------


def make_partition_fn(
    parameter_inputs: Mapping[int, int],
    *,
    region_compiler: RegionCompilerName = "inductor",
    fallback_random: bool = True,
    neutral_inputs: Collection[int] | None = None,
) -> PartitionFn:
    """Makes the ``partition_fn`` to hand to AOTAutograd.

    Args:
        parameter_inputs: flat input index to slot, of the managed parameters.
        region_compiler: what will compile the regions. For "inductor" its passes over the
            joint graph run first; else the graph is only partitioned, so results stay
            bitwise those of the eager model.
        fallback_random: whether Inductor keeps eager's random numbers.
        neutral_inputs: flat indices of buffers and unmanaged parameters. By default the
            static inputs that AOTAutograd reports, less the managed parameters.

    The partition function raises :class:`SavedParameterError` if a view or copy of a
    parameter is saved all the same, :class:`~fsdp_fx.compile.capture.ParameterOutputError` if the
    graph writes to a parameter, and logs a warning for one that cannot be computed
    again (dropout applied to a weight), which costs memory but is right.
    """

    def partition(
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if region_compiler == "inductor":
            joint = torch_internals.run_joint_graph_passes(joint, fallback_random=fallback_random)

        placeholders = joint.graph.find_nodes(op="placeholder")
        flat_inputs = placeholder_inputs(joint)
        parameters = [n for n in placeholders if flat_inputs.get(n.name) in parameter_inputs]
        if neutral_inputs is None:
            # These indices count placeholders, not flat inputs.
            static = {placeholders[index] for index in static_lifetime_input_indices or ()}
        else:
            static = {n for n in placeholders if flat_inputs.get(n.name) in neutral_inputs}
        neutral = [node for node in placeholders if node in static and node not in set(parameters)]

        refuse_parameter_writes(joint, parameters)
        _mark_gradients(joint, parameters, parameter_inputs)
        _recompute_chains(joint.graph, parameters, neutral)
        _keep_old_values(joint)
        joint.recompile()
        forward, backward = torch_internals.min_cut_rematerialization_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(static_lifetime_input_indices or ()),
            **options,
        )
        _check_saved(
            saved_parameter_copies(
                forward,
                num_fwd_outputs,
                [node.name for node in parameters],
                [node.name for node in neutral],
            )
        )
        return forward, backward

    return partition


def _mark_gradients(
    joint: fx.GraphModule, parameters: Sequence[fx.Node], parameter_inputs: Mapping[int, int]
) -> None:
    """Passes each managed parameter's gradient through :func:`reduce_grad`.

    Marks are put on outputs, not on nodes: one node may be the gradient of two parameters.
    """
    output = joint.graph.output_node()
    values = _graph_outputs(joint)
    descs = output.meta["desc"]
    # The parts of a tensor subclass share one index; each part has its own gradient.
    waiting: dict[int, list[fx.Node]] = {}
    flat_inputs = placeholder_inputs(joint)
    for node in parameters:
        waiting.setdefault(flat_inputs[node.name], []).append(node)
    for position, desc in enumerate(descs):
        index = torch_internals.gradient_input_index(desc)
        if index is None or index not in parameter_inputs or not waiting.get(index):
            continue
        parameter = waiting[index].pop(0)
        gradient = values[position]
        if not isinstance(gradient, fx.Node):
            continue
        with joint.graph.inserting_before(output):
            marked = joint.graph.call_function(
                torch.ops.fsdp_fx.reduce_grad.default, (gradient, parameter)
            )
        marked.meta = dict(gradient.meta)
        for key in ("desc", "recompute", "ac_graph_id"):
            marked.meta.pop(key, None)
        values[position] = marked
    output.args = (_same_structure(output.args[0], values),)


def _recompute_chains(
    graph: fx.Graph, parameters: Sequence[fx.Node], neutral: Sequence[fx.Node]
) -> None:
    """Forbids saving what is made from parameters alone, whatever a checkpoint policy says."""
    for node in parameter_chains(graph, parameters, neutral):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        # With an id the partitioner saves what one checkpointed block passes to the next.
        node.meta.pop("ac_graph_id", None)


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _keep_old_values(joint: fx.GraphModule) -> None:
    """Has what is computed again read a saved copy of each input that the graph writes to.

    The backward would find the new value: running statistics are updated when the forward
    is over, or in it.
    """
    graph = joint.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in written_inputs(joint):
        readers = [user for user in node.users if user.meta.get("recompute") in _RECOMPUTED]
        if not readers:
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(node, copy)


def _check_saved(copies: Sequence[SavedCopy]) -> None:
    avoidable = [copy for copy in copies if copy.repeatable]
    if avoidable:
        raise SavedParameterError(
            "the partitioner saves values for backward that are views or copies of parameters: "
            f"{', '.join(map(str, avoidable))}. They would outlive the gathered parameters; "
            "please report the model operation that makes them"
        )
    for copy in copies:
        log.warning(
            "%s is saved for backward since it cannot be computed again (a random operator on a "
            "weight); it takes as much memory as the parameter until the backward has run",
            copy,
        )


def _graph_outputs(gm: fx.GraphModule) -> list[Any]:
    values = gm.graph.output_node().args[0]
    return list(values) if isinstance(values, list | tuple) else [values]


def _same_structure(original: Any, values: list[Any]) -> Any:
    if isinstance(original, tuple):
        return tuple(values)
    return values if isinstance(original, list) else values[0]
