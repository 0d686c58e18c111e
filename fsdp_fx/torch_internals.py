"""Private names of torch outside of FSDP2, that the eager executor relies on.

:mod:`fsdp_fx.units` has FSDP2's; :mod:`fsdp_fx.compile.torch_internals` has the
compiler's. Kept apart so that a new torch is checked in three places and no more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]  # public, without stubs

__all__ = [
    "PassMarker",
    "accumulates_gradient",
    "active_compile_callback",
    "add_forward_hook",
    "add_forward_pre_hook",
    "compile_backend",
    "current_autograd_node",
    "current_graph_task",
    "default_store",
    "differentiated_function",
    "graph_break_reasons",
    "inside_autograd_node",
    "inside_dispatch_mode",
    "inside_functorch_transform",
    "is_shared",
    "outside_of_selective_checkpoints",
    "profiling",
    "queue_callback",
    "remove_forward_hooks",
    "saved_by_checkpoint",
    "saved_tensors_hooks",
    "skip_code",
    "tensor_hooks",
    "trace_artifact",
]

try:
    from torch._C import (
        _are_functorch_transforms_active,
        _len_torch_dispatch_stack,
        _storage_Use_Count,
        _will_engine_execute_node,
    )
    from torch._C import _current_autograd_node as _autograd_node
    from torch._C import _current_graph_task_id as _graph_task_id
    from torch._C._autograd import SavedTensor, _top_saved_tensors_default_hooks
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.utils import counters
    from torch._logging import trace_structured  # type: ignore[attr-defined]
    from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
    from torch.autograd.function import BackwardCFunction
    from torch.autograd.variable import Variable
    from torch.distributed.distributed_c10d import _get_default_store
    from torch.utils._python_dispatch import _pop_mode, _push_mode
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    _unpack_hook: property = SavedTensor.unpack_hook  # type: ignore[attr-defined]
    _SELECTIVE_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    _queue = Variable._execution_engine.queue_callback
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"fsdp_fx supports torch 2.11 to 2.14; torch {torch.__version__} lacks a name that "
        f"its hooks need: {error}"
    ) from error


def current_graph_task() -> int:
    """The number of the autograd pass that is running, or -1."""
    return int(_graph_task_id())


def inside_dispatch_mode() -> bool:
    """Whether a ``TorchDispatchMode`` sees the operations that run now."""
    return bool(_len_torch_dispatch_stack())


def inside_functorch_transform() -> bool:
    """Whether a transform of ``torch.func`` sees the operations that run now."""
    return bool(_are_functorch_transforms_active())


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether anything but Python's own references holds a tensor or the memory that it is in.

    A tensor that is a view shares its memory with the one that it is a view of.
    """
    storage = tensor.untyped_storage()  # one more user, besides the tensor
    return tensor._use_count() > 1 or _storage_Use_Count(storage._cdata) > 2  # type: ignore[attr-defined]


def profiling() -> bool:
    """Whether a profiler is recording."""
    return bool(_profiler_enabled())


@contextlib.contextmanager
def outside_of_selective_checkpoints() -> Iterator[None]:
    """Keep what runs inside from selective checkpoints, which save results by their order.

    Other dispatch modes still see it.
    """
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE_CHECKPOINTS)]
    try:
        for mode in others:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in others:
                _pop_mode()
    finally:
        for mode in modes:
            _push_mode(mode)


def current_autograd_node() -> Any | None:
    """The node that an autograd pass is running on this thread, or None.

    That of an autograd Function is the ``ctx`` of its forward.
    """
    return _autograd_node()


def inside_autograd_node() -> bool:
    """Whether a node of some autograd pass is running on this thread.

    In the callback at the end of a pass: whether that pass was started from inside of
    another.
    """
    return _autograd_node() is not None


