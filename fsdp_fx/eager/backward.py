"""How a module's backward is heard of: where it begins, where it ends, where its pass ends.

A hook on each differentiable output begins it, when the first gradient arrives. An
identity on the differentiable inputs ends it, when their gradients have been computed;
the end of the autograd pass ends what is left. What beginning and ending mean is said by
a :class:`~fsdp_fx.calls.Backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..calls import Backward, ForwardCall
from ..torch_internals import PassMarker, current_graph_task, queue_callback, tensor_hooks
from ..units import Unit
from ..window import Window
from .tensors import map_tensors

__all__ = [
    "accumulates",
    "is_marked",
    "mark_inputs",
    "refuse_double_backward",
    "watch_output",
    "watch_pass",
]


class _OutputHook:
    """The hook on one differentiable tensor, for every module whose output it is.

    A parent that returns what its child returned has the same tensor as output. The
    parent's backward begins first, as it would if they differed. A parent that has
    changed it in place has another: the gradient of what the tensor was comes later.
    """

    __slots__ = ("backwards", "version")

    def __init__(self, version: int) -> None:
        self.backwards: list[Backward] = []
        self.version = version

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _OutputHook:
        """The tensor's hook; registered if it has none, as it is now."""
        # Not by an attribute of the tensor, which would be saved with it.
        for hook in tensor_hooks(tensor):
            if isinstance(hook, cls) and hook.version == tensor._version:
                return hook
        hook = cls(tensor._version)
        tensor.register_hook(hook)
        return hook

    def __call__(self, gradient: torch.Tensor) -> None:
        for backward in reversed(self.backwards):
            backward.begin()


_marker = PassMarker()


class _EndOfBackward(torch.autograd.Function):
    """The identity on a module's inputs; its backward is the end of the module's.

    The marker, one leaf more, has no gradient; it tells passes apart.
    """

    @staticmethod
    def forward(ctx: Any, backward: Backward, marker: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.backward_of = backward
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.backward_of.end()
        return (None, None, *gradients)


def mark_inputs(
    backward: Backward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have ``backward`` end when the gradients of all inputs have been computed.

    Returns:
        The inputs to go on with; None if none of them needs a gradient.
    """
    # Not by differentiable_tensors(), which finds more than can be replaced.
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensors.append(tensor)
        return tensor

    map_tensors(collect, (args, kwargs))
    if not tensors:
        return None
    marked = iter(_EndOfBackward.apply(backward, _marker.leaf, *tensors))
    result: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
        lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
    )
    return result


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an input that :func:`mark_inputs` has replaced.

    It is a view, but changing it in place is an error of autograd's own.
    """
    return hasattr(tensor.grad_fn, "backward_of")


def watch_output(backward: Backward, tensor: torch.Tensor) -> None:
    """Have ``backward`` begin when a gradient of ``tensor`` arrives."""
    _OutputHook.of(tensor).backwards.append(backward)


def refuse_double_backward(call: ForwardCall, unit: str) -> None:
    """Raise, before anything has happened, if the backward that begins is to be differentiated.

    Args:
        call: the forward call that it belongs to.
        unit: what messages call the unit.

    Raises:
        RuntimeError: it was started with ``create_graph=True``.
    """
    # Autograd runs hooks with gradients on exactly then.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward with create_graph=True through {call}, unit {unit}: its full parameters "
            "are freed after this backward, so that a second one through it cannot run; "
            "differentiate once, or keep what needs second derivatives out of adopted modules. "
            "Nothing has been reduced: backward() without create_graph may follow"
        )


def watch_pass(window: Window, pass_end: Callable[[], None]) -> None:
    """Have ``window`` hear of the end of the autograd pass that is running.

    Args:
        window: the window.
        pass_end: called after it where the pass was an outermost one.
    """
    task = current_graph_task()
    if not window.enter_pass(task):
        return

    def ended() -> None:
        if window.leave_pass(task):
            pass_end()

    queue_callback(ended)


def accumulates(window: Window, unit: Unit) -> bool:
    """Whether the autograd pass that is running adds gradients to parameters.

    Args:
        window: told if so.
        unit: whose parameters are asked where no module has differentiable inputs, and
            so none has left a marker.
    """
    # A pass for the weights asks for their gradients, and does not accumulate them itself.
    if not (window.in_weight_half or _marker.is_reached() or unit.accumulates_any()):
        return False
    window.note_accumulation()
    return True
