"""Private names of torch outside of FSDP2, that the eager executor relies on.

:mod:`fsdp_fx.units` has FSDP2's; :mod:`fsdp_fx.compile.torch_internals` has the
compiler's. Kept apart so that a new torch is checked in three places and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

__all__ = [
    "accumulates_gradient",
    "active_compile_callback",
    "add_forward_hook",
    "add_forward_pre_hook",
    "compile_backend",
    "current_graph_task",
    "graph_break_reasons",
    "queue_callback",
    "remove_forward_hooks",
    "skip_code",
]

try:
    from torch._C import _current_graph_task_id as _graph_task_id
    from torch._C import _will_engine_execute_node
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.utils import counters
    from torch.autograd.variable import Variable

    _queue = Variable._execution_engine.queue_callback
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"fsdp_fx supports torch 2.11 to 2.14; torch {torch.__version__} lacks a name that "
        f"its hooks need: {error}"
    ) from error


def current_graph_task() -> int:
    """The number of the autograd pass that is running, or -1."""
    return int(_graph_task_id())


def accumulates_gradient(leaf: torch.Tensor) -> bool:
    """Whether the autograd pass that is running adds to the gradient of ``leaf``."""
    return bool(_will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the autograd pass that is running ends."""
    _queue(callback)


def active_compile_callback() -> Callable[..., object] | None:
    """What torch.compile would call for the next Python frame, or None outside of it."""
    callback = get_eval_frame_callback()
    return callback if callable(callback) else None


def compile_backend(callback: object) -> object:
    """The backend behind torch.compile's callback: what ``backend=`` named."""
    attributes = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
    seen: list[object] = []
    while callback not in seen:
        seen.append(callback)
        for attribute in attributes:
            inner = getattr(callback, attribute, None)
            if inner is not None:
                callback = inner
                break
    return callback


def graph_break_reasons() -> list[str]:
    """Why torch.compile broke graphs so far, the first line of each reason, the latest last."""
    return [str(reason).strip().splitlines()[0] for reason in counters["graph_break"]]


def add_forward_pre_hook(module: nn.Module, key: str, hook: Callable[..., Any]) -> None:
    """Like ``register_forward_pre_hook(prepend=True, with_kwargs=True)`` under a key of ours.

    The public method numbers hooks, torch.compile guards on the number, and identical
    chunks would not share a graph.
    """
    hooks: Any = module._forward_pre_hooks
    # Not by OrderedDict.move_to_end: torch 2.11's compiler reads the order of insertion.
    others = [(other, each) for other, each in hooks.items() if other != key]
    hooks.clear()
    hooks[key] = hook
    hooks.update(others)
    with_kwargs: Any = module._forward_pre_hooks_with_kwargs
    with_kwargs[key] = True


def add_forward_hook(module: nn.Module, key: str, hook: Callable[..., Any]) -> None:
    """Like ``register_forward_hook(always_call=True)`` under a key of ours."""
    hooks: Any = module._forward_hooks
    always_called: Any = module._forward_hooks_always_called
    hooks[key] = hook
    always_called[key] = True


def remove_forward_hooks(module: nn.Module, key: str) -> None:
    """Undo :func:`add_forward_pre_hook` and :func:`add_forward_hook`."""
    hooks: Any
    for hooks in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_always_called,
    ):
        hooks.pop(key, None)