def differentiated_function() -> Any | None:
    """The context of the autograd Function whose forward is running, if it has a backward.

    A reentrant checkpoint is such a Function: what it runs with gradients off, its
    backward runs again. Where autograd records nothing (gradients are off around the
    Function, or no input needs one) there is none.

    Returns:
        The ``ctx`` of the innermost one on the stack, which is also the node of its
        backward; None outside of one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and code.co_varnames[0] != "self":
            ctx = frame.f_locals.get(code.co_varnames[0])
            # Inside of another Function's forward it is not recorded itself.
            if isinstance(ctx, BackwardCFunction) and ctx.next_functions:
                return ctx
        frame = frame.f_back
    return None


def accumulates_gradient(leaf: torch.Tensor) -> bool:
    """Whether the autograd pass that is running adds to the gradient of ``leaf``."""
    return _will_execute(torch.autograd.graph.get_gradient_edge(leaf).node)


def _will_execute(node: Any) -> bool:
    try:
        return bool(_will_engine_execute_node(node))
    except RuntimeError:
        if _graph_task_id() == -1:
            raise
        return False  # torch does not say for a leaf whose gradient autograd.grad() returns


class PassMarker:
    """A leaf put into autograd graphs, so that a pass through them can be asked about leaves.

    It never gets a gradient. An autograd pass that accumulates into every leaf that it
    reaches would reach it; one that is limited to some inputs would not.
    """

    def __init__(self) -> None:
        self.leaf = torch.zeros((), requires_grad=True)
        # While the node is held, every graph that has the leaf has this node.
        self._node = torch.autograd.graph.get_gradient_edge(self.leaf).node

    def is_reached(self) -> bool:
        """Whether the autograd pass that is running goes on to the leaf."""
        return _will_execute(self._node)


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the autograd pass that is running ends."""
    _queue(callback)


def default_store() -> Store:
    """The key-value store through which the default process group found its ranks."""
    return _get_default_store()


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost pack and unpack hooks on what autograd saves, if there are any."""
    return _top_saved_tensors_default_hooks(False)


def saved_by_checkpoint(node: torch.autograd.graph.Node) -> bool:
    """Whether what ``node`` has saved is with a checkpoint, that of ``use_reentrant=False``."""
    for name in _names_of_saved(type(node)):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            if isinstance(each, SavedTensor):
                # Those of one node have all been saved under the same hooks.
                unpack = _unpack_hook.__get__(each)
                return getattr(unpack, "__module__", None) == "torch.utils.checkpoint"
    return False


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], object]]:
    """What ``tensor.register_hook`` was given, in order."""
    hooks: Any = tensor._backward_hooks
    return list(hooks.values()) if hooks else []


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


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, if ``TORCH_TRACE`` asks for one."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,  # what is planned or bound at run time belongs to no compilation
    )


def graph_break_reasons() -> dict[str, int]:
    """Why torch.compile left code to eager so far, and how often.

    Returns:
        The first line of each reason, the latest last: graph breaks, and frames that were
        compiled too often or that break in a loop, which are left alone as a whole.
    """
    whole = ("recompile limit", "graph break in loop")
    frames = {
        reason: times
        for reason, times in counters["unimplemented"].items()
        if any(mark in reason for mark in whole)
    }
    found: dict[str, int] = {}
    for reason, times in (*counters["graph_break"].items(), *frames.items()):
        line = str(reason).strip().splitlines()[0]
        found[line] = found.get(line, 0) + times
    return found


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


def run_forward_pre_hook(module: nn.Module, key: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run the hook that :func:`add_forward_pre_hook` put on, if there is one.

    Returns:
        The arguments and keyword arguments to go on with.
    """
    hooks: Any = module._forward_pre_hooks
    result = hooks[key](module, args, kwargs) if key in hooks else None
    return (args, kwargs) if result is None else result


def run_forward_hook(module: nn.Module, key: str, args: Any, output: Any) -> Any:
    """Run the hook that :func:`add_forward_hook` put on, if there is one; returns the output."""
    hooks: Any = module._forward_hooks
    result = hooks[key](module, args, output) if key in hooks else None
    return output if result is None else result


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
