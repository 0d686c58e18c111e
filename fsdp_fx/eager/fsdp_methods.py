"""What FSDP2's own methods do on a module that a context schedules.

A method that says what the context does anyway is accepted, so that a training loop may
keep it. One that would decide what the program decides is refused, by name and with what
to write in its place. The others (custom collectives, divide factors, the all-reduce hook)
configure collectives that the context issues through FSDP2; they are left as they are.
Methods of the module that ``register_fsdp_forward_method`` wraps are forwards as any other.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..calls import MethodCall
from ..torch_internals import run_forward_hook, run_forward_pre_hook
from ..units import Unit, redirect_forward_methods
from ..window import Window
from .casts import CAST_KEY
from .hooks import HOOKS_KEY

__all__ = ["restore_methods", "shadow_methods"]


@dataclass(frozen=True)
class _Flag:
    """A method that takes a flag, and the flag has one value that is right here.

    Args:
        says_the_same: whether a value says what the context does.
        instead: what to do where it does not.
    """

    says_the_same: Callable[[Any, Window], bool]
    instead: str


def _true(value: Any, window: Window) -> bool:
    return bool(value)


def _recorded(value: Any, window: Window) -> bool:
    return bool(value) or not window.closes_itself


_FLAGS = {
    "set_requires_gradient_sync": _Flag(
        lambda value, window: bool(value) or window.reduce_gradients == "per_window",
        'build the context with mode="recorded", reduce_gradients="per_window" to reduce once per '
        "window, or remove it",
    ),
    # A recorded window all-reduces once, and its close is what a last backward is.
    "set_requires_all_reduce": _Flag(_recorded, 'mode="recorded" all-reduces once per window'),
    "set_is_last_backward": _Flag(_recorded, 'mode="recorded" takes several backwards'),
    "set_reshard_after_forward": _Flag(
        _true,
        "give reshard_after_forward=False to fully_shard() before adopt(), or memory_budget to the "
        "context, which keeps what is worth keeping",
    ),
    "set_reshard_after_backward": _Flag(
        _true, "give memory_budget to the context, which keeps what is worth keeping"
    ),
    "set_unshard_in_backward": _Flag(_true, "remove it: a backward gathers what it needs"),
    "set_reduce_scatter_unused_params": _Flag(
        _true, "remove it: zeros always stand in for gradients that a rank has not computed"
    ),
}

_REFUSED = {
    "unshard": "remove it: the program gathers ahead of need; forward_prefetch says how far",
    "set_modules_to_forward_prefetch": "remove it: the program prefetches; forward_prefetch says "
    "how far ahead",
    "set_modules_to_backward_prefetch": "remove it: the program prefetches; backward_prefetch says "
    "how far ahead",
    "set_post_optim_event": "remove it: a window's gathers wait for the stream that it begins on",
    "set_reduce_scatter_max_input_buffers": "call it before adopt()",
    "reset_iter_state": "call abort() of the context",
    "_set_unshard_async_op": "remove it: the program says when a gather starts",
}

_RESHARD = "reshard"


def shadow_methods(module: nn.Module, units: Sequence[Unit], window: Window) -> None:
    """Put what the methods mean here in front of those of ``module``'s class.

    Args:
        module: a module that ``fully_shard`` was called on.
        units: its units.
        window: of its context; held weakly.
    """
    name = units[0].spec.name if units else type(module).__name__
    reference = weakref.ref(window)
    for method in (*_FLAGS, *_REFUSED):
        if hasattr(FSDPModule, method):  # some are newer than the oldest torch supported
            module.__dict__[method] = functools.partial(_call, method, name, reference)
    module.__dict__[_RESHARD] = functools.partial(_reshard, name, tuple(units), reference)
    redirect_forward_methods(module, functools.partial(_enter_method, reference), _leave_method)


def restore_methods(module: nn.Module) -> None:
    """Undo :func:`shadow_methods`, but for the methods that are forwards: those are FSDP2's
    again when its hooks are (:func:`fsdp_fx.units.detach`).
    """
    for method in (*_FLAGS, *_REFUSED, _RESHARD):
        module.__dict__.pop(method, None)


def _call(
    method: str, name: str, reference: weakref.ref[Window], *args: Any, **kwargs: Any
) -> None:
    signature = inspect.signature(getattr(FSDPModule, method))
    arguments = signature.bind(None, *args, **kwargs).arguments
    flag = _FLAGS.get(method)
    window = reference()
    if flag is None:
        raise RuntimeError(
            f"{name}: {method}() has no effect on a module that a context schedules; "
            f"{_REFUSED[method]}"
        )
    value = list(arguments.values())[1]
    if window is not None and not flag.says_the_same(value, window):
        raise RuntimeError(
            f"{name}: {method}({value}) has no effect on a module that a context schedules; "
            f"{flag.instead}"
        )


def _reshard(name: str, units: Sequence[Unit], reference: weakref.ref[Window]) -> None:
    # Also what moves or converts a module calls.
    window = reference()
    if window is None:
        return
    if window.is_open:
        raise RuntimeError(
            f"{name}: reshard() in the middle of window {window.number}, where the program says when "
            "a unit is freed; free, move or convert a module between windows"
        )
    window.residency.free_idle(units)


# What a method of ``register_fsdp_forward_method`` runs in: what a forward does.


def _enter_method(
    reference: weakref.ref[Window], module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    window = None if torch.compiler.is_compiling() else reference()
    if window is None:
        return _run_pre_hooks(module, args, kwargs)
    # FSDP2's wrapper does not say when the method raises.
    window.method = MethodCall(sys._getframe(1))
    try:
        return _run_pre_hooks(module, args, kwargs)
    finally:
        window.method = None


def _run_pre_hooks(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    for key in (HOOKS_KEY, CAST_KEY):
        args, kwargs = run_forward_pre_hook(module, key, args, kwargs)
    return args, kwargs


def _leave_method(module: nn.Module, args: Any, output: Any) -> Any:
    for key in (HOOKS_KEY, CAST_KEY):
        output = run_forward_hook(module, key, args, output)
    return output
