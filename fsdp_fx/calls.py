"""What is under way in a window: calls of chunks, uses of units, backwards.

Plain records that the executors hold on to between the beginning of something and its
end. What a beginning or an end does is :mod:`fsdp_fx.window`'s business.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from .trace import Phase
from .units import Unit

__all__ = ["Backward", "DelayedUses", "ForwardCall", "MethodCall", "MethodForward", "Use"]


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One entry into a chunk's forward, and the backward that belongs to it.

    Attributes:
        chunk: name of the chunk.
        window: number of the window that it belongs to.
        microbatch: index among the chunk's training forwards of the window; -1 for
            an evaluation.
        training: whether its events are recorded.
        compiled: whether it was entered under torch.compile.
        captured: how many captured graphs ran in its forward.
        ran_eagerly: units whose own hooks fired in it although it is compiled.
        finished: whether the forward returned.
        needs_backward: whether some output can be differentiated.
        has_backward: whether a backward through it has begun.
        accumulated: whether one has added gradients to parameters.
        outstanding: per unit, forward uses whose backward is still to come.
        module: the unit whose module was entered, where that was not the chunk.
        awaited: modules of it that are differentiated one by one, and whose backward is
            still to come.
        last: the module with whose forward it is finished, where its modules are called
            one by one.
    """

    chunk: str
    window: int
    microbatch: int
    training: bool
    compiled: bool = False
    captured: int = 0
    ran_eagerly: list[str] = field(default_factory=list)
    finished: bool = False
    needs_backward: bool = False
    has_backward: bool = False
    accumulated: bool = False
    outstanding: dict[Unit, int] = field(default_factory=dict)
    module: str | None = None
    awaited: list[str] = field(default_factory=list)
    last: str | None = None

    def __str__(self) -> str:
        kind = f"microbatch {self.microbatch}" if self.training else "an evaluation"
        return f"chunk {self.chunk}, {kind}" if self.module is None else f"{self.module}, {kind}"


@dataclass(eq=False, slots=True)
class Use:
    """A stretch of compute during which a unit's full parameters are needed.

    Attributes:
        unit: the unit.
        phase: ``"F"`` or ``"B"``.
        call: the forward call it belongs to.
        position: position of its event in the window, or None where there is no
            event: in an evaluation and in a recomputation.
        contributes: whether its end completes a forward use that is outstanding.
        accumulates: whether its autograd pass adds gradients to parameters at all, as
            far as was known when it began; an ``autograd.grad()`` of inputs does not.
        recomputes: whether it is a forward inside a backward.
        gathered: whether it brought the unit in, and so frees it where no program says.
        open: whether it is still under way.
    """

    unit: Unit
    phase: Phase
    call: ForwardCall
    position: int | None
    contributes: bool = False
    accumulates: bool = True
    recomputes: bool = False
    gathered: bool = True
    open: bool = True


@dataclass(frozen=True, slots=True)
class DelayedUses:
    """A backward that has run but for the gradients of weights.

    Attributes:
        units: the units that it belongs to.
        call: its forward call.
        uses: what ends once those gradients are there.
    """

    units: tuple[Unit, ...]
    call: ForwardCall
    uses: tuple[Use, ...]


@dataclass(frozen=True, eq=False, slots=True)
class MethodCall:
    """A call of a method that is a forward: no hook hears of it when an exception ends it.

    Attributes:
        frame: where it runs.
        thread: the thread that runs it.
    """

    frame: FrameType
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_over(self) -> bool:
        """Whether it has returned, or an exception has ended it."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None


class MethodForward(Protocol):
    """The forward of a module by a method."""

    @property
    def method(self) -> MethodCall | None:
        """The call of the method."""

    def abandon(self) -> None:
        """An exception has ended it: undo what it began."""


class Backward(Protocol):
    """The backward of one forward through a module."""

    def begin(self) -> None:
        """A gradient of an output has arrived."""

    def end(self) -> None:
        """The gradients of the inputs have been computed, or the autograd pass has ended."""
