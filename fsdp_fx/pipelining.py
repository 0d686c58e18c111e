"""torch.distributed.pipelining schedules on a context.

A schedule that sees an ``FSDPModule`` keeps the whole stage gathered for the whole
step and reduces by itself. :func:`bind` puts a plain shell around each stage's chunk:
the schedule then runs forwards and backwards and leaves gathers, frees and
reductions to the context.

The private names of torch's schedules and stages are used in this module only. Where a
schedule splits the backward into an input and a weight half, the input half is the whole
backward, and the weight half nothing: a compiled backward is one graph, and torch's own
weight half looks for gradients of the parameters that are registered, which are sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from .context import FSDPContext
from .report import Fallback

__all__ = ["StageShell", "bind"]

_SPLIT_BACKWARD = (ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)


class StageShell(nn.Module):
    """Holds a chunk where a schedule looks for its stage's module.

    The chunk is not registered as a submodule: a schedule that walks the modules
    finds no ``FSDPModule`` to gather, reshard or clear the gradients of. Parameters
    are the chunk's, so that gradients are scaled.

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
    name = type(schedule).__name__
    if isinstance(schedule, PipelineScheduleMulti):
        stages = list(schedule._stages)
    elif isinstance(schedule, PipelineScheduleSingle):
        stages = [schedule._stage]
    else:
        raise TypeError(f"bind() takes a torch.distributed.pipelining schedule, not {name}")
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
        if isinstance(schedule, _SPLIT_BACKWARD) and stage.dw_builder is _nothing_left:
            context.report.fall_back(
                Fallback(
                    f"stage {stage.stage_index} (chunk {chunk}) of {name}",
                    "the whole backward runs in its input half",
                    "gathers, frees and reductions of the two halves are not scheduled apart",
                )
            )
    schedule.eval = _as_evaluation(schedule.eval, context)  # type: ignore[method-assign]


def _nothing_left() -> Callable[[], None]:
    """What torch calls after an input half, for its weight half."""
    return lambda: None


def _bind_stage(stage: Any, chunk: str, context: FSDPContext) -> None:
    stage.submod = StageShell(stage.submod)
    if stage.dw_builder is None:
        stage.dw_builder = _nothing_left
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
