"""torch.distributed.pipelining schedules on a context.

A schedule that sees an ``FSDPModule`` keeps the whole stage gathered for the whole
step and reduces by itself. :func:`bind` puts a plain shell around each stage's chunk:
the schedule then runs forwards and backwards and leaves gathers, frees and
reductions to the context.

The private names of torch's schedules and stages are used in this module only
(:data:`PRIVATE_NAMES`). Where a schedule splits the backward into an input and a weight
half, torch's own weight half looks for gradients of the parameters that are registered,
which are sharded. Here the halves are computed with the full parameters, which are free to
go in between (:mod:`fsdp_fx.eager.split_backward`). What cannot be split, above all compiled
code, runs whole in the input half, and :meth:`FSDPContext.explain` says so.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .context import FSDPContext
from .eager.split_backward import SplitBackward, WeightGradients
from .report import Fallback
from .torch_internals import saved_by_checkpoint
from .units import missing_private_names, unit_of_tensor

try:
    from torch.distributed.pipelining._backward import (
        construct_reverse_graph,
        get_param_groups,
        stage_backward,
        stage_backward_input,
    )
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
    )
    from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase
except ImportError as error:
    raise ImportError(
        f"fsdp_fx supports torch 2.11 to 2.14; torch {torch.__version__} lacks a name that "
        f"fsdp_fx.pipelining needs: {error}"
    ) from error

__all__ = ["PRIVATE_NAMES", "StageShell", "bind"]

# What of schedules and stages is read or replaced. A tuple holds alternatives: what infers
# the shapes is another method on torch 2.11.
PRIVATE_NAMES: dict[type, tuple[str | tuple[str, str], ...]] = {
    PipelineScheduleSingle: ("_stage", "eval"),
    PipelineScheduleMulti: ("_stages", "eval"),
    _PipelineStageBase: (
        "stage_index",
        "submod",
        "backward_maybe_with_nosync",
        "scale_grads",
    ),
    PipelineStage: (("_compute_outputs", "_shape_inference"),),
}

if _missing := missing_private_names(PRIVATE_NAMES):
    raise ImportError(
        f"fsdp_fx supports torch 2.11 to 2.14; torch {torch.__version__} lacks "
        f"{', '.join(_missing)}"
    )


class StageShell(nn.Module):
    """Holds a chunk where a schedule looks for its stage's module.

    The chunk is not registered as a submodule: a schedule that walks the modules
    finds no ``FSDPModule`` to gather, reshard or clear the gradients of. Parameters
    are the chunk's, so that gradients are scaled; buffers too, so that torch 2.14 restores
    them after it has inferred shapes.

    Args:
        chunk: the stage's module, compiled or not.
    """

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self._chunk = (chunk,)

    @property
    def chunk(self) -> nn.Module:
        """The stage's module."""
        return self._chunk[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the chunk returns."""
        return self.chunk(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The chunk's."""
        return self.chunk.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The chunk's."""
        return self.chunk.named_buffers(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> StageShell:
        """Also sets the chunk's mode, which the schedule sees no other way to."""
        super().train(mode)
        self.chunk.train(mode)
        return self


def bind(schedule: PipelineScheduleSingle | PipelineScheduleMulti, context: FSDPContext) -> None:
    """Let ``context`` schedule the gathers, frees and reductions of ``schedule``.

    After it, a step is ``schedule.step(...)`` and ``context.finish_grad_sync()``; both
    come before the optimizer. Shape inference and ``schedule.eval`` are evaluations.

    Args:
        schedule: a schedule whose stages hold chunks that ``context`` has adopted
            (compiled by torch.compile or not).
        context: a context in recorded mode.

    Raises:
        ValueError: the context is in registration mode, a stage's chunk is not
            adopted, or the schedule is bound already.
        TypeError: not a schedule of torch.distributed.pipelining.
    """
    if context.mode != "recorded":
        raise ValueError(
            "a pipeline schedule interleaves many forwards and backwards, which registration "
            'mode cannot know in advance: build the context with FSDPContext(mode="recorded")'
        )
    stages = _stages_of(schedule)
    names = []
    for stage in stages:
        if isinstance(stage.submod, StageShell):
            raise ValueError(f"stage {stage.stage_index} is bound already: bind a schedule once")
        chunk = context.chunk_name(stage.submod)
        if chunk is None:
            raise ValueError(
                f"the module of stage {stage.stage_index} is not adopted: call "
                "context.adopt() with every stage's module before bind()"
            )
        names.append(chunk)
    for stage, chunk in zip(stages, names, strict=True):
        _bind_stage(stage, chunk, context)
    schedule.eval = _as_evaluation(schedule.eval, context)  # type: ignore[method-assign]
    bound = weakref.ref(schedule)
    context.when_released(lambda: _unbind(bound()))


def _stages_of(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> list[Any]:
    if isinstance(schedule, PipelineScheduleMulti):
        return list(schedule._stages)
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    raise TypeError(
        f"bind() takes a torch.distributed.pipelining schedule, not {type(schedule).__name__}"
    )


def _unbind(schedule: Any) -> None:
    """Undo :func:`bind`: take away what stands in front of the methods of the classes."""
    if schedule is None:
        return
    schedule.__dict__.pop("eval", None)
    for stage in _stages_of(schedule):
        stage.submod = stage.submod.chunk
        for name in ("backward_maybe_with_nosync", "scale_grads", "_compute_outputs"):
            stage.__dict__.pop(name, None)


def _bind_stage(stage: Any, chunk: str, context: FSDPContext) -> None:
    stage.submod = StageShell(stage.submod)
    stage.backward_maybe_with_nosync = _Backwards(stage, chunk, context)
    # Gradients are scaled by the schedule in place: they must have arrived by then.
    scale_grads = _held_weakly(stage.scale_grads)

    def scale_arrived_gradients(grad_scale_factor: int) -> None:
        if context.window.evaluating:
            return  # schedule.eval() would scale the gradients of the step before it
        context.window.flush_gradients(chunk)
        scale_grads(grad_scale_factor)

    stage.scale_grads = scale_arrived_gradients
    # torch 2.13 infers shapes with a real forward and a real backward for the inputs;
    # torch 2.11 with a forward under no_grad, which is an evaluation as it is.
    compute_outputs = getattr(stage, "_compute_outputs", None)
    if compute_outputs is not None:
        stage._compute_outputs = _as_evaluation(compute_outputs, context)


class _Backwards:
    """What a stage runs for a whole backward and for either half of one.

    Args:
        stage: the stage.
        chunk: its chunk's name.
        context: whose units the chunk has.
    """

    def __init__(self, stage: Any, chunk: str, context: FSDPContext) -> None:
        self._whole = _held_weakly(stage.backward_maybe_with_nosync)
        self._where = f"stage {stage.stage_index} (chunk {chunk})"
        self._chunk = chunk
        self._units = [unit for unit in context.units if unit.spec.chunk == chunk]
        self._context = weakref.ref(context)

    def __call__(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        """What ``backward_maybe_with_nosync`` of the stage does for a plain module."""
        if backward_type == "input":
            return self._input_half(**bwd_kwargs)
        if backward_type == "weight":
            half: _WeightHalf | None = bwd_kwargs["param_groups"]
            if half is not None:
                half.compute()
            return (), None
        return self._whole(backward_type, bwd_kwargs, last_backward)

    def _input_half(
        self,
        stage_output: Sequence[torch.Tensor],
        output_grads: Sequence[torch.Tensor | None] | None,
        input_values: Sequence[Any],
    ) -> tuple[Any, _WeightHalf | None]:
        context = self._context()
        assert context is not None
        weights = [weight for unit in self._units for weight in unit.trained_parameters]
        reason = context.why_whole_backwards(self._chunk) or _why_whole(
            stage_output, input_values, weights
        )
        if reason is not None:
            context.report.fall_back(
                Fallback(
                    self._where,
                    "the whole backward runs in its input half",
                    reason,
                )
            )
            # A loss comes alone, and without a gradient.
            outputs: Any = stage_output if output_grads is not None else stage_output[0]
            return stage_backward(outputs, output_grads, input_values), None
        halves = SplitBackward(context.window)
        with halves.input_half():
            gradients, groups = stage_backward_input(
                list(stage_output),
                output_grads,  # type: ignore[arg-type]  # torch's own stage has None in it, too
                list(input_values),
                iter(weights),
            )
        return gradients, _WeightHalf(halves, groups)


class _WeightHalf:
    """The gradients of weights that are left to compute after an input half.

    Args:
        halves: the events of the backward.
        groups: what torch knows of them: for each, the node of the graph where its
            gradients begin, what arrived there, and the leaves where they end.
    """

    def __init__(self, halves: SplitBackward, groups: list[dict[str, Any]]) -> None:
        self._halves = halves
        self._groups = groups

    def compute(self) -> None:
        """Compute them."""
        groups, self._groups = self._groups, []
        self._halves.weight_half([self._piece(group) for group in groups])

    @staticmethod
    def _piece(group: dict[str, Any]) -> WeightGradients:
        weights = [leaf.variable for leaf in group["params"]]
        (node,) = group["intermediates"]  # of several, _why_whole() lets no group pass
        (arrived,) = group.get("grads", ((),))
        group.clear()  # nothing else may keep what has arrived
        units = {unit_of_tensor(weight) for weight in weights}

        def compute() -> None:
            outputs = [index for index, each in enumerate(arrived) if each is not None]
            if outputs:  # else nothing has come so far
                torch.autograd.backward(
                    [GradientEdge(node, index) for index in outputs],
                    [arrived[index] for index in outputs],
                    inputs=weights,
                )

        return WeightGradients(frozenset(unit for unit in units if unit is not None), compute)


# Nodes whose backward is one piece: it would compute all gradients in either half.
_INDIVISIBLE = {
    "CompiledFunctionBackward": "a compiled backward is one graph",
    "CheckpointFunctionBackward": "a reentrant checkpoint has one backward for all gradients",
}


def _why_whole(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], weights: Sequence[torch.Tensor]
) -> str | None:
    """Why the backward of ``outputs`` cannot be split; None if it can."""
    if any(output.requires_grad and output._is_view() for output in outputs):
        return "an output is a view, which torch cannot cut off from its graph"
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    edges = construct_reverse_graph(roots)
    for node in itertools.chain(roots, edges):
        reason = _INDIVISIBLE.get(node.name())
        if reason is not None:
            return reason
        if saved_by_checkpoint(node):
            return "a checkpoint would run again for the gradients of every weight"
    nodes = _nodes(weights)
    used = [node for node in nodes if node in edges]  # a defaultdict, which reading adds to
    groups = get_param_groups(_nodes(inputs), nodes, edges)
    if any(len(group["intermediates"]) > 1 for group in groups):
        # Between the two places everything would run again, in the weight half.
        return "a weight is used in two places"
    found = set().union(*(group["params"] for group in groups))
    if any(node not in found for node in used):
        return "the gradient of a weight does not come by way of an input"
    return None


def _nodes(tensors: Sequence[Any]) -> list[Node]:
    return [
        get_gradient_edge(tensor).node
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]


def _as_evaluation(method: Callable[..., Any], context: FSDPContext) -> Callable[..., Any]:
    weakly = _held_weakly(method)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with context.evaluation():
            return weakly(*args, **kwargs)

    return evaluate


def _held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` for a wrapper that takes its place on its object: holding it is a cycle."""
    if not isinstance(method, MethodType):
        return method
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        assert bound is not None  # it is called through its object
        return bound(*args, **kwargs)

    return call
